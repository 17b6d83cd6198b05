"""From measured rows to claims: the bar of each codec, and one pure function that computes them.

A codec is held to its bars on the worst variant measured. One that was not measured is left out, never assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.demo.claims import Claim, Direction, Row


@dataclass(frozen=True, slots=True)
class Bars:
    """Most bits a number (scales included), change of perplexity either way in %, mean KL in nats; least top-1 in %."""

    bits: float
    perplexity: float
    kl: float
    top1: float


# A row's `how`, in words. Most measurements of others are of the first kind; an answer's steps are harder.
HOW = {"prompt": "a prompt in passes of 64", "steps": "step by step"}
BARS = {
    # 32: what the model computes in here. Beside the native cache in the same passes; the rest is rounding of sums.
    "passthrough": Bars(32.0, 1e-3, 1e-9, 100.0),
    "int8": Bars(8.3, 0.5, 0.0002, 99.0),
    "k8v4": Bars(6.4, 0.5, 0.001, 97.5),
    "int4": Bars(4.5, 0.5, 0.005, 95.5),
    "k4v3": Bars(3.9, 0.6, 0.008, 94.0),
    "k4v2": Bars(3.4, 2.5, 0.025, 90.0),
}


def claims_from(rows: Sequence[Row]) -> list[Claim]:
    """Every claim that the rows say something about, in the order of the table."""
    claims = []
    for codec, bars in BARS.items():
        measured = [row for row in rows if row["measure"] == "codec" and row["name"] == codec]
        if not measured:
            continue
        exact = codec == "passthrough"
        claims.append(
            _claim(f"{codec}: bits a number, scales included", _worst(measured, "bits"), "bits", "<=", bars.bits, exact)
        )
        for how, words in HOW.items():
            chosen = [row for row in measured if row["how"] == how]
            if chosen:
                claims += _of(f"{codec}, {words}, worst of {', '.join(row['variant'] for row in chosen)}", chosen, bars)
    return claims


def _of(name: str, rows: Sequence[Row], bars: Bars) -> list[Claim]:
    exact = bars is BARS["passthrough"]
    perplexity = max((abs(100 * row["perplexity_change"]) for row in rows), key=_or_infinite)
    top1 = -max((-100 * float(row["top1"]) for row in rows), key=_or_infinite)
    return [
        _claim(f"{name}: change of perplexity", perplexity, "%", "<=", bars.perplexity, exact),
        _claim(f"{name}: mean KL", _worst(rows, "kl_mean"), "nats", "<=", bars.kl, exact),
        # Two best tokens that are equal to rounding may change places.
        _claim(f"{name}: top-1 agreement", top1, "%", ">=", bars.top1, False),
    ]


def not_measured(rows: Sequence[Row]) -> list[str]:
    """Codecs with a bar that the rows say nothing about."""
    known = {row["name"] for row in rows if row["measure"] == "codec"}
    return [codec for codec in BARS if codec not in known]


def _claim(name: str, value: float, unit: str, direction: Direction, bar: float, wrong: bool) -> Claim:
    holds = value <= bar if direction == "<=" else value >= bar
    return Claim(name, value, unit, direction, bar, holds, wrong)


def _worst(rows: Sequence[Row], key: str) -> float:
    return float(max((row[key] for row in rows), key=_or_infinite))


def _or_infinite(value: float) -> float:
    """Not a number is the worst there is."""
    return math.inf if math.isnan(value) else value
