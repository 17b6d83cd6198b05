"""Attention of a few new queries over the blocks of a table (decode)."""

from __future__ import annotations

import math

import torch

from kvstore_kernels.attention import sealed
from kvstore_kernels.attention.options import Options
from kvstore_kernels.attention.pieces import Piece, row_pieces
from kvstore_kernels.attention.plan import RowPlan, plan_fits
from kvstore_kernels.attention.softmax import OnlineSoftmax
from kvstore_kernels.attention.tiles import BlockTile, finish_scores, hide, sink_rows
from kvstore_kernels.codecs.base import Codec
from kvstore_kernels.codecs.sealed import SealedCodec
from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.compiled import compiled_step
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.gpu import device_step, sealed_step
from kvstore_kernels.scratch import SCORE_NUMBERS
from kvstore_kernels.table import ROW_PLAN, BlockTable


def decode_attention(
    query: torch.Tensor,
    codec: Codec,
    layer: int,
    table: BlockTable,
    *,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query [rows, q_heads, L, k_dim] over all tokens of each row in the table -> [rows, L, q_heads, v_dim].

    The fresh tokens are already written and counted in the table: query i of L stands at token tokens(row) - L + i
    and sees the tokens up to itself (the last `sliding_window` of them, if given). Queries that stand before a
    row's first token (left padding) give zeros. Result in the query's dtype, contiguous; computed in float32.
    Raises UnsupportedAttentionError naming the option, LayoutError on shapes.
    """
    codec = codec.of(layer)
    layout = codec.layout
    if isinstance(codec, SealedCodec):
        if query.device.type != "cpu":
            on_device = sealed_step(codec, table, query.device)
            return on_device.attend(table, query.detach(), layer, scaling, softcap, sliding_window, sinks)
        with torch.no_grad():
            options = Options.checked(query, layout, scaling, softcap, sliding_window, sinks)
            return sealed.decode(query.detach(), codec, layer, table, options)
    assert isinstance(codec, TokenCodec)
    if query.device.type != "cpu":
        step = device_step(codec, table, query.device)
        return step.attend(table, query, layer, scaling, softcap, sliding_window, sinks)
    if softcap is None and sinks is None and sliding_window is None and table.rows == 1 and not torch.is_grad_enabled():
        # The usual step of one row: whoever made the plan checked everything but the query's shape.
        plan = _made_plan(table, query, codec)
        if plan is not None and math.isfinite(scaling):
            out = plan.attend(query.reshape(plan.query_shape).float(), layer, table.tokens(0), scaling)
            return out.view(1, 1, query.shape[1], layout.v_dim).to(query.dtype)
    options = Options.checked(query, layout, scaling, softcap, sliding_window, sinks)
    rows, query_heads, length, _ = query.shape
    if rows != table.rows:
        raise LayoutError(f"query of {rows} rows on a table of {table.rows}")
    with torch.no_grad():
        if length == 1 and options.plain(table.token_counts):
            compiled = compiled_step(codec, table)
            if compiled is not None:
                return compiled.attend(table, query, layer, options.group, scaling).to(query.dtype)
        if rows == 1 and length == 1 and table.tokens(0):
            grouped = query.detach().float().reshape(layout.kv_heads, options.group, layout.k_dim)
            out = _attend(grouped, codec, layer, table, 0, options, 1)
            return out.view(1, 1, query_heads, layout.v_dim).to(query.dtype)
        result = query.new_zeros(rows, length, query_heads, layout.v_dim)
        for row in range(rows):
            # A row that is shorter than L has queries in its left padding.
            padding = max(0, length - table.tokens(row))
            used = length - padding
            if not used:
                continue
            own = query[row, :, padding:].float().reshape(layout.kv_heads, options.group * used, layout.k_dim)
            out = _attend(own, codec, layer, table, row, options, used)
            result[row, padding:] = out.view(query_heads, used, layout.v_dim).transpose(0, 1)
        return result


def _made_plan(table: BlockTable, query: torch.Tensor, codec: TokenCodec) -> RowPlan | None:
    cached = table.view_cache.get((0, ROW_PLAN))
    if cached is None or query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != 1:
        return None
    plan: RowPlan = cached[1]
    heads, group, k_dim = plan.query_shape
    fits = query.shape[1] == heads * group and query.shape[3] == k_dim and plan.serves(codec, table, group)
    return plan if fits else None


def _attend(
    query: torch.Tensor, codec: TokenCodec, layer: int, table: BlockTable, row: int, options: Options, length: int
) -> torch.Tensor:
    """Query float32 [kv_heads, group * length, k_dim], at the row's last `length` tokens -> [kv_heads, .., v_dim]."""
    tokens = table.tokens(row)
    blocks = -(-tokens // table.block_tokens)
    if (
        length > 1
        or options.softcap is not None
        or options.sinks is not None
        or options.first_visible(tokens - 1) > 0
        or not plan_fits(blocks, query.shape[0] * options.group, table.block_tokens)
    ):
        return _attend_tiles(query, codec, layer, table, row, options, length)
    cached = table.view_cache.get((row, ROW_PLAN))
    plan: RowPlan | None = cached[1] if cached is not None else None
    if plan is None or not plan.serves(codec, table, options.group):
        plan = RowPlan(codec, table, row, blocks, options.group)
        table.view_cache[row, ROW_PLAN] = (None, plan)
    return plan.attend(query, layer, tokens, options.scaling)


def _attend_tiles(
    query: torch.Tensor, codec: TokenCodec, layer: int, table: BlockTable, row: int, options: Options, length: int
) -> torch.Tensor:
    """The general path: any options, any length, tile by tile."""
    layout = codec.layout
    end = table.tokens(row)
    first_query = end - length
    first_block = options.first_visible(first_query) // table.block_tokens
    last_block = -(-end // table.block_tokens)
    pieces = row_pieces(codec, layer, table, row, first_block, last_block, codec.tile_blocks)
    folded = query * codec.query_factor(layer, options.scaling)
    # The shift is the same for every token: the softmax doesn't see it, but a sink or a soft-cap does.
    shift = None
    if options.softcap is not None or options.sinks is not None:
        shift = codec.shift_scores(layer, query, options.scaling)
    heads, queries, _ = query.shape
    tiles = _tiles(pieces, heads * queries * table.block_tokens)
    plain = len(tiles) == 1 and options.sinks is None
    online = None if plain else OnlineSoftmax(heads, queries, layout.v_dim, sink_rows(options, heads, length))
    for tile_pieces in tiles:
        tile = BlockTile(tile_pieces, table.block_tokens, end)
        scores = tile.scores(folded)
        finish_scores(scores, shift, options.softcap)
        tile.hide_unused(scores)
        if length > 1 or options.sliding_window is not None:
            hide(scores, options, length, first_query, tile.start, tile.tokens)
        if online is None:
            out = torch.empty(heads, queries, layout.v_dim)
            tile.add_values(torch.softmax(scores, dim=-1, out=scores), out, fresh=True)
            return out
        tile.add_values(online.weights(scores), online.out, fresh=False)
    assert online is not None
    return online.finish()


def _tiles(pieces: list[Piece], numbers_per_block: int) -> list[list[Piece]]:
    """Pieces grouped so that the scores of a group stay within SCORE_NUMBERS (but for one piece at the least)."""
    most = max(1, SCORE_NUMBERS // numbers_per_block)
    tiles: list[list[Piece]] = []
    blocks = 0
    for piece in pieces:
        if tiles and blocks + piece.blocks <= most:
            tiles[-1].append(piece)
            blocks += piece.blocks
        else:
            tiles.append([piece])
            blocks = piece.blocks
    return tiles
