"""Which part of a row's fresh tokens goes to which slots, and the views that it is stored through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import APPEND_VIEWS, BlockTable


class Piece(NamedTuple):
    """`tokens` tokens: `blocks` whole blocks in consecutive slots, or (blocks == 0) some tokens inside one block.

    `at` is the first one's index among the tokens placed, `inside` its index inside the block `slot`.
    """

    slab: Slab
    slot: int
    blocks: int
    inside: int
    at: int
    tokens: int


def pieces(table: BlockTable, row: int, start: int, tokens: int, most_blocks: int) -> Iterator[Piece]:
    """Cuts the row's tokens [start, start + tokens) into pieces of at most `most_blocks` blocks.

    Raises TableError past the row's capacity.
    """
    if start < 0 or start + tokens > table.capacity(row):
        raise TableError(
            f"tokens {start} to {start + tokens} of row {row}: its blocks hold {table.capacity(row)}; "
            "append blocks first"
        )
    size = table.block_tokens
    at = 0
    while at < tokens:
        index, inside = divmod(start + at, size)
        slab, slot = table.entry(row, index)
        whole = (tokens - at) // size
        if inside or whole == 0:
            count = min(size - inside, tokens - at)
            yield Piece(slab, slot, 0, inside, at, count)
        else:
            blocks = 1
            while blocks < min(whole, most_blocks) and table.entry(row, index + blocks) == (slab, slot + blocks):
                blocks += 1
            count = blocks * size
            yield Piece(slab, slot, blocks, 0, at, count)
        at += count


class TokenPlace(NamedTuple):
    """One token in every layer: k[layer] [kv_heads, k_dim], v[layer] [kv_heads, v_dim], scales[layer] [kv_heads, 2]."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...] | None


def token_place(layout: BlockLayout, table: BlockTable, row: int, token: int) -> TokenPlace:
    """Views of the row's token in all layers, cached: a decode step writes the same token layer after layer.

    Raises TableError on read-only memory.
    """
    index, inside = divmod(token, table.block_tokens)
    slab, slot = table.entry(row, index)
    made_for = (slab, slot, inside)
    cached = table.view_cache.get((row, APPEND_VIEWS))
    if cached is not None and cached[0] == made_for:
        found: TokenPlace = cached[1]
        return found
    slab.check_writable()
    views = slab.block_views(layout)
    if not views:
        return _by_layer(layout, slab, slot, inside)
    scales = None
    if "k_scales" in views:
        first = views["k_scales"][slot, :, :, inside]
        between = (layout.part("v_scales").offset - layout.part("k_scales").offset) // first.element_size()
        both = first.as_strided((*first.shape, 2), (*first.stride(), between), first.storage_offset())
        scales = both.unbind(0)
    k, v = views["k_codes"][slot, :, :, inside], views["v_codes"][slot, :, :, :, inside]
    place = TokenPlace(k.unbind(0), v.unbind(0), scales)
    table.view_cache[row, APPEND_VIEWS] = (made_for, place)
    return place


def _by_layer(layout: BlockLayout, slab: Slab, slot: int, inside: int) -> TokenPlace:
    """The same where layers have several codecs; not cached, for those take turns."""
    k, v, scales = [], [], []
    for views in slab.views(layout):
        if not views:
            break
        k.append(views["k_codes"][slot, :, inside])
        v.append(views["v_codes"][slot, :, :, inside])
        if "k_scales" in views:
            first = views["k_scales"][slot, :, inside]
            between = (layout.part("v_scales").offset - layout.part("k_scales").offset) // first.element_size()
            scales.append(first.as_strided((*first.shape, 2), (*first.stride(), between), first.storage_offset()))
    return TokenPlace(tuple(k), tuple(v), tuple(scales) if scales else None)
