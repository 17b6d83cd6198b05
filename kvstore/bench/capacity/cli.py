"""The command `kvstore bench capacity`. Exit codes: 0 computed; 2 an option or the model is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.bench.capacity.loss import read_losses
from kvstore.bench.capacity.models import named_shapes, shapes_for
from kvstore.bench.capacity.report import (
    CAPACITY_HEAD,
    LEFT_OUT_HEAD,
    capacity_lines,
    left_out_lines,
    make_results,
    remarks,
)
from kvstore.bench.capacity.rows import ServiceSizes, capacity_row, claims_from
from kvstore.config import ConfigurationError, ServiceConfig
from kvstore.demo.errors import OptionError
from kvstore.demo.report import CLAIMS_HEAD, claim_lines, to_rich
from kvstore.demo.results import check_target, write_json
from kvstore.fidelity.settings import registered_codecs

_GIB = 2**30
# What `kvstore serve --budget` takes.
_LEAST_BYTES, _MOST_BYTES = 2**21, 2**50
_DEVICES = ("cpu", "cuda")


def capacity(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A folder with config.json, or one of {', '.join(named_shapes())} [default: all of these].",
        ),
    ] = "",
    gib: Annotated[float, typer.Option(help="Budget of the service, GiB.")] = 10.0,
    codecs: Annotated[str, typer.Option(help="Names with commas between them [default: all there are].")] = "",
    device: Annotated[str, typer.Option(help="What the service runs on: cpu or cuda. Nothing is allocated.")] = "cpu",
    max_sessions: Annotated[
        int | None, typer.Option(metavar="COUNT", help="As of `kvstore serve`, it decides slabs [default: 64].")
    ] = None,
    fidelity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of `kvstore fidelity --json` [default: the checkout's results, if any]."),
    ] = None,
    commit: Annotated[str, typer.Option(help="What to note as the commit where this is no checkout.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and claims.")] = None,
) -> None:
    """How many tokens of K and V a budget holds at each codec, beside a bf16 DynamicCache, and what the codec loses."""
    # Without a terminal there is no width to respect: tables stay whole in logs.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if json_file is not None:
        check_target(json_file, "--json", (".json",))
    shapes = shapes_for(model)
    chosen = choose_codecs(codecs)
    sizes = service_sizes(gib, device, max_sessions)
    losses = read_losses(fidelity, chosen)
    rows = [capacity_row(shape, codec, sizes) for shape in shapes for codec in chosen]

    console.print(to_rich(f"Tokens in {gib:g} GiB", CAPACITY_HEAD, capacity_lines(rows, losses)))
    left_out = left_out_lines(rows)
    if left_out:
        console.print(to_rich("Left out", LEFT_OUT_HEAD, left_out))
    claims = [claim.to_json() for claim in claims_from(rows)]
    if claims:
        console.print(to_rich("Claims", CLAIMS_HEAD, claim_lines(claims)))
    for remark in remarks(rows, losses):
        console.print(remark, markup=False, highlight=False)
    if json_file is not None:
        command = f"kvstore bench capacity {shapes[0].name if model else ''}".rstrip() + f" --gib {gib:g}"
        options = (("--codecs", codecs), ("--device", device), ("--max-sessions", max_sessions))
        command += "".join(f" {option} {value}" for option, value in options if value not in ("", "cpu", None))
        write_json(make_results(rows, losses, device=device, command=command, commit=commit), json_file)
        console.print(f"rows and claims: {json_file}", markup=False)


def choose_codecs(text: str) -> tuple[str, ...]:
    """The codecs of a list, each once; all when it is empty. OptionError."""
    possible = registered_codecs()
    chosen = tuple(dict.fromkeys(part for part in text.split(",") if part)) or possible
    unknown = [codec for codec in chosen if codec not in possible]
    if unknown:
        raise OptionError(f"--codecs {unknown[0]}: expected of {', '.join(possible)}; take some of these")
    return chosen


def service_sizes(gib: float, device: str, max_sessions: int | None) -> ServiceSizes:
    """The sizes of a service that is started with these options. OptionError."""
    # Comparing first: not a number is outside of every range.
    if not _LEAST_BYTES <= gib * _GIB <= _MOST_BYTES:
        raise OptionError(
            f"--gib {gib:g}: expected {_LEAST_BYTES / _GIB:.3g} to {_MOST_BYTES // _GIB} GiB, what a service can have; "
            "give for example --gib 10"
        )
    if device not in _DEVICES:
        raise OptionError(f"--device {device}: expected {' or '.join(_DEVICES)}; take one of these")
    try:
        config = ServiceConfig(address=Path("kvstore.sock"), budget_bytes=int(gib * _GIB))
        if max_sessions is not None:
            config = replace(config, max_sessions=max_sessions)
    except ConfigurationError as error:
        raise OptionError(str(error)) from None
    return ServiceSizes(config.budget_bytes, _fixed_bytes(device), config.max_sessions)


def _fixed_bytes(device: str) -> int:
    """What the service itself takes on the device."""
    if device == "cpu":
        return 0
    # Late: it brings gRPC in.
    from kvstore.service.core import PROBE_BYTES

    return PROBE_BYTES
