"""From measured rows to claims: one table of what is claimed and one pure function that computes it.

A bar may depend on what was measured (a time against another time): then both come from the rows. A claim whose rows
were not measured is left out, never assumed. Rows of several files (merged) carry "part"; what is compared always
comes from one part, and of several parts the worst counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kvstore.bench.shapes import SHAPES, ModelShape
from kvstore.demo.claims import Claim, Row

MIB = 2**20
Direction = Literal["<=", "=="]
# Value and bar, from the rows of one part; None when they say nothing about it.
_Figure = Callable[[Sequence[Row]], tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class _Spec:
    name: str
    unit: str
    direction: Direction
    figure: _Figure


def claims_from(rows: Sequence[Row], shape: ModelShape = SHAPES["seed"]) -> list[Claim]:
    """Every claim that the rows say something about, in the order of the table."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.get("part", 0), []).append(row)
    claims = []
    for spec in _specs(shape):
        found = [figure for part in parts.values() if (figure := spec.figure(part)) is not None]
        if found:
            value, bar = max(found, key=lambda pair: _excess(*pair))
            holds = value <= bar if spec.direction == "<=" else value == bar
            claims.append(Claim(spec.name, value, spec.unit, spec.direction, bar, holds, wrong=False))
    return claims


def not_measured(rows: Sequence[Row], shape: ModelShape = SHAPES["seed"]) -> list[str]:
    """Names of the claims that the rows say nothing about."""
    known = {claim.name for claim in claims_from(rows, shape)}
    return [spec.name for spec in _specs(shape) if spec.name not in known]


def _specs(shape: ModelShape) -> list[_Spec]:
    decode, prompt, longer, longest = shape.runs[:4]
    history, far = shape.history, shape.longest
    return [
        _Spec(f"{decode}, int8: KV bytes against DynamicCache", "x", "<=", _ratio(decode, "kv_bytes", 0.515)),
        _Spec(
            f"{decode}, int8: peak KV bytes, reserve-ahead included, against DynamicCache",
            "x",
            "<=",
            _ratio(decode, "kv_peak_bytes", 0.56),
        ),
        _Spec(
            f"{decode}, int8: ms/token against DynamicCache in turns, both eager",
            "x",
            "<=",
            _in_turns(decode, 1.0),
        ),
        _Spec(f"{prompt}, int8: time against DynamicCache", "x", "<=", _ratio(prompt, "ms", 1.05)),
        _Spec(f"{prompt}, int8: KV bytes against DynamicCache", "x", "<=", _ratio(prompt, "kv_bytes", 0.515)),
        _Spec(f"{prompt}, int8: peak above weights, cache included", "MiB", "<=", _prompt_peak(prompt)),
        _Spec(f"{longer} and {longest}, int8: runs that failed", "runs", "==", _failures((longer, longest))),
        _Spec(
            f"int8: growth of the peak per token, {longer} to {longest} against {prompt} to {longer}",
            "x",
            "<=",
            _linear((prompt, longer, longest), 1.1),
        ),
        _Spec(f"second worker, {history} tokens: time to first token against cold", "x", "<=", _second(history, 0.35)),
        _Spec(f"second worker, {far} tokens: time to first token against cold", "x", "<=", _second(far, 0.10)),
        _Spec("second worker: shared bytes added", "bytes", "==", _bytes_added),
        _Spec(
            f"placement cpu, {history} tokens, int8: time to first token of a warm worker against cold",
            "x",
            "<=",
            _placement_first,
        ),
        _Spec(f"placement cpu, {history} tokens, int8: ms/token", "ms", "<=", _placement_step),
        _Spec(
            "int8 on real K and V, equal codes, this device against the CPU: mean KL, worst variant",
            "nats",
            "<=",
            _divergence,
        ),
        _Spec("slabs whose bytes another process does not read the same", "kinds", "==", _unequal),
        _Spec("VMM: writes through a read-only mapping that did not fault the writer alone", "kinds", "==", _intruded),
    ]


def _excess(value: float, bar: float) -> float:
    if math.isnan(value):
        return math.inf
    return value - bar if bar == 0 else value / bar


def _values(rows: Sequence[Row], run: str, arm: str, key: str) -> list[float]:
    return [
        row[key]
        for row in rows
        if row["measure"] == "run" and row["run"] == run and row["arm"] == arm and row[key] is not None
        and not row["cut_short"]
    ]  # fmt: skip


def _native(rows: Sequence[Row], run: str, key: str) -> float | None:
    """DynamicCache's median, by the attention with which it does better."""
    arms = [_values(rows, run, arm, key) for arm in ("dynamic", "dynamic-flash")]
    return min((median(values) for values in arms if values), default=None)


def _ratio(run: str, key: str, bar: float) -> _Figure:
    """Ours over DynamicCache's: medians of speeds, the most of ours over the median for bytes."""

    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        ours = _values(rows, run, "int8", key)
        native = _native(rows, run, "kv_bytes" if key == "kv_peak_bytes" else key)
        if not ours or native is None:
            return None
        return (max(ours) if key.startswith("kv") else median(ours)) / native, bar

    return figure


def _in_turns(run: str, bar: float) -> _Figure:
    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        found = {row["arm"]: row["ms_per_token"] for row in rows if row["measure"] == "turns" and row["run"] == run}
        return (found["int8"] / found["dynamic-flash"], bar) if len(found) > 1 else None

    return figure


def _prompt_peak(run: str) -> _Figure:
    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        ours, bare = _values(rows, run, "int8", "peak"), _values(rows, run, "no-cache", "peak")
        native = _native(rows, run, "kv_bytes")
        if not ours or not bare or native is None:
            return None
        return max(ours) / MIB, (median(bare) + 0.55 * native) / MIB + 64

    return figure


def _failures(runs: tuple[str, ...]) -> _Figure:
    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        ran = [row for row in rows if row["measure"] == "run" and row["arm"] == "int8" and row["run"] in runs]
        failed = [row for row in rows if row["measure"] == "run-failed" and row["arm"] == "int8" and row["run"] in runs]
        missing = set(runs) - {row["run"] for row in [*ran, *failed]}
        if missing:
            return None
        return float(len(failed)), 0.0

    return figure


def _linear(runs: tuple[str, str, str], bar: float) -> _Figure:
    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        points = []
        for run in runs:
            peaks = _values(rows, run, "int8", "peak")
            if not peaks:
                return None
            points.append((int(run.split("x")[1]), median(peaks)))
        slopes = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.pairwise(points)]
        return (slopes[1] / slopes[0], bar) if slopes[0] > 0 else (math.inf, bar)

    return figure


def _counted(rows: Sequence[Row], measure: str) -> list[Row]:
    """Rows of a measure without the first of each kind, which compiled and mapped."""
    return [row for row in rows if row["measure"] == measure and not row["first"]]


def _second(tokens: int, share: float) -> _Figure:
    """The bar is a share of the cold time, or one eager decode step + 5 ms, whichever is larger."""

    def figure(rows: Sequence[Row]) -> tuple[float, float] | None:
        chosen = [row for row in _counted(rows, "second-worker") if row["tokens"] == tokens]
        steps = [row["step_ms"] for row in rows if row["measure"] == "eager-step" and row["tokens"] == tokens]
        if not chosen:
            return None
        cold = median(row["cold_ms"] for row in chosen)
        other = [(step + 5) / cold for step in steps if step is not None]
        return median(row["warm_ms"] for row in chosen) / cold, max([share, *other])

    return figure


def _bytes_added(rows: Sequence[Row]) -> tuple[float, float] | None:
    added = [row["shared_bytes_added"] for row in rows if row["measure"] == "second-worker"]
    return (float(max(added)), 0.0) if added else None


def _placement_first(rows: Sequence[Row]) -> tuple[float, float] | None:
    chosen = _counted(rows, "placement-first-token")
    if not chosen:
        return None
    return median(row["warm_ms"] for row in chosen) / median(row["cold_ms"] for row in chosen), 0.5


def _placement_step(rows: Sequence[Row]) -> tuple[float, float] | None:
    chosen = [row for row in _counted(rows, "placement-step") if row["step_ms"] and row["local_step_ms"]]
    if not chosen:
        return None
    local = median(row["local_step_ms"] for row in chosen)
    fetched = [1e3 * row["history_bytes"] / row["pinned_bytes_per_s"] for row in chosen if row["pinned_bytes_per_s"]]
    if not fetched:
        return None
    return median(row["step_ms"] for row in chosen), 1.3 * max(local, median(fetched))


def _divergence(rows: Sequence[Row]) -> tuple[float, float] | None:
    # Only there do both attend on the same codes: see the section.
    means = [row["kl_mean"] for row in rows if row["measure"] == "fidelity" and row["how"] == "given"]
    return (float(max(means)), 1e-5) if means else None


def _unequal(rows: Sequence[Row]) -> tuple[float, float] | None:
    chosen = [row for row in rows if row["measure"] == "mapping"]
    # Payloads that came through a stream say nothing about mappings.
    bad = sum(not row["equal"] or row["transport"] == "bytes" for row in chosen)
    return (float(bad), 0.0) if chosen else None


def _intruded(rows: Sequence[Row]) -> tuple[float, float] | None:
    chosen = [row for row in rows if row["measure"] == "read-only"]
    bad = sum(not (row["faulted"] and row["others_unharmed"]) for row in chosen)
    return (float(bad), 0.0) if chosen else None
