"""The demo's picture: time to first token, and bytes of one document's KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.demo.claims import Row

_NATIVE, _COLD, _WARM = "#8c8c8c", "#d98c3f", "#2f7fb8"
_MIB = 2**20


def draw(rows: Sequence[Row], target: Path, title: str) -> bool:
    """Writes the PNG. False when the rows hold neither first tokens nor bytes."""
    first = _first_token_bars(rows)
    held = _bytes_bars(rows)
    if not first or not held:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _bars(left, first, "seconds", "Time to first token", "{:.2f} s")
    _bars(right, held, "MiB", "KV of one document, two workers", "{:.1f}")
    figure.suptitle(title)
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return True


def _bars(axes: Any, bars: list[tuple[str, float, str]], unit: str, title: str, form: str) -> None:
    names = [bar[0] for bar in bars]
    values = [bar[1] for bar in bars]
    drawn = axes.barh(names, values, color=[bar[2] for bar in bars])
    axes.bar_label(drawn, labels=[form.format(value) for value in values], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)


def _first_token_bars(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["measure"] == "first-token":
            groups.setdefault((row["arm"], row["case"], row["worker"]), []).append(row["first_token_s"])
    bars = []
    for (arm, case, worker), values in sorted(groups.items(), key=lambda item: item[0][0] != "native"):
        if arm == "native":
            bars.append(("native cache", median(values), _NATIVE))
        else:
            name = worker.replace("worker-", "worker ").upper().replace("WORKER", "worker")
            bars.append((f"{name}, {case} ({arm})", median(values), _COLD if case == "cold" else _WARM))
    return bars


def _bytes_bars(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    for row in rows:
        if row["measure"] == "bytes" and row["worker_bytes"] == 0:
            return [
                ("native, 2 workers (fp32)", 2 * 2 * row["native_bytes_16bit"] / _MIB, _NATIVE),
                ("native, 2 workers (16 bit)", 2 * row["native_bytes_16bit"] / _MIB, _NATIVE),
                ("kvstore, held once (int8)", row["stored_bytes"] / _MIB, _WARM),
            ]
    return []
