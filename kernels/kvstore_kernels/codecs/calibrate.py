"""Calibration: one streaming pass over a model's K gives the codec plan. Never keeps K."""

from __future__ import annotations

import torch

from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.errors import LayoutError, PlanError
from kvstore_kernels.layout import codecs_by_layer

# A channel that hardly moves in the calibration text gets the scale of one that moves this fraction of its head's
# median channel: a later token that moves it more must not drag the whole row's scale up.
_FLOOR_OF_MEDIAN = 1 / 256
_FLOOR_OF_LARGEST = 1 / 65536


class Calibrator:
    """Collects minimum, maximum and sum of every K channel, then makes the codec plan.

    Invariants: memory is O(layers * kv_heads * k_dim); the plan's shift and extent don't depend on how the K
    was cut into calls but for rounding of a float64 sum.
    """

    def __init__(self, codec: str, *, layers: int, kv_heads: int, k_dim: int) -> None:
        # Raises LayoutError for what is no codec.
        self._needed = set(codecs_by_layer(codec, layers)) != {"passthrough"}
        self.codec = codec
        shape = (layers, kv_heads, k_dim)
        self._low = torch.full(shape, float("inf"))
        self._high = torch.full(shape, float("-inf"))
        self._sum = torch.zeros(shape, dtype=torch.float64)
        self._tokens = [0] * layers

    def observe(self, layer: int, k: torch.Tensor) -> None:
        """Takes k [rows, kv_heads, L, k_dim] of one layer, any dtype and strides, no padding. Raises LayoutError."""
        heads, dim = self._low.shape[1:]
        if k.dim() != 4 or k.shape[1] != heads or k.shape[3] != dim:
            raise LayoutError(f"k has shape {tuple(k.shape)}: expected [rows, {heads}, L, {dim}]")
        if not 0 <= layer < len(self._tokens):
            raise LayoutError(f"layer {layer}: expected 0 to {len(self._tokens) - 1}")
        tokens = k.shape[0] * k.shape[2]
        if not self._needed or tokens == 0:
            return
        plain = k.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(plain).all()):
            raise PlanError(f"K of layer {layer} has numbers that are not finite: calibrate with the model's own text")
        low, high = torch.aminmax(plain.permute(1, 3, 0, 2).reshape(heads, dim, tokens), dim=2)
        torch.minimum(self._low[layer], low, out=self._low[layer])
        torch.maximum(self._high[layer], high, out=self._high[layer])
        self._sum[layer] += plain.sum(dim=(0, 2), dtype=torch.float64)
        self._tokens[layer] += tokens

    def finish(self, origin: str) -> CodecPlan:
        """The plan; for passthrough an empty one. Raises PlanError if a layer was never observed."""
        if not self._needed:
            return CodecPlan(self.codec, {}, origin)
        missing = [layer for layer, tokens in enumerate(self._tokens) if tokens == 0]
        if missing:
            raise PlanError(f"no K observed for layers {missing}: run a forward pass through the whole model first")
        tokens = torch.tensor(self._tokens, dtype=torch.float64)[:, None, None]
        shift = (self._sum / tokens).to(torch.float32)
        extent = torch.maximum(self._high - shift, shift - self._low).clamp_min(0.0)
        median = extent.median(dim=-1, keepdim=True).values
        largest = extent.amax(dim=-1, keepdim=True)
        floor = torch.maximum(median * _FLOOR_OF_MEDIAN, largest * _FLOOR_OF_LARGEST)
        # A head that is constant everywhere has no extent to go by: 1 is as good as any.
        floor = torch.where(largest > 0, floor, torch.ones_like(floor)).clamp_min(1e-20)
        scale = torch.maximum(extent, floor) / 127
        return CodecPlan(self.codec, {"k_shift": shift, "k_scale": scale}, origin)
