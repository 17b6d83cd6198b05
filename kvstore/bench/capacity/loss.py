"""What a codec costs, from the results file of `kvstore fidelity`: the worst of the variants it was measured on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.demo.claims import Row
from kvstore.demo.errors import OptionError

FIGURES = ("kl_mean", "top1", "perplexity_change")
# Beside the package in a checkout; an installed package has none.
DEFAULT_FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "fidelity.json"


@dataclass(frozen=True, slots=True)
class Losses:
    """Rows of measure "loss", one a codec, and one of measure "loss-source": where they come from. Empty: none."""

    rows: tuple[Row, ...] = ()

    def of(self, codec: str) -> Row | None:
        """The codec's row; None when it was not measured."""
        return next((row for row in self.rows if row["measure"] == "loss" and row["codec"] == codec), None)


def read_losses(given: Path | None, codecs: Sequence[str], default: Path = DEFAULT_FILE) -> Losses:
    """Losses of `codecs` from the file `given`, else from the checkout's, if there is one. OptionError."""
    path = given or default
    if given is None and not path.is_file():
        return Losses()
    try:
        return _losses(json.loads(path.read_text()), codecs)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"--fidelity {path}: expected a file that `kvstore fidelity --json` wrote, but {type(error).__name__}: "
            f"{error}. Measure again, or give another file"
        ) from None


def worst(codec: str, rows: Sequence[dict[str, Any]]) -> Row:
    """The worst of each figure over the variants, in steps and as a prompt; not a number is the worst there is. KL in
    nats, the others shares.
    """
    kl, top1, change = ([_figure(row, name) for row in rows] for name in FIGURES)
    return {
        "measure": "loss",
        "codec": codec,
        "variants": list(dict.fromkeys(str(row["variant"]) for row in rows)),
        "kl_mean": max(kl, key=_or_infinite),
        "top1": min(top1, key=lambda value: -_or_infinite(-value)),
        "perplexity_change": max(change, key=lambda value: _or_infinite(abs(value))),
    }


def _losses(results: dict[str, Any], codecs: Sequence[str]) -> Losses:
    if results["name"] != "fidelity":
        raise ValueError(f"its name is {results['name']!r}")
    measured: dict[str, list[Row]] = {}
    # A variant on which a codec failed counts as tried: the codec's figures are those of fewer variants then.
    tried: dict[str, None] = {}
    models: dict[str, None] = {}
    for row in results["rows"]:
        if row["measure"] == "model":
            models[str(row["model"])] = None
        if row["measure"] == "codec":
            measured.setdefault(row["name"], []).append(row)
        if row["measure"] in ("codec", "failed"):
            tried[str(row["variant"])] = None
    source = {name: str(results[name]) for name in ("command", "commit", "created")}
    losses = [worst(codec, measured[codec]) for codec in codecs if codec in measured]
    return Losses(({"measure": "loss-source", "models": list(models), "variants": list(tried), **source}, *losses))


def _figure(row: dict[str, Any], name: str) -> float:
    value = row[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not a number")
    return float(value)


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value
