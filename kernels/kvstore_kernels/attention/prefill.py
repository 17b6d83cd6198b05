"""Attention of fresh tokens over themselves and over a history in blocks (prefill)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows

from kvstore_kernels.attention import sealed
from kvstore_kernels.attention.options import Options
from kvstore_kernels.attention.pieces import row_pieces
from kvstore_kernels.attention.softmax import OnlineSoftmax
from kvstore_kernels.attention.tiles import BlockTile, finish_scores, hide, sink_rows
from kvstore_kernels.codecs.base import Codec
from kvstore_kernels.codecs.sealed import SealedCodec
from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.gpu import device_step, sealed_step
from kvstore_kernels.scratch import SCORE_NUMBERS, scratch
from kvstore_kernels.table import BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.gpu.sealed.step import SealedStep
    from kvstore_kernels.gpu.step import DeviceStep

# Tokens of K and V in a tile, and the bounds of queries (a head) in one.
_KEY_TILE = 512
_QUERY_TILE = (16, 512)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    codec: Codec,
    layer: int,
    table: BlockTable | None,
    *,
    starts: Sequence[int] | None = None,
    history: Sequence[int] | None = None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Query [rows, q_heads, L, k_dim], fresh key/value [rows, kv_heads, L, dim] -> [rows, L, q_heads, v_dim].

    Row r's fresh tokens are positions starts[r] .. L (host ints; None = no padding); padding gives zeros. Before them
    come the first history[r] tokens of the table's row (None = tokens(row); so a table that already counts
    the fresh tokens works with `history` given; table None = no history at all). No temporary is quadratic in tokens.
    Raises UnsupportedAttentionError naming the option, LayoutError on shapes.
    """
    codec = codec.of(layer)
    layout = codec.layout
    options = Options.checked(query, layout, scaling, softcap, sliding_window, sinks)
    rows, query_heads, length, _ = query.shape
    if tuple(key.shape) != (rows, layout.kv_heads, length, layout.k_dim) or tuple(value.shape) != (
        rows, layout.kv_heads, length, layout.v_dim,
    ):  # fmt: skip
        raise LayoutError(f"key {tuple(key.shape)} and value {tuple(value.shape)} don't fit query {tuple(query.shape)}")
    begins = list(starts) if starts is not None else [0] * rows
    pasts = _pasts(table, history, rows)
    if len(begins) != rows or len(pasts) != rows or any(not 0 <= begin <= length for begin in begins):
        raise LayoutError(f"starts {begins} and history {pasts}: expected {rows} rows, starts from 0 to {length}")
    with torch.no_grad():
        stock = options.softcap is None and options.sinks is None and layout.k_dim == layout.v_dim
        if stock and not any(pasts) and not any(begins) and options.first_visible(length - 1) == 0:
            return _stock(query, key, value, options)
        on_device = query.device.type != "cpu"
        # Rows without a history are best left to torch, one by one where they are padded.
        if on_device and not (stock and not any(pasts) and options.first_visible(length - 1) == 0):
            if table is None:
                # No history: a table without blocks.
                table = BlockTable(rows, block_tokens=layout.block_tokens)
            step: DeviceStep | SealedStep
            if isinstance(codec, SealedCodec):
                step = sealed_step(codec, table, query.device)
            else:
                assert isinstance(codec, TokenCodec)
                step = device_step(codec, table, query.device)
            return step.prefill(table, query, key, value, layer, options, begins, pasts)
        result = query.new_zeros(rows, length, query_heads, layout.v_dim)
        for row, (begin, past) in enumerate(zip(begins, pasts, strict=True)):
            used = length - begin
            if not used:
                continue
            own = [tensor[row : row + 1, :, begin:] for tensor in (query, key, value)]
            if stock and not past and options.first_visible(used - 1) == 0:
                result[row, begin:] = _stock(own[0], own[1], own[2], options)[0]
            else:
                attend = _Row(own[0][0], own[1][0], own[2][0], codec, layer, table, row, past, options)
                attend.into(result[row, begin:])
        return result


def _pasts(table: BlockTable | None, history: Sequence[int] | None, rows: int) -> list[int]:
    if table is None:
        return [0] * rows
    if table.rows != rows:
        raise LayoutError(f"query of {rows} rows on a table of {table.rows}")
    pasts = list(history) if history is not None else [table.tokens(row) for row in range(rows)]
    for row, past in enumerate(pasts):
        if not 0 <= past <= table.capacity(row):
            raise LayoutError(f"history of {past} tokens in row {row}: its blocks hold {table.capacity(row)}")
    return pasts


def _stock(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """Torch's own attention, called as transformers calls it for a prompt without padding."""
    out = F.scaled_dot_product_attention(
        query.detach(),
        key.detach(),
        value.detach(),
        is_causal=query.shape[2] > 1,
        scale=options.scaling,
        enable_gqa=options.group > 1,
    )
    return out.transpose(1, 2).contiguous()


class _Row:
    """One row's fresh queries [q_heads, used, k_dim] over its history and its fresh K and V, tile by tile.

    Invariants: every temporary is a tile; the history is converted once for each tile of queries.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        codec: Codec,
        layer: int,
        table: BlockTable | None,
        row: int,
        past: int,
        options: Options,
    ) -> None:
        self._query, self._key, self._value = query, key, value
        self._codec, self._layer, self._table, self._row = codec, layer, table, row
        self._past, self._options = past, options

    def into(self, result: torch.Tensor) -> None:
        """Writes [used, q_heads, v_dim]."""
        heads, layout = self._key.shape[0], self._codec.layout
        query_heads, used, dim = self._query.shape
        low, high = _QUERY_TILE
        step = max(low, min(high, SCORE_NUMBERS // (query_heads * _KEY_TILE)))
        for first in range(0, used, step):
            length = min(step, used - first)
            tile = self._query[:, first : first + length].float().reshape(heads, -1, dim)
            online = OnlineSoftmax(
                heads, tile.shape[1], layout.v_dim, sink_rows(self._options, heads, length)
            )  # fmt: skip
            turned = self._codec.rotation if isinstance(self._codec, SealedCodec) else None
            if self._past and isinstance(self._codec, SealedCodec):
                self._over_sealed(self._codec, online, tile, first, length)
            elif self._past:
                self._over_history(online, tile, first, length)
            if turned is not None:
                # Fresh values aren't rotated.
                online.out = online.out @ turned.T
            self._over_fresh(online, tile * self._options.scaling, first, length)
            out = online.finish().view(query_heads, length, layout.v_dim)
            result[first : first + length] = out.transpose(0, 1)

    def _over_history(self, online: OnlineSoftmax, query: torch.Tensor, first: int, length: int) -> None:
        assert self._table is not None
        options, size = self._options, self._table.block_tokens
        first_query = self._past + first
        first_block = options.first_visible(first_query) // size
        last_block = -(-self._past // size)
        if first_block * size >= self._past:
            return
        folded = query * self._codec.query_factor(self._layer, options.scaling)
        # Beside exact keys the shift counts: it drops out only where all keys are codes.
        shift = self._codec.shift_scores(self._layer, query, options.scaling)
        most = max(1, min(_KEY_TILE // size, self._codec.tile_blocks))
        pieces = row_pieces(self._codec, self._layer, self._table, self._row, first_block, last_block, most)
        for piece in pieces:
            tile = BlockTile([piece], size, self._past)
            scores = tile.scores(folded)
            finish_scores(scores, shift, options.softcap)
            tile.hide_unused(scores)
            if options.sliding_window is not None:
                hide(scores, options, length, first_query, tile.start, tile.tokens)
            tile.add_values(online.weights(scores), online.out, fresh=False)

    def _over_sealed(
        self, codec: SealedCodec, online: OnlineSoftmax, query: torch.Tensor, first: int, length: int
    ) -> None:
        assert self._table is not None
        options, size, position = self._options, self._table.block_tokens, self._past + first
        begin = options.first_visible(position) // size * size
        # The block in which the history ends is exact as long as the fresh tokens didn't fill it.
        coded = codec.coded_end(self._layer, self._table, self._row, self._past)
        if begin < self._past:
            sealed.add_history(
                online, query, codec, self._layer, self._table, self._row, options, begin, max(begin, coded),
                self._past, position, length,
            )  # fmt: skip

    def _over_fresh(self, online: OnlineSoftmax, query: torch.Tensor, first: int, length: int) -> None:
        options, past = self._options, self._past
        first_token = max(0, options.first_visible(past + first) - past)
        for start in range(first_token, first + length, _KEY_TILE):
            stop = min(start + _KEY_TILE, first + length)
            key, value = self._key[:, start:stop].float(), self._value[:, start:stop].float()
            scores = scratch("scores", query.shape[0], query.shape[1], stop - start)
            torch.bmm(query, key.transpose(1, 2), out=scores)
            finish_scores(scores, None, options.softcap)
            hide(scores, options, length, past + first, past + start, stop - start)
            online.add(online.weights(scores), value)
