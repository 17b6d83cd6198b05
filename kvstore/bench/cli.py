"""`kvstore bench`: options, what is printed, the exit code; `capacity` has a package of its own.

Exit codes of `seed`: 0 measured (claims may be missed: the table says so); 1 something failed: a row has the error's
text; 2 an option is wrong; 130 interrupted.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstore.bench import report
from kvstore.bench.capacity.cli import capacity
from kvstore.bench.claims import not_measured
from kvstore.bench.play import play
from kvstore.bench.results import make_results, merge
from kvstore.bench.sections import NAMES
from kvstore.bench.sections.runs import ARMS
from kvstore.bench.shapes import SHAPES, parse_runs
from kvstore.bench.stage import Settings
from kvstore.demo.claims import Row
from kvstore.demo.convert import converted_model
from kvstore.demo.errors import DemoError, OptionError
from kvstore.demo.program import run_app
from kvstore.demo.report import CLAIMS_HEAD, claim_lines, to_rich
from kvstore.demo.results import check_target, write_json

_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")
_FAILED = ("failed", "section-failed")

app = typer.Typer(
    help="Benchmarks.", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    no_args_is_help=True,
)  # fmt: skip


@app.callback()
def bench() -> None:
    """Runs the benchmarks."""


app.command(epilog="Example: kvstore bench capacity llama-3-8b --gib 40")(capacity)


@app.command(epilog="Example: kvstore bench seed --json seed.json")
def seed(
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu (with --tiny).")] = "cuda:0",
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of two layers: all code paths in a minute.")] = False,
    runs: Annotated[str, typer.Option(help="BATCHxTOKENS_INxTOKENS_OUT,... [default: all six].")] = "",
    arms: Annotated[str, typer.Option(help=f"Of {','.join(ARMS)} [default: all].")] = "",
    only: Annotated[str, typer.Option(help=f"Sections: of {','.join(NAMES)} [default: all].")] = "",
    repeats: Annotated[int, typer.Option(help="Of a short run of an arm that a claim needs.")] = 3,
    bound: Annotated[float, typer.Option(help="Seconds after which a run of the other arms is cut short.")] = 20.0,
    within: Annotated[float, typer.Option(help="Seconds after which nothing new is begun.")] = 1800.0,
    smollm2: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A converted SmolLM2 [default: ours].")] = None,
    commit: Annotated[str, typer.Option(help="What to note as the commit where this is no checkout.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and claims.")] = None,
    merged: Annotated[
        list[Path] | None,
        typer.Option("--merge", metavar="FILE", help="Measure nothing: make one file of these. Repeat it."),
    ] = None,
) -> None:
    """The runs of the seed report: memory and speed of ours beside transformers' own caches, on one GPU."""
    # Without a terminal there is no width to respect: tables stay whole in logs.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if json_file is not None:
        check_target(json_file, "--json", (".json",))
    if merged:
        _finish(merge(merged), json_file, console)
        return
    settings, chosen = check_options(
        device=device, tiny=tiny, runs=runs, arms=arms, only=only, repeats=repeats, bound=bound, within=within,
        smollm2=smollm2,
    )  # fmt: skip
    command = "kvstore bench seed" + (" --tiny" if tiny else "")
    command += "".join(f" {option} {value}" for option, value in (("--runs", runs), ("--arms", arms)) if value)

    def results(rows: list[Row]) -> dict[str, Any]:
        return make_results(rows, device=settings.device, shape=settings.shape.name, command=command, commit=commit)

    def keep(rows: list[Row]) -> None:
        if json_file is not None:
            write_json(results(rows), json_file)

    started = time.monotonic()
    try:
        rows = play(settings, chosen, console, keep)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: all processes of the benchmark are ended\n")
        raise typer.Exit(130) from None
    console.print(f"{time.monotonic() - started:.0f} s")
    _finish(results(rows), json_file, console)
    if any(row["measure"] in _FAILED for row in rows):
        raise typer.Exit(1)


def check_options(
    *,
    device: str,
    tiny: bool,
    runs: str,
    arms: str,
    only: str,
    repeats: int,
    bound: float,
    within: float,
    smollm2: Path | None,
) -> tuple[Settings, tuple[str, ...]]:
    """Settings and sections from options. OptionError names the option, the value and what is possible."""
    if not _DEVICE.fullmatch(device):
        raise OptionError(f"--device {device}: expected cuda, cuda:N or cpu")
    if device == "cpu" and not tiny:
        raise OptionError("--device cpu: the seed's model is for a GPU; add --tiny to run all code paths on a CPU")
    if not 1 <= repeats <= 100:
        raise OptionError(f"--repeats {repeats}: expected 1 to 100")
    if not 1 <= bound <= 600:
        raise OptionError(f"--bound {bound:g}: expected 1 to 600 seconds")
    if not 1 <= within <= 86400:
        raise OptionError(f"--within {within:g}: expected 1 to 86400 seconds")
    shape = SHAPES["tiny" if tiny else "seed"]
    chosen = tuple(parse_runs(runs or ",".join(shape.runs)))
    folder, why = _folder(smollm2, wanted=not tiny and "fidelity" in _choice("--only", only, NAMES))
    settings = Settings(
        shape=shape,
        device="cuda:0" if device == "cuda" else device,
        runs=chosen,
        arms=_choice("--arms", arms, ARMS),
        repeats=repeats,
        bound_s=bound,
        within_s=within,
        folder=folder,
        why_no_folder=why,
    )
    return settings, _choice("--only", only, NAMES)


def _choice(option: str, text: str, possible: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part for part in text.split(",") if part) or possible
    unknown = [part for part in chosen if part not in possible]
    if unknown:
        raise OptionError(f"{option} {unknown[0]}: expected of {', '.join(possible)}")
    return chosen


def _folder(given: Path | None, *, wanted: bool) -> tuple[Path | None, str]:
    """The converted SmolLM2, or None and why there is none."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise OptionError(f"--smollm2 {given}: expected a folder with config.json, weights and tokenizer")
        return given, ""
    if not wanted:
        return None, "not asked for"
    try:
        return converted_model(lambda text: typer.echo(text)), ""
    except DemoError as error:
        return None, str(error).splitlines()[0]


def _finish(results: dict[str, Any], json_file: Path | None, console: Console) -> None:
    rows = results["rows"]
    tables = (
        ("Runs", report.RUNS_HEAD, report.run_lines(rows)),
        ("In turns", report.TURNS_HEAD, report.turn_lines(rows)),
        ("GPU memory by process", report.DRIVER_HEAD, report.driver_lines(rows)),
        ("Left out", report.LEFT_OUT_HEAD, report.left_out_lines(rows)),
        ("Claims", CLAIMS_HEAD, claim_lines(results["claims"])),
    )
    for title, head, lines in tables:
        if lines:
            console.print(to_rich(title, head, lines))
    left = not_measured(rows, SHAPES[results["shape"]])
    if left:
        console.print(f"not measured: {'; '.join(left)}", markup=False)
    if json_file is not None:
        write_json(results, json_file)
        console.print(f"rows and claims: {json_file}")


def main(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` and returns the exit code; errors are one text on stderr."""
    return run_app(app, "kvstore bench", arguments)
