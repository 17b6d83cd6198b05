"""From shape, codec and budget to a row, by the service's own rules; from rows to claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import BLOCK_TOKENS, BlockLayout

from kvstore.bench.capacity.models import KVShape, named_shapes
from kvstore.demo.claims import Claim, Row
from kvstore.errors import BudgetTooSmallError
from kvstore.fidelity.claims import BARS
from kvstore.store.sizing import plan_namespace

# Two bytes a number: what a DynamicCache of bfloat16 tensors holds.
NATIVE_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class ServiceSizes:
    """What decides a service's slabs: budget and `fixed_bytes` (see StoreConfig) in bytes, sessions at a time."""

    budget_bytes: int
    fixed_bytes: int
    max_sessions: int


def capacity_row(shape: KVShape, codec: str, sizes: ServiceSizes, block_tokens: int = BLOCK_TOKENS) -> Row:
    """How much one namespace of the shape holds when it gets the whole budget.

    `blocks` are the slots that the service hands out before it refuses or evicts: whole slabs, their unused ends and
    the ledger counted. `bits` of a block a number in it, scales included. Measure "skipped" where the codec doesn't
    serve the shape.
    """
    try:
        layout = BlockLayout.create(
            codec,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            k_dim=shape.k_dim,
            v_dim=shape.v_dim,
            dtype=shape.dtype,
            block_tokens=block_tokens,
        )
    except LayoutError as error:
        return {"measure": "skipped", "model": shape.name, "codec": codec, "reason": str(error)}
    native_token = NATIVE_ITEM_BYTES * shape.numbers
    row: Row = {
        "measure": "capacity",
        "model": shape.name,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "k_dim": shape.k_dim,
        "v_dim": shape.v_dim,
        "dtype": shape.dtype,
        "codec": codec,
        "budget_bytes": sizes.budget_bytes,
        "fixed_bytes": sizes.fixed_bytes,
        "max_sessions": sizes.max_sessions,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
        "bits": layout.bits,
        "slabs": 0,
        "slab_bytes": 0,
        "ledger_bytes": 0,
        "blocks": 0,
        "native_tokens": sizes.budget_bytes // native_token,
        "note": " ".join(filter(None, (shape.note, _window_note(shape, sizes.budget_bytes, native_token)))),
    }
    limit = sizes.budget_bytes - sizes.fixed_bytes
    try:
        # What the registry calls for a new namespace.
        plan = plan_namespace(layout.block_bytes, limit, sizes.budget_bytes, sizes.max_sessions)
    except BudgetTooSmallError as error:
        row["too_small"] = str(error)
    else:
        row["slabs"], row["slab_bytes"] = plan.max_slabs, plan.slab.nbytes
        row["ledger_bytes"], row["blocks"] = plan.ledger_nbytes, plan.max_slabs * plan.slab.slots
    row["tokens"] = row["blocks"] * layout.block_tokens
    row["ratio"] = row["tokens"] / row["native_tokens"] if row["native_tokens"] else None
    return row


def claims_from(rows: Sequence[Row]) -> list[Claim]:
    """Bits of each codec that has a bar, the most over the named shapes. What a codec loses is claimed elsewhere."""
    claims = []
    for codec, bars in BARS.items():
        bits = [
            row["bits"]
            for row in rows
            if row["measure"] == "capacity" and row["codec"] == codec and row["model"] in named_shapes()
        ]
        # passthrough has the model's own bits.
        if bits and codec != "passthrough":
            most = max(bits)
            name = f"{codec}: bits a number, scales included"
            claims.append(Claim(name, most, "bits", "<=", bars.bits, most <= bars.bits, wrong=False))
    return claims


def _window_note(shape: KVShape, budget_bytes: int, native_token: int) -> str:
    if not shape.windowed:
        return ""
    text = (
        f"{shape.windowed} of {shape.layers} layers look back {shape.window or 'some'} tokens only; this version "
        "keeps all their tokens (and refuses chunks): all layers are counted in full, here and for DynamicCache"
    )
    layer_token = native_token // shape.layers
    # transformers keeps one token less than the window.
    left = budget_bytes - shape.windowed * layer_token * max(0, shape.window - 1)
    full = shape.layers - shape.windowed
    if not shape.window or not full or left <= 0:
        return text + "."
    return text + f". One sequence longer than that fits in a DynamicCache up to {left // (full * layer_token)} tokens."
