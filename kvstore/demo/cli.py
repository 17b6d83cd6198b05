"""`kvstore demo`: options, what is printed, the exit code.

Exit codes: 0 the demo ran and no text was wrong (claims about speed may be missed: the table says so); 1 a text or
stored data was wrong, or something failed; 2 an option is wrong; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.demo import models, report
from kvstore.demo.claims import claims_from, not_measured
from kvstore.demo.convert import converted_model
from kvstore.demo.errors import OptionError
from kvstore.demo.play import Outcome, play
from kvstore.demo.plot import draw
from kvstore.demo.program import run_app
from kvstore.demo.results import check_target, describe_device, make_results, write_json
from kvstore.demo.stage import Settings

CODECS = ("int8", "passthrough")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")
_MOST_DOCUMENT_TOKENS = 7000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(name="demo", epilog="Example: kvstore demo --full --json demo.json --plot demo.png")
def demo(
    device: Annotated[str, typer.Option(help="Device that computes and holds the cache: cpu, cuda or cuda:N.")] = "cpu",
    document_tokens: Annotated[int, typer.Option(help="Length of the document both workers read.")] = 3000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each question.")] = 16,
    codec: Annotated[
        str, typer.Option(help="Codec of the document that workers A, B and C share: int8 or passthrough.")
    ] = "int8",
    full: Annotated[bool, typer.Option("--full", help="Everything, faults included (at most 15 minutes).")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a scene that failed.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and claims.")] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw time to first token and memory.")] = Path(
        "kvstore-demo.png"
    ),
    model: Annotated[str, typer.Option(help="smollm2, or tiny: random weights, nothing to install.")] = "smollm2",
) -> None:
    """Two workers answer different questions about one long document; the second starts almost at once.

    Starts a service and its workers as processes of their own, measures them beside the native cache, ends them all.
    """
    # Without a terminal there is no width to respect: tables stay whole in logs.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    settings = check_options(
        device=device,
        document_tokens=document_tokens,
        new_tokens=new_tokens,
        codec=codec,
        model=model,
        full=full,
        keep_going=keep_going,
    )
    check_target(plot, "--plot", (".png",))
    if json_file is not None:
        check_target(json_file, "--json", (".json",))
    if models.needs_folder(model):
        settings = _with_folder(settings, console)
    console.print(f"gpu-kvstore demo: {model}, a document of {document_tokens} tokens, {describe_device(device)}")
    started = time.monotonic()
    try:
        outcome = play(settings, console)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: all processes of the demo are ended\n")
        raise typer.Exit(130) from None
    _show(outcome, settings, console)
    console.print(f"{time.monotonic() - started:.0f} s without installing and converting")
    if json_file is not None:
        command = "kvstore demo" + (" --full" if full else "") + ("" if device == "cpu" else f" --device {device}")
        write_json(make_results(outcome.rows, device=settings.device, command=command), json_file)
        console.print(f"rows and claims: {json_file}")
    if draw(outcome.rows, plot, f"{model}, document of {document_tokens} tokens, {device}"):
        console.print(f"picture: {plot}")
    wrong = [claim.name for claim in claims_from(outcome.rows) if claim.wrong and not claim.holds]
    if wrong or outcome.failures:
        raise typer.Exit(1)


def check_options(
    *, device: str, document_tokens: int, new_tokens: int, codec: str, model: str, full: bool, keep_going: bool
) -> Settings:
    """Settings from options. OptionError names the option, the value and what is possible."""
    if not _DEVICE.fullmatch(device):
        raise OptionError(f"--device {device}: expected cpu, cuda or cuda:N")
    if not 1 <= document_tokens <= _MOST_DOCUMENT_TOKENS:
        raise OptionError(f"--document-tokens {document_tokens}: expected 1 to {_MOST_DOCUMENT_TOKENS}")
    if not 2 <= new_tokens <= 512:
        raise OptionError(f"--new-tokens {new_tokens}: expected 2 to 512")
    if codec not in CODECS:
        raise OptionError(f"--codec {codec}: expected one of {', '.join(CODECS)}")
    if model not in models.NAMES:
        raise OptionError(f"--model {model}: expected one of {', '.join(models.NAMES)}")
    return Settings(
        model=model,
        folder=None,
        document_tokens=document_tokens,
        new_tokens=new_tokens,
        codec=codec,
        device="cuda:0" if device == "cuda" else device,
        full=full,
        keep_going=keep_going,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` and returns the exit code; errors are one text on stderr."""
    return run_app(app, "kvstore demo", arguments)


def _with_folder(settings: Settings, console: Console) -> Settings:
    """Settings with the converted model's folder."""
    return dataclasses.replace(settings, folder=converted_model(lambda text: console.print(text, markup=False)))


def _show(outcome: Outcome, settings: Settings, console: Console) -> None:
    rows = outcome.rows
    claims = claims_from(rows)
    tables = (
        ("Who answered how soon", report.SHARING_HEAD, report.sharing_lines(rows)),
        ("Bytes of one document's KV", report.BYTES_HEAD, report.bytes_lines(rows)),
        ("Texts", report.TEXT_HEAD, report.text_lines(rows)),
        (
            "Claims (bars are stated for SmolLM2 and a document of 3000 tokens)",
            report.CLAIMS_HEAD,
            report.claim_lines(report.claims_json(claims)),
        ),
    )
    for title, head, lines in tables:
        if lines:
            console.print(report.to_rich(title, head, lines))
    if any(not claim.holds and not claim.wrong for claim in claims):
        console.print(
            "A missed time is no error, and the exit code stays 0: few pairs are measured here, and on a small or busy "
            "machine they scatter by 10 to 15 %. The committed results come from `make bench`.",
            markup=False,
        )
    left = not_measured(rows)
    if left:
        console.print(f"not measured: {'; '.join(left)}" + ("" if settings.full else " (--full measures all)"))
    for title, text in outcome.failures:
        console.print(f"FAILED: {title}: {text}", style="bold red", markup=False)
