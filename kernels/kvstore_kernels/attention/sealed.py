"""Attention over blocks of codecs that quantize whole blocks: sealed blocks from their codes, the rest exactly.

A query sees what it would see if it were the only one: its own block exactly, earlier ones from their codes. Values of
sealed blocks are rotated; queries sum rotated values, and the sum is rotated back once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.attention.softmax import OnlineSoftmax
from kvstore_kernels.attention.tiles import finish_scores, hide, sink_rows
from kvstore_kernels.codecs.sealed import SealedCodec
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.scratch import SCORE_NUMBERS
from kvstore_kernels.table import BlockTable

# Tokens of a tile at the most.
_TILE = 1024


class Tile(NamedTuple):
    """Tokens [start, start + n): keys float32 [kv_heads, k_dim, n], values [kv_heads, n, v_dim].

    `coded`: keys are without shift and channel scale and values are rotated (SealedCodec.blocks); else they are K, V.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor
    coded: bool

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


def tiles(
    codec: SealedCodec, layer: int, table: BlockTable, row: int, first: int, coded: int, end: int, most: int
) -> Iterator[Tile]:
    """Tokens [first, end) of a row: before `coded` from codes, from there on exactly. All three but `end` are
    multiples of the block size; `most` is how many tokens a tile may have.
    """
    size, tail = table.block_tokens, table.tail
    views_of = codec.layout
    block, last = first // size, coded // size
    while block < last:
        slab, slot = table.entry(row, block)
        run = [slot]
        while len(run) < max(1, most // size) and block + len(run) < last:
            entry = table.entry(row, block + len(run))
            if entry.slab is not slab:
                break
            run.append(entry.slot)
        neighbours = run == list(range(slot, slot + len(run)))
        slots = slice(slot, slot + len(run)) if neighbours else torch.tensor(run)
        found = codec.blocks(slab.views(views_of)[layer], slots)
        known = codec.folded_first(layer, tail, row) if block == 0 else None
        if known is not None:
            # Attention leans on the first token more than on any other: its exact K and V count.
            found.keys[:, :, 0], found.values[:, 0] = known
        yield Tile(block * size, found.keys, found.values, coded=True)
        block += len(run)
    begin = max(first, coded)
    if begin < end:
        keys, values = codec.read(layer, table, row, begin, end)
        yield Tile(begin, keys.transpose(1, 2), values, coded=False)


def decode(query: torch.Tensor, codec: SealedCodec, layer: int, table: BlockTable, options: Options) -> torch.Tensor:
    """`decode_attention` for these codecs: query [rows, q_heads, L, k_dim] -> [rows, L, q_heads, v_dim]."""
    layout = codec.layout
    rows, query_heads, length, _ = query.shape
    if rows != table.rows:
        raise LayoutError(f"query of {rows} rows on a table of {table.rows}")
    result = query.new_zeros(rows, length, query_heads, layout.v_dim)
    size = table.block_tokens
    for row in range(rows):
        total = table.tokens(row)
        first = max(0, length - total)
        while first < length:
            # Queries of one block together.
            position = total - length + first
            block = position // size * size
            stop = min(length, first + block + size - position)
            own = query[row, :, first:stop].float().reshape(layout.kv_heads, -1, layout.k_dim)
            out = _attend(own, codec, layer, table, row, options, block, position, stop - first)
            result[row, first:stop] = out.view(query_heads, stop - first, layout.v_dim).transpose(0, 1)
            first = stop
    return result


def _attend(
    query: torch.Tensor,
    codec: SealedCodec,
    layer: int,
    table: BlockTable,
    row: int,
    options: Options,
    block: int,
    position: int,
    length: int,
) -> torch.Tensor:
    """Queries at `position` .. + length, all in the block that begins at token `block`, over all that they see."""
    heads, queries, _ = query.shape
    size = table.block_tokens
    first = options.first_visible(position) // size * size
    online = OnlineSoftmax(heads, queries, codec.layout.v_dim, sink_rows(options, heads, length))
    add_history(online, query, codec, layer, table, row, options, first, block, position + length, position, length)
    return online.finish() @ codec.rotation.T


def add_history(
    online: OnlineSoftmax,
    query: torch.Tensor,
    codec: SealedCodec,
    layer: int,
    table: BlockTable,
    row: int,
    options: Options,
    first: int,
    coded: int,
    end: int,
    position: int,
    length: int,
) -> None:
    """Adds tokens [first, end) to `online`, whose values are rotated: before `coded` from codes, then exactly.

    Queries float32 [kv_heads, group * length, k_dim] stand at `position` .. + length.
    """
    folded = query * codec.query_factor(layer, options.scaling)
    plain = query * options.scaling
    shift = codec.shift_scores(layer, query, options.scaling)
    most = max(table.block_tokens, min(_TILE, SCORE_NUMBERS // (query.shape[0] * query.shape[1])))
    for tile in tiles(codec, layer, table, row, first, coded, end, most):
        scores = torch.bmm(folded if tile.coded else plain, tile.keys)
        finish_scores(scores, shift if tile.coded else None, options.softcap)
        if options.sliding_window is not None or tile.start + tile.tokens > position + 1:
            hide(scores, options, length, position, tile.start, tile.tokens)
        values = tile.values if tile.coded else tile.values @ codec.rotation
        online.add(online.weights(scores), values)
