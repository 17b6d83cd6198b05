"""The picture: mean KL over bits a number, one kind of marker a variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.demo.claims import Row
from kvstore.fidelity.settings import VARIANTS

_MARKERS = dict(zip(VARIANTS, ("o", "s", "^"), strict=True))
_COLOURS = {"codec": "#2f7fb8", "peer": "#8c8c8c"}
# A logarithmic axis has no 0.
_LEAST = 1e-10
# fp32 blocks would press everything else to one side.
_MOST_BITS = 17.0


def draw(rows: Sequence[Row], target: Path, title: str) -> bool:
    """Writes the PNG. False when the rows hold nothing to draw."""
    points = [row for row in rows if row["measure"] in _COLOURS and row["bits"] <= _MOST_BITS]
    if not points:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    for variant, marker in _MARKERS.items():
        for measure, colour in _COLOURS.items():
            chosen = [row for row in points if (row["variant"], row["measure"]) == (variant, measure)]
            if chosen:
                whose = "ours" if measure == "codec" else "others"
                axes.scatter(
                    [row["bits"] for row in chosen],
                    [max(row["kl_mean"], _LEAST) for row in chosen],
                    marker=marker, color=colour, label=f"{whose}, {variant}", zorder=3 if measure == "codec" else 2,
                )  # fmt: skip
    for name, row in worst_of_each(points).items():
        place = (row["bits"], max(row["kl_mean"], _LEAST))
        axes.annotate(name, place, xytext=(5, 4), textcoords="offset points", fontsize=7)
    axes.set_yscale("log")
    axes.set_xlabel("bits a number of K and V, scales included")
    axes.set_ylabel("mean KL to the unquantized cache, nats")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return True


def worst_of_each(rows: Sequence[Row]) -> dict[str, Row]:
    """The row with the largest mean KL of each name: where it is written."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row["name"] not in worst or row["kl_mean"] > worst[row["name"]]["kl_mean"]:
            worst[row["name"]] = row
    return worst
