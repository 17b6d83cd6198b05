"""Rows and claims as tables: for the terminal and, from a results file, for the README."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from kvstore.demo.claims import Claim, Row

_MIB = 2**20


def sharing_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a worker and cache: what it did and how soon it answered."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["measure"] == "first-token":
            groups.setdefault((row["worker"], row["arm"], row["case"]), []).append(row)
    lines = []
    for (worker, arm, case), group in groups.items():
        lines.append(
            [
                worker,
                "native" if arm == "native" else f"kvstore {arm}",
                case,
                str(group[-1]["tokens"]),
                str(group[-1]["reused"]),
                f"{median(row['first_token_s'] for row in group):.2f}",
                f"{median(row['tokens_per_s'] for row in group):.1f}",
            ]
        )
    return lines


SHARING_HEAD = ["worker", "cache", "", "tokens in", "reused", "first token, s", "tokens/s"]


def bytes_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a model: bytes of one document's KV, ours against the native cache's."""
    lines = []
    for row in rows:
        if row["measure"] == "bytes":
            native = row["native_bytes_16bit"]
            held = row["native_bytes_held"] * row["tokens"] / row["native_tokens"]
            lines.append(
                [
                    row["model"],
                    str(row["head_dim"]),
                    str(row["tokens"]),
                    f"{row['stored_bytes'] / _MIB:.2f}",
                    f"{row['worker_bytes'] / _MIB:.2f}",
                    f"{native / _MIB:.2f}",
                    f"{held / _MIB:.2f}",
                    f"{row['stored_bytes'] / native:.3f}",
                ]
            )
    return lines


BYTES_HEAD = [
    "model", "head dim", "tokens", "service, MiB", "each worker, MiB", "native at 2 bytes, MiB",
    "native here (fp32), MiB", "ratio at 2 bytes",
]  # fmt: skip


def claim_lines(claims: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One line a claim, as it stands in a results file."""
    return [
        [
            claim["name"],
            f"{_figure(claim['value'], None if claim['holds'] else claim['bar'])} {claim['unit']}",
            f"{claim['direction']} {_figure(claim['bar'])}",
            "holds" if claim["holds"] else "MISSED",
        ]
        for claim in claims
    ]


CLAIMS_HEAD = ["what", "measured", "bar", ""]


def text_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line a comparison of texts."""
    lines = []
    for row in rows:
        if row["measure"] in ("text", "drift", "fault"):
            where = row["first_difference"]
            verdict = "equal" if where is None else f"differs at token {where}" + (" (tie)" if row["equal"] else "")
            prompt = f", prompt {row['prompt']}" if "prompt" in row else ""
            lines.append([row.get("codec", "int8"), row["case"] + prompt, verdict])
    return lines


TEXT_HEAD = ["codec", "case", "text"]


def to_rich(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 or not name else "right")
    for line in lines:
        style = "bold red" if line[-1] == "MISSED" else None
        table.add_row(*line, style=style)
    return table


def to_markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a document."""
    rows = [list(head), ["---"] * len(head), *[list(line) for line in lines]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def claims_json(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Claims as they stand in a results file."""
    return [claim.to_json() for claim in claims]


def _figure(value: float, missed: float | None = None) -> str:
    """With the digits that tell it from the bar that it missed."""
    if value == int(value):
        return f"{value:.0f}"
    digits = next((n for n in range(3, 8) if missed is None or f"{value:.{n}g}" != f"{missed:.{n}g}"), 8)
    return f"{value:.{digits}g}"
