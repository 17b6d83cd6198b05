"""What a model asks of attention beside Q, K and V; checked once, in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore_kernels.errors import LayoutError, UnsupportedAttentionError
from kvstore_kernels.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class Options:
    """Checked attention options. `sinks` is one logit a query head, float32 [q_heads], or None."""

    scaling: float
    softcap: float | None
    sliding_window: int | None
    sinks: torch.Tensor | None
    group: int

    @classmethod
    def checked(
        cls,
        query: torch.Tensor,
        layout: BlockLayout,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
    ) -> Options:
        """Raises UnsupportedAttentionError naming the option, LayoutError on the query's shape."""
        if query.dim() != 4 or query.shape[3] != layout.k_dim or query.shape[1] % layout.kv_heads:
            raise LayoutError(
                f"query {tuple(query.shape)}: expected [rows, a multiple of {layout.kv_heads} heads, L, {layout.k_dim}]"
            )
        if not math.isfinite(scaling):
            raise UnsupportedAttentionError(f"scaling is {scaling}: expected a finite number")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
            raise UnsupportedAttentionError(f"softcap is {softcap}: expected a positive number or None")
        if sliding_window is not None and sliding_window < 1:
            raise UnsupportedAttentionError(f"sliding_window is {sliding_window}: expected at least 1, or None")
        if sinks is not None:
            if tuple(sinks.shape) != (query.shape[1],):
                raise UnsupportedAttentionError(
                    f"sinks has shape {tuple(sinks.shape)}: expected one logit a query head, [{query.shape[1]}]"
                )
            sinks = sinks.detach().float()
        return cls(scaling, softcap, sliding_window, sinks, query.shape[1] // layout.kv_heads)

    def first_visible(self, position: int) -> int:
        """First token that a query at `position` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def plain(self, tokens: Sequence[int]) -> bool:
        """Whether queries at the end of rows of so many tokens see all of them, with a softmax of plain scores."""
        if self.softcap is not None or self.sinks is not None:
            return False
        return self.sliding_window is None or max(tokens) <= self.sliding_window
