"""Online softmax: attention over key tiles that come one after the other, with an exact merge."""

from __future__ import annotations

import torch

# Stands for "no score yet": far below any score, but finite, so that exp(score - maximum) is never exp(inf - inf).
_NOTHING = -1e30


class OnlineSoftmax:
    """Output, maximum and sum of the softmax of the tiles seen so far, for queries [kv_heads, n].

    Invariants: after any tiles, `finish()` is the attention over exactly their unmasked tokens (and the sinks);
    a query that saw nothing gives zeros. `out` is the sum so far, not yet divided.
    """

    def __init__(self, heads: int, queries: int, v_dim: int, sinks: torch.Tensor | None) -> None:
        """`sinks` [heads, queries, 1]: logits that take weight and give no value."""
        if sinks is None:
            self._maximum = torch.full((heads, queries, 1), _NOTHING)
            self._sum = torch.zeros(heads, queries, 1)
        else:
            self._maximum = sinks.clone()
            self._sum = torch.ones(heads, queries, 1)
        self.out = torch.zeros(heads, queries, v_dim)

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Turns the tile's scores [heads, queries, tokens] (-inf: hidden) into unnormalised weights, in place."""
        maximum = torch.maximum(self._maximum, scores.amax(dim=-1, keepdim=True))
        correction = torch.sub(self._maximum, maximum).exp_()
        self._maximum = maximum
        scores.sub_(maximum).exp_()
        self._sum.mul_(correction).add_(scores.sum(dim=-1, keepdim=True))
        self.out.mul_(correction)
        return scores

    def add(self, weights: torch.Tensor, values: torch.Tensor) -> None:
        """Adds weights [heads, queries, tokens] times values [heads, tokens, v_dim]."""
        torch.baddbmm(self.out, weights, values, out=self.out)

    def finish(self) -> torch.Tensor:
        """float32 [heads, queries, v_dim]."""
        return self.out.div_(self._sum.clamp_min_(1e-30))
