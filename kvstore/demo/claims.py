"""From measured rows to claims: one table of what is claimed and one pure function that computes it.

A row is a flat mapping with the key "measure"; rows are raw, so a reader can compute every claim again. A claim whose
rows were not measured is left out, never assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Row = dict[str, Any]
Direction = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure against its bar. `wrong` marks claims about text and data: missing one of those is a fault."""

    name: str
    value: float
    unit: str
    direction: Direction
    bar: float
    holds: bool
    wrong: bool

    def to_json(self) -> dict[str, Any]:
        """The form in the results file."""
        fields = asdict(self)
        fields.pop("wrong")
        return fields


@dataclass(frozen=True, slots=True)
class _Spec:
    """What a claim says. `figure` gives its value from the rows of `measure`, None when they say nothing about it."""

    name: str
    measure: str
    unit: str
    direction: Direction
    bar: float
    figure: Callable[[Sequence[Row]], float | None]
    wrong: bool = False


def claims_from(rows: Sequence[Row]) -> list[Claim]:
    """Every claim that the rows say something about, in the order of the table."""
    claims = []
    for spec in _SPECS:
        chosen = [row for row in rows if row["measure"] == spec.measure]
        value = spec.figure(chosen) if chosen else None
        if value is not None:
            holds = _holds(value, spec.direction, spec.bar)
            claims.append(Claim(spec.name, value, spec.unit, spec.direction, spec.bar, holds, spec.wrong))
    return claims


def not_measured(rows: Sequence[Row]) -> list[str]:
    """Names of the claims that the rows say nothing about."""
    known = {claim.name for claim in claims_from(rows)}
    return [spec.name for spec in _SPECS if spec.name not in known]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 … 1) of the values do not exceed. ValueError without values."""
    if not values:
        raise ValueError("percentile of no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _holds(value: float, direction: Direction, bar: float) -> bool:
    if math.isnan(value):
        return False
    return {"<=": value <= bar, ">=": value >= bar, "==": value == bar}[direction]


def _warm_over_cold(rows: Sequence[Row]) -> float | None:
    cold = [row["first_token_s"] for row in rows if row["arm"] != "native" and row["case"] == "cold"]
    warm = [row["first_token_s"] for row in rows if row["arm"] != "native" and row["case"] == "warm"]
    return median(warm) / median(cold) if warm and cold else None


def _median_of(key: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: float(median([row[key] for row in rows]))


def _smallest_of(key: str) -> Callable[[Sequence[Row]], float | None]:
    return lambda rows: float(min(row[key] for row in rows))


def _sum_of(key: str, **where: Any) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        chosen = [row[key] for row in rows if _matches(row, where)]
        return float(sum(chosen)) if chosen else None

    return figure


def _largest_of(key: str, **where: Any) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        chosen = [row[key] for row in rows if _matches(row, where)]
        return float(max(chosen)) if chosen else None

    return figure


def _unequal(**where: Any) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        chosen = [row for row in rows if _matches(row, where)]
        return sum(not row["equal"] for row in chosen) if chosen else None

    return figure


def _stored_ratio(head_dim: int) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        ratios = [
            row["stored_bytes"] / row["native_bytes_16bit"]
            for row in rows
            if row["codec"] == "int8" and row["head_dim"] == head_dim
        ]
        return max(ratios) if ratios else None

    return figure


def _copies(case: str) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        copies = [row["blocks_stored"] / row["blocks_distinct"] for row in rows if row["case"] == case]
        return max(copies, key=_from_one) if copies else None

    return figure


def _farthest_from_one(key: str, **where: Any) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        chosen = [row[key] for row in rows if _matches(row, where)]
        return float(max(chosen, key=_from_one)) if chosen else None

    return figure


def _from_one(value: float) -> float:
    return abs(value - 1)


def _gap_ratio(key: str) -> Callable[[Sequence[Row]], float | None]:
    def figure(rows: Sequence[Row]) -> float | None:
        stopped = [row[key] for row in rows if row["arm"] == "stopped"]
        undisturbed = [row[key] for row in rows if row["arm"] == "undisturbed"]
        return median(stopped) / median(undisturbed) if stopped and undisturbed else None

    return figure


def _over_quota(rows: Sequence[Row]) -> float | None:
    return float(sum(row["held_bytes"] > row["quota_bytes"] for row in rows if row["quota_bytes"]))


def _matches(row: Row, where: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in where.items())


_SPECS: tuple[_Spec, ...] = (
    _Spec("warm worker's time to first token against cold", "first-token", "x", "<=", 0.10, _warm_over_cold),
    _Spec(
        "passthrough texts that differ from native", "text", "texts", "==", 0, _unequal(codec="passthrough"), wrong=True
    ),
    _Spec(
        "int8 texts that differ from an undisturbed run", "text", "texts", "==", 0, _unequal(codec="int8"), wrong=True
    ),
    _Spec("batch of 4: fewest tokens reused in a row", "batch", "tokens", ">=", 1, _smallest_of("reused")),
    _Spec("int8 bytes stored against 2 bytes a number, head dim 64", "bytes", "x", "<=", 0.53, _stored_ratio(64)),
    _Spec("int8 bytes stored against 2 bytes a number, head dim 128", "bytes", "x", "<=", 0.515, _stored_ratio(128)),
    _Spec("copies stored, one worker after the other", "stored", "copies", "==", 1, _copies("one after the other")),
    _Spec("copies stored, both cold at the same moment", "stored", "copies", "==", 1, _copies("at the same moment")),
    _Spec("copies stored, batch of equal prefixes", "stored", "copies", "==", 1, _copies("batch")),
    _Spec(
        "other model: tokens reused that are not its own",
        "second-model",
        "tokens",
        "==",
        0,
        _sum_of("foreign_hits"),
        wrong=True,
    ),
    _Spec("namespaces over their quota", "quota", "namespaces", "==", 0, _over_quota),
    _Spec("int8 decode speed against native", "decode-pair", "x", ">=", 1.1, _median_of("ratio")),
    _Spec("cold prompts: time to first token against native", "cold-pair", "x", "<=", 1.03, _median_of("ratio")),
    _Spec("LookupAndLease of 512 blocks, p50", "lookup", "ms", "<=", 1.0, _median_of("p50_ms")),
    _Spec(
        "server stopped for 100 steps: median token gap against undisturbed",
        "stopped-server",
        "x",
        "<=",
        1.05,
        _gap_ratio("median_ms"),
    ),
    _Spec(
        "server stopped for 100 steps: p99 token gap against undisturbed",
        "stopped-server",
        "x",
        "<=",
        1.5,
        _gap_ratio("p99_ms"),
    ),
    _Spec(
        "kill -9 in mid-write: slots and leases back", "kill", "s", "<=", 1.0, _largest_of("back_s", case="mid-write")
    ),
    _Spec("kill -9 in mid-read: slots and leases back", "kill", "s", "<=", 1.0, _largest_of("back_s", case="mid-read")),
    _Spec("broken invariants after kill -9", "kill", "problems", "==", 0, _sum_of("problems"), wrong=True),
    _Spec("texts changed by a fault or by threads", "fault", "texts", "==", 0, _unequal(), wrong=True),
    _Spec("warnings that an outage makes", "fault", "warnings", "==", 1, _farthest_from_one("warnings", warns=True)),
)
