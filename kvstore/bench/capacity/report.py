"""Rows as tables, and the results file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvstore.bench.capacity.loss import Losses
from kvstore.bench.capacity.rows import claims_from
from kvstore.demo.claims import Row
from kvstore.demo.results import checkout_commit, package_versions

CAPACITY_HEAD = [
    "model", "K and V", "codec", "bits", "tokens", "bf16 DynamicCache, tokens", "ratio", "unused, %", "KL, mean",
    "top-1, %", "perplexity, %",
]  # fmt: skip
LEFT_OUT_HEAD = ["model", "codec", "why"]
NOT_MEASURED = "not measured"


def capacity_lines(rows: Sequence[Row], losses: Losses) -> list[list[str]]:
    """One line a model and codec. `unused` is what the budget has beyond blocks: ends of slabs, ledger, remainder."""
    return [
        [
            row["model"],
            f"{row['layers']} x {row['kv_heads']} x {_dims(row)} {row['dtype']}",
            row["codec"],
            f"{row['bits']:.3g}",
            f"{row['tokens']:,}",
            f"{row['native_tokens']:,}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{100 * (1 - row['blocks'] * row['block_bytes'] / row['budget_bytes']):.2f}",
            *_loss(losses, row["codec"]),
        ]
        for row in rows
        if row["measure"] == "capacity"
    ]


def left_out_lines(rows: Sequence[Row]) -> list[list[str]]:
    """What doesn't fit at all, or is not served, and why."""
    return [
        [row["model"], row["codec"], row.get("reason") or row["too_small"]]
        for row in rows
        if row["measure"] == "skipped" or "too_small" in row
    ]


def remarks(rows: Sequence[Row], losses: Losses) -> list[str]:
    """What a reader must know beside the table."""
    source = next((row for row in losses.rows if row["measure"] == "loss-source"), None)
    if source is None:
        loss = "loss: not measured here; run `kvstore fidelity --json FILE` and give it with --fidelity FILE"
    else:
        models = f" of {', '.join(source['models'])}" if source["models"] else ""
        loss = (
            f"loss: the worst of {', '.join(source['variants'])}{models}, not of each model above; measured by "
            f"`{source['command']}` ({source['commit'][:12]}, {source['created'][:10]})"
        )
    tokens = (
        "tokens: of whole blocks, when one model has the whole budget; what workers hold beside blocks is not in it"
    )
    return [tokens, loss, *dict.fromkeys(f"{row['model']}: {row['note']}" for row in rows if row.get("note"))]


def make_results(
    rows: Sequence[Row], losses: Losses, *, device: str, command: str, commit: str = "", created: datetime | None = None
) -> dict[str, Any]:
    """Everything a reader needs to judge the figures. `commit` where this is no checkout."""
    return {
        "name": "capacity",
        "device": f"{device}: computed from sizes, nothing was allocated",
        "versions": package_versions(),
        "commit": commit or checkout_commit(),
        "created": (created or datetime.now(UTC)).isoformat(timespec="seconds"),
        "command": command,
        "rows": [*rows, *losses.rows],
        "claims": [claim.to_json() for claim in claims_from(rows)],
    }


def _dims(row: Row) -> str:
    return str(row["k_dim"]) if row["k_dim"] == row["v_dim"] else f"{row['k_dim']}+{row['v_dim']}"


def _loss(losses: Losses, codec: str) -> list[str]:
    row = losses.of(codec)
    if row is None:
        return [NOT_MEASURED] * 3
    (source,) = (one for one in losses.rows if one["measure"] == "loss-source")
    # The worst of fewer variants says less.
    part = "" if set(row["variants"]) == set(source["variants"]) else f" ({', '.join(row['variants'])} only)"
    kl = row["kl_mean"]
    return [
        (f"{kl:.1e}" if abs(kl) < 1e-5 else f"{kl:.2g}") + part,
        f"{100 * row['top1']:.2f}",
        f"{100 * row['perplexity_change']:+.2f}",
    ]
