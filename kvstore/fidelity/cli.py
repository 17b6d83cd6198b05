"""`kvstore fidelity`: options, what is printed, the exit code.

Exit codes: 0 measured (claims may be missed: the table says so); 1 something failed (a row has the error's text), or
`passthrough` isn't exact; 2 an option is wrong; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstore.demo.claims import Row
from kvstore.demo.convert import converted_model
from kvstore.demo.errors import OptionError
from kvstore.demo.program import run_app
from kvstore.demo.report import CLAIMS_HEAD, claim_lines, to_rich
from kvstore.demo.results import check_target, write_json
from kvstore.fidelity.claims import claims_from, not_measured
from kvstore.fidelity.plot import draw
from kvstore.fidelity.report import tables
from kvstore.fidelity.results import make_results
from kvstore.fidelity.settings import VARIANTS, Settings, registered_codecs

_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")
_LEAST_WINDOW, _MOST_WINDOW = 64, 131072
_MOST_TOKENS = 10_000_000
_MOST_GREEDY = 8192

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(name="fidelity", epilog="Example: kvstore fidelity ./my-model --codecs int8 --json fidelity.json")
def fidelity(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A transformers folder [default: the demo's SmolLM2].")
    ] = None,
    codecs: Annotated[str, typer.Option(help="Names with commas between them [default: all there are].")] = "",
    tokens: Annotated[int, typer.Option(help="Of the text, in whole windows.")] = 8192,
    window: Annotated[int, typer.Option(help="Tokens that see one another.")] = 2048,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 prose [default: Hamlet].")] = None,
    variants: Annotated[str, typer.Option(help=f"Of {','.join(VARIANTS)} [default: all].")] = "",
    device: Annotated[str, typer.Option(help="Computes and holds the cache: cpu, cuda or cuda:N.")] = "cpu",
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Other schemes beside ours.")] = True,
    greedy: Annotated[int, typer.Option(metavar="N", help="Tokens to continue greedily; 0: not.")] = 256,
    needle: Annotated[bool, typer.Option("--needle", help="A number to be found in a long text.")] = False,
    max_minutes: Annotated[float, typer.Option(help="Minutes after which nothing new is begun.")] = 120.0,
    commit: Annotated[str, typer.Option(help="What to note as the commit where this is no checkout.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write rows and claims.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw KL over bits (PNG).")] = None,
) -> None:
    """What each codec costs a model: KL, top-1 and perplexity beside the unquantized cache, the worst layers, long
    greedy texts; on the model and on variants of it that are harder to quantize.
    """
    # Without a terminal there is no width to respect: tables stay whole in logs.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    chosen = check_options(
        model=model, codecs=codecs, tokens=tokens, window=window, text=text, variants=variants, device=device,
        peers=peers, greedy=greedy, needle=needle, max_minutes=max_minutes,
    )  # fmt: skip
    for target, option, suffix in ((json_file, "--json", ".json"), (plot, "--plot", ".png")):
        if target is not None:
            check_target(target, option, (suffix,))
    if model is None:
        chosen = dataclasses.replace(chosen, folder=converted_model(lambda line: console.print(line, markup=False)))
    command = command_of(chosen, given=model is not None)

    def results(rows: list[Row]) -> dict[str, Any]:
        return make_results(rows, device=chosen.device, command=command, commit=commit)

    def keep(rows: list[Row]) -> None:
        if json_file is not None:
            write_json(results(rows), json_file)

    # Here torch and transformers come in.
    from kvstore.fidelity.play import play

    started = time.monotonic()
    try:
        rows = play(chosen, console, keep)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the service of the measurement is ended\n")
        raise typer.Exit(130) from None
    _show(rows, console)
    console.print(f"{time.monotonic() - started:.0f} s")
    keep(rows)
    if json_file is not None:
        console.print(f"rows and claims: {json_file}")
    if plot is not None and draw(rows, plot, f"{chosen.model_name}, {chosen.windows} x {chosen.window} tokens"):
        console.print(f"picture: {plot}")
    wrong = any(claim.wrong and not claim.holds for claim in claims_from(rows))
    if wrong or any(row["measure"] == "failed" for row in rows):
        raise typer.Exit(1)


def check_options(
    *,
    model: Path | None,
    codecs: str,
    tokens: int,
    window: int,
    text: Path | None,
    variants: str,
    device: str,
    peers: bool,
    greedy: int,
    needle: bool,
    max_minutes: float,
) -> Settings:
    """Settings from options, without the folder where no model is given. OptionError names the option, the value and
    what is possible.
    """
    if model is not None and not (model / "config.json").is_file():
        raise OptionError(
            f"MODEL {model}: there is no config.json; expected a transformers folder with weights and tokenizer: save "
            "one there with save_pretrained(), or leave MODEL out for the demo's model"
        )
    if text is not None and not text.is_file():
        raise OptionError(f"--text {text}: that is no file; expected one with prose in UTF-8")
    if not _DEVICE.fullmatch(device):
        raise OptionError(f"--device {device}: expected cpu, cuda or cuda:N")
    if not _LEAST_WINDOW <= window <= _MOST_WINDOW:
        raise OptionError(f"--window {window}: expected {_LEAST_WINDOW} to {_MOST_WINDOW} tokens")
    if not 2 * window <= tokens <= _MOST_TOKENS:
        raise OptionError(
            f"--tokens {tokens}: expected at least two windows, so {2 * window} to {_MOST_TOKENS}; give more --tokens "
            "or a shorter --window"
        )
    if not 0 <= greedy <= _MOST_GREEDY:
        raise OptionError(f"--greedy {greedy}: expected 0 (not) to {_MOST_GREEDY} tokens")
    if not 0 < max_minutes <= 10000:
        raise OptionError(f"--max-minutes {max_minutes:g}: expected more than 0, and 10000 at most")
    return Settings(
        folder=Path() if model is None else model,
        text_file=text,
        codecs=_choice("--codecs", codecs, registered_codecs()),
        variants=_choice("--variants", variants, VARIANTS),
        tokens=tokens,
        window=window,
        device="cuda:0" if device == "cuda" else device,
        peers=peers,
        greedy=greedy,
        needle=needle,
        max_minutes=max_minutes,
    )


def command_of(settings: Settings, *, given: bool) -> str:
    """The command as a results file says it: what decides the figures, without paths of this machine."""
    words = ["kvstore fidelity"]
    words += [settings.model_name] if given else []
    words += [f"--codecs {','.join(settings.codecs)}", f"--tokens {settings.tokens}", f"--window {settings.window}"]
    words += [f"--text {settings.text_file.name}"] if settings.text_file else []
    words += [f"--variants {','.join(settings.variants)}"] if settings.variants != VARIANTS else []
    words += ["--no-peers"] if not settings.peers else []
    words += [f"--greedy {settings.greedy}"] + (["--needle"] if settings.needle else [])
    return " ".join(words)


def main(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` and returns the exit code; errors are one text on stderr."""
    return run_app(app, "kvstore fidelity", arguments)


def _choice(option: str, text: str, possible: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a list, each once."""
    chosen = tuple(dict.fromkeys(part for part in text.split(",") if part)) or possible
    unknown = [part for part in chosen if part not in possible]
    if unknown:
        raise OptionError(f"{option} {unknown[0]}: expected of {', '.join(possible)}; take some of these")
    return chosen


def _show(rows: list[Row], console: Console) -> None:
    for title, head, lines in tables(rows):
        console.print(to_rich(title, head, lines))
    claims = claims_from(rows)
    if claims:
        console.print(to_rich("Claims", CLAIMS_HEAD, claim_lines([claim.to_json() for claim in claims])))
    left = not_measured(rows)
    if left:
        console.print(f"not measured: {', '.join(left)}", markup=False)
