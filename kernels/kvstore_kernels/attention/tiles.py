"""Scores of a tile of queries against a tile of blocks, with everything a model asks for applied."""

from __future__ import annotations

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.attention.pieces import Piece, gathered, load_keys, load_values
from kvstore_kernels.scratch import scratch

_HIDDEN = float("-inf")


class BlockTile:
    """Some neighbouring pieces of a row, as columns of one score tile; `tokens` of them are in use.

    Invariants: columns behind `tokens` (the unused end of a block) get weight 0, whatever bytes lie there.
    """

    def __init__(self, pieces: list[Piece], block_tokens: int, end: int) -> None:
        """`end`: the row's first token that is not in use."""
        self.pieces = [gathered(piece) for piece in pieces]
        self.start = pieces[0].start
        self._size = block_tokens
        self.columns = sum(piece.blocks for piece in pieces) * block_tokens
        self.tokens = min(self.columns, end - self.start)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Query float32 [kv_heads, n, k_dim], times the codec's factor -> scores [kv_heads, n, columns], scratch."""
        heads, queries, _ = query.shape
        scores = scratch("scores", heads, queries, self.columns)
        first = 0
        for piece in self.pieces:
            width = piece.blocks * self._size
            target = scores if width == self.columns else scores[:, :, first : first + width]
            torch.bmm(query, load_keys(piece.keys), out=target)
            first += width
        if self.pieces[0].key_scales is not None:
            scores.mul_(self._scales("key_scales"))
        return scores

    def hide_unused(self, scores: torch.Tensor) -> None:
        """Hides the columns behind the tokens in use."""
        if self.tokens < self.columns:
            scores[:, :, self.tokens :].fill_(_HIDDEN)

    def add_values(self, weights: torch.Tensor, out: torch.Tensor, *, fresh: bool) -> None:
        """Adds (or if `fresh`: stores) weights [kv_heads, n, columns], changed here, times V to out [.., n, v_dim]."""
        if self.pieces[0].value_scales is not None:
            scales = self._scales("value_scales")
            if self.tokens < self.columns:
                # A scale that nobody wrote may be NaN, and NaN times weight 0 is NaN.
                scales[:, :, self.tokens :].zero_()
            weights.mul_(scales)
        first = 0
        for piece in self.pieces:
            width = piece.blocks * self._size
            values = load_values(piece.values)
            if first + width > self.tokens and piece.value_scales is None:
                values[:, :, self.tokens - first :].zero_()
            part = weights if width == self.columns else weights[:, :, first : first + width]
            if fresh and first == 0:
                torch.bmm(part, values.transpose(1, 2), out=out)
            else:
                torch.baddbmm(out, part, values.transpose(1, 2), out=out)
            first += width

    def _scales(self, which: str) -> torch.Tensor:
        heads = self.pieces[0].keys.shape[0]
        scales = scratch("scales", heads, self.columns // self._size, self._size)
        first = 0
        for piece in self.pieces:
            scales[:, first : first + piece.blocks].copy_(getattr(piece, which))
            first += piece.blocks
        return scales.view(heads, 1, self.columns)


def finish_scores(scores: torch.Tensor, shift: torch.Tensor | None, softcap: float | None) -> None:
    """Adds what the codes left out and caps, in place."""
    if shift is not None:
        scores.add_(shift)
    if softcap is not None:
        scores.mul_(1 / softcap).tanh_().mul_(softcap)


def hide(scores: torch.Tensor, options: Options, length: int, first_query: int, first_token: int, tokens: int) -> None:
    """Hides, in place, future tokens and tokens that left the window.

    scores [kv_heads, group * length, >= tokens], queries at first_query .. + length, tokens at first_token .. + tokens.
    """
    heads = scores.shape[0]
    grid = scores.view(heads, options.group, length, scores.shape[2])
    # Only columns that some query must not see are touched.
    future = max(0, first_query + 1 - first_token)
    if future < tokens:
        queries = torch.arange(first_query, first_query + length).unsqueeze(1)
        columns = torch.arange(first_token + future, first_token + tokens).unsqueeze(0)
        grid[..., future:tokens].masked_fill_(columns > queries, _HIDDEN)
    if options.sliding_window is not None:
        past = min(tokens, options.first_visible(first_query + length - 1) - first_token)
        if past > 0:
            oldest = torch.arange(first_query, first_query + length).sub_(options.sliding_window - 1).unsqueeze(1)
            columns = torch.arange(first_token, first_token + past).unsqueeze(0)
            grid[..., :past].masked_fill_(columns < oldest, _HIDDEN)


def sink_rows(options: Options, kv_heads: int, length: int) -> torch.Tensor | None:
    """The sinks as [kv_heads, group * length, 1], or None."""
    if options.sinks is None:
        return None
    return options.sinks.view(kv_heads, options.group, 1).expand(-1, -1, length).reshape(kv_heads, -1, 1)
