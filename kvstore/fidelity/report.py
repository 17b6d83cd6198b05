"""Rows as tables: for the terminal and, from a results file, for the documents."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.demo.claims import Row

CACHES_HEAD = [
    "cache", "variant", "computed", "bits", "perplexity, %", "KL, mean", "KL, 99 %", "KL, largest", "top-1, %",
    "worst layers",
]  # fmt: skip
VARIANTS_HEAD = ["variant", "tokens", "perplexity", "logits beside plain"]
GREEDY_HEAD = ["codec", "variant", "tokens", "equal until", "equal in place, %", "gap there"]
NEEDLES_HEAD = ["cache", "variant", "found", "depths"]
LEFT_OUT_HEAD = ["what", "variant", "why"]
WORST_LAYERS = 3
_COMPARED = ("codec", "peer")


def cache_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a cache and variant: ours first, then what stands beside them; most bits first, variants together."""
    compared = [row for row in rows if row["measure"] in _COMPARED]
    layers = {(row["name"], row["variant"]): row for row in rows if row["measure"] == "layers"}
    order: list[str] = []
    for row in compared:
        if row["name"] not in order:
            order.append(row["name"])
    compared.sort(key=lambda row: (_COMPARED.index(row["measure"]), -row["bits"], order.index(row["name"])))
    return [
        [
            row["name"] if row["measure"] == "peer" else f"ours, {row['name']}",
            row["variant"],
            row["how"],
            f"{row['bits']:.3g}",
            f"{100 * row['perplexity_change']:+.2f}",
            _small(row["kl_mean"]),
            _small(row["kl_p99"]),
            _small(row["kl_max"]),
            f"{100 * row['top1']:.2f}",
            _worst(layers.get((row["name"], row["variant"]))),
        ]
        for row in compared
    ]


def variant_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a variant, unquantized: what it is measured against."""
    return [
        [row["variant"], str(row["positions"]), f"{row['perplexity']:.3f}", f"{row['difference']:.1e}"]
        for row in rows
        if row["measure"] == "variant"
    ]


def greedy_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a codec and variant."""
    return [
        [
            row["name"],
            row["variant"],
            str(row["tokens"]),
            str(row["equal_until"]),
            f"{100 * row['equal_share']:.0f}",
            "" if row["gap"] is None else f"{row['gap']:.1e}" + (" (small)" if row["gap_was_small"] else ""),
        ]
        for row in rows
        if row["measure"] == "greedy"
    ]


def needle_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a cache and variant: at how many depths the number was found."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["measure"] == "needle":
            groups.setdefault((row["name"], row["variant"]), []).append(row)
    return [
        [
            name,
            variant,
            f"{sum(row['found'] for row in group)} of {len(group)}",
            ", ".join(f"{row['depth']:g} {'yes' if row['found'] else 'no'}" for row in group),
        ]
        for (name, variant), group in groups.items()
    ]


def left_out_lines(rows: Sequence[Row]) -> list[list[str]]:
    """What was skipped or failed, and why."""
    return [
        [row["what"], row["variant"], str(row.get("reason", row.get("error", ""))).splitlines()[0]]
        for row in rows
        if row["measure"] in ("skipped", "failed")
    ]


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and lines of each table that has lines, without the claims."""
    every = [
        ("Beside the same model unquantized", CACHES_HEAD, cache_lines(rows)),
        ("Variants, unquantized", VARIANTS_HEAD, variant_lines(rows)),
        ("Greedy continuation beside native", GREEDY_HEAD, greedy_lines(rows)),
        ("A number in a long text", NEEDLES_HEAD, needle_lines(rows)),
        ("Left out", LEFT_OUT_HEAD, left_out_lines(rows)),
    ]
    return [table for table in every if table[2]]


def _worst(row: Row | None) -> str:
    if row is None:
        return ""
    errors = sorted(enumerate(row["errors"]), key=lambda pair: -pair[1])[:WORST_LAYERS]
    return ", ".join(f"{layer}: {100 * error:.1f} %" for layer, error in errors)


def _small(value: float) -> str:
    return f"{value:.1e}" if abs(value) < 1e-5 else f"{value:.2g}"
