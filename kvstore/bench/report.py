"""Rows as tables: for the terminal and, from a results file, for the documents."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kvstore.demo.claims import Row

_MIB = 2**20
RUNS_HEAD = [
    "run", "cache", "ms", "ms/token", "KV, MiB", "peak, MiB", "held by torch, MiB",
    "time ratio", "KV ratio", "peak ratio",
]  # fmt: skip
TURNS_HEAD = ["run", "cache", "ms/token", "median turn, ms/token", "time ratio"]
DRIVER_HEAD = ["when", "process", "driver, MiB", "by torch, MiB", "slabs, MiB", "context and the rest, MiB"]
_NAMES = {
    "dynamic": "DynamicCache",
    "dynamic-flash": "DynamicCache, cuDNN off",
    "static": "StaticCache, compiled",
    "hqq8": "QuantizedCache HQQ int8",
    "no-cache": "none (use_cache=False)",
    "int8": "ours, int8",
    "passthrough": "ours, passthrough",
    "int8-embedded": "ours, int8, embedded",
    "passthrough-embedded": "ours, passthrough, embedded",
}


def run_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a run and cache; ratios are to DynamicCache in the same run, with cuDNN off if that was run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["measure"] == "run":
            groups.setdefault((row["run"], row["arm"]), []).append(row)
    lines = []
    for run, arm in sorted(groups, key=lambda pair: (_order(rows, pair[0]), list(_NAMES).index(pair[1]))):
        group = groups[run, arm]
        native = groups.get((run, "dynamic-flash")) or groups.get((run, "dynamic"), [])
        cut = any(row["cut_short"] for row in group)
        tokens = f" (cut at {group[0]['tokens_out']})" if cut else ""
        lines.append(
            [
                run + tokens,
                _NAMES[arm],
                _number(_median(group, "ms"), 0),
                _number(_median(group, "ms_per_token"), 2),
                _mib(_median(group, "kv_bytes")),
                _mib(_median(group, "peak")),
                _mib(_median(group, "torch_held")),
                _ratio(group, native, "ms_per_token"),
                "" if cut or arm == "no-cache" else _ratio(group, native, "kv_bytes"),
                "" if cut else _ratio(group, native, "peak"),
            ]
        )
    return lines


def turn_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a cache that answered in turns with another: the whole answer, and the median turn."""
    chosen = [row for row in rows if row["measure"] == "turns"]
    native = next((row["ms_per_token"] for row in chosen if row["arm"] == "dynamic-flash"), None)
    return [
        [
            row["run"],
            _NAMES[row["arm"]],
            _number(row["ms_per_token"], 2),
            _number(median(row["chunks_ms"]) / row["chunk"], 2),
            "" if native is None else f"{row['ms_per_token'] / native:.3f}",
        ]
        for row in chosen
    ]


def driver_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a process and moment: what the driver counts, what torch and slabs explain of it."""
    lines = []
    for row in rows:
        if row["measure"] != "driver":
            continue
        if "error" in row:
            lines.append([row["when"], row["error"], "", "", "", ""])
        elif row["process"].startswith(("worker", "service")):
            known = (row.get("reserved") or 0) + (row.get("slabs") or 0)
            rest = None if row["driver"] is None else row["driver"] - known
            lines.append(
                [
                    row["when"], row["process"], _mib(row["driver"]), _mib(row.get("reserved")), _mib(row.get("slabs")),
                    _mib(rest),
                ]
            )  # fmt: skip
    return lines


def left_out_lines(rows: Sequence[Row]) -> list[list[str]]:
    """What was skipped or failed, and why."""
    return [
        [row["what"], row["measure"], str(row.get("reason", row.get("error", ""))).splitlines()[0]]
        for row in rows
        if row["measure"] in ("skipped", "failed")
    ]


LEFT_OUT_HEAD = ["what", "", "why"]


def _order(rows: Sequence[Row], run: str) -> int:
    return next(index for index, row in enumerate(rows) if row.get("run") == run)


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return median(values) if values else None


def _ratio(ours: Sequence[Row], native: Sequence[Row], key: str) -> str:
    above, below = _median(ours, key), _median(native, key)
    return f"{above / below:.3f}" if above is not None and below else ""


def _mib(value: Any) -> str:
    return "" if value is None else f"{value / _MIB:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
