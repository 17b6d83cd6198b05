"""The blocks of a row as views that attention converts tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstore_kernels.codecs.base import Codec
from kvstore_kernels.scratch import scratch
from kvstore_kernels.slab import LayerViews
from kvstore_kernels.table import BlockTable


class Piece(NamedTuple):
    """`blocks` blocks of one slab, the first of them at token `start` of the row.

    keys [kv_heads, blocks, block_tokens, k_dim] and values [kv_heads, v_dim, blocks, block_tokens] are views; or, where
    the slots aren't consecutive, `slots` picks them from `views` when they are loaded. Scales
    [kv_heads, blocks, block_tokens].
    """

    start: int
    blocks: int
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    slots: torch.Tensor | None
    views: LayerViews


def row_pieces(
    codec: Codec, layer: int, table: BlockTable, row: int, first_block: int, last_block: int, most_blocks: int
) -> list[Piece]:
    """Blocks [first_block, last_block) of the row in pieces of at most `most_blocks`, cached on the table.

    Making the views costs as much as attending a short history; between two block borders a decode step reuses them.
    """
    made_for = (codec.layout, table.version(row), first_block, last_block, most_blocks)
    cached = table.view_cache.get((row, layer))
    if cached is not None and cached[0] == made_for:
        found: list[Piece] = cached[1]
        return found
    made = list(_made(codec, layer, table, row, first_block, last_block, most_blocks))
    table.view_cache[row, layer] = (made_for, made)
    return made


def _made(
    codec: Codec, layer: int, table: BlockTable, row: int, first_block: int, last_block: int, most_blocks: int
) -> list[Piece]:
    result: list[Piece] = []
    block = first_block
    while block < last_block:
        slab, slot = table.entry(row, block)
        views = slab.views(codec.layout)[layer]
        limit = min(most_blocks, last_block - block)
        run = [slot]
        while len(run) < limit:
            entry = table.entry(row, block + len(run))
            if entry.slab is not slab:
                break
            run.append(entry.slot)
        start = block * table.block_tokens
        consecutive = run[-1] == slot + len(run) - 1 and run == list(range(slot, slot + len(run)))
        if consecutive:
            picked = {name: view.narrow(0, slot, len(run)) for name, view in views.items()}
            result.append(_piece(start, len(run), picked, None, views))
        else:
            result.append(_piece(start, len(run), views, torch.tensor(run), views))
        block += len(run)
    return result


def _piece(start: int, blocks: int, picked: LayerViews, slots: torch.Tensor | None, views: LayerViews) -> Piece:
    scales = "k_scales" in picked
    return Piece(
        start,
        blocks,
        picked["k_codes"].transpose(0, 1),
        picked["v_codes"].permute(1, 2, 0, 3),
        picked["k_scales"].transpose(0, 1) if scales else None,
        picked["v_scales"].transpose(0, 1) if scales else None,
        slots,
        views,
    )


def gathered(piece: Piece) -> Piece:
    """The piece with its scattered slots copied together, as codes; itself if they are consecutive."""
    if piece.slots is None:
        return piece
    picked = {name: view.index_select(0, piece.slots) for name, view in piece.views.items()}
    return _piece(piece.start, piece.blocks, picked, None, piece.views)


def load_keys(keys: torch.Tensor) -> torch.Tensor:
    """Codes [kv_heads, blocks, block_tokens, k_dim] -> float32 [kv_heads, k_dim, tokens], a view of scratch."""
    heads, blocks, size, dim = keys.shape
    return scratch("keys", heads, blocks, size, dim).copy_(keys).view(heads, blocks * size, dim).transpose(1, 2)


def load_values(values: torch.Tensor) -> torch.Tensor:
    """Codes [kv_heads, v_dim, blocks, block_tokens] -> float32 [kv_heads, v_dim, tokens], scratch."""
    heads, dim, blocks, size = values.shape
    return scratch("values", heads, dim, blocks, size).copy_(values).view(heads, dim, blocks * size)
