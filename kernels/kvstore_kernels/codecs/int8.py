"""8 bits a number, token-wise: no tail, no dependence on neighbours.

K: code = round((K - shift) / (scale * t)), shift and scale static per layer, head and channel (from the codec plan),
t one float16 scale per token. V: code = round(V / t). Codes are computed with the scale as float16 holds it.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import torch

from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.codecs.tokenwise import TokenCodec, TokenCodes
from kvstore_kernels.errors import PlanError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.scratch import scratch

_CODE_MAX = 127
_SMALLEST_SCALE = 2.0**-24
_LARGEST_SCALE = 65504.0
# Largest magnitude that the largest scale can hold: above it codes saturate.
_LARGEST_VALUE = _LARGEST_SCALE * _CODE_MAX
# Half of float16's smallest step. Below 2**-14 it rounds a scale up instead of to nearest, so that codes don't
# overflow where float16 has few bits; above, it changes nothing.
_ROUND_UP = 2.0**-25


class Int8Codec(TokenCodec):
    """int8 codes, one float16 scale per token for K and one for V.

    Invariants: codes lie in [-127, 127], scales are positive and finite, whatever the input; a zero row of V is
    exact; numbers that are not finite are counted and stored as code 0.
    """

    name: ClassVar[str] = "int8"
    scaled: ClassVar[bool] = True

    def __init__(self, layout: BlockLayout, plan: CodecPlan) -> None:
        super().__init__(layout, plan)
        shape = (layout.layers, layout.kv_heads, layout.k_dim)
        shift, scale = plan.tensor("k_shift", shape), plan.tensor("k_scale", shape)
        if not bool((scale > 0).all()):
            raise PlanError("codec plan tensor 'k_scale' has numbers that are not positive; calibrate this model again")
        self._whole = (shift, scale, scale.reciprocal())
        # [kv_heads, 1, k_dim] for each layer, so that they broadcast over tokens.
        self._shift = [item.unsqueeze(1) for item in shift]
        self._scale = [item.unsqueeze(1) for item in scale]
        self._inverse = [item.unsqueeze(1) for item in scale.reciprocal()]
        # The same with V beside K, [kv_heads, 2, dim]: a decode step encodes both at once.
        self._together = layout.k_dim == layout.v_dim
        if self._together:
            self._both_shift = list(torch.stack((shift, torch.zeros_like(shift)), dim=2))
            self._both_inverse = list(torch.stack((scale.reciprocal(), torch.ones_like(scale)), dim=2))
        self._statics = [
            (self._shift[layer].data_ptr(), self._inverse[layer].data_ptr()) for layer in range(layout.layers)
        ]
        self._factors: tuple[float, list[torch.Tensor]] = (0.0, [])
        self._count_lock = threading.Lock()

    def query_factor(self, layer: int, scaling: float) -> torch.Tensor | float:
        """The channel scales times scaling, [kv_heads, 1, k_dim]; kept for the scaling last asked for."""
        known, factors = self._factors
        if known != scaling or not factors:
            factors = [scale * scaling for scale in self._scale]
            self._factors = (scaling, factors)
        return factors[layer]

    @property
    def code_constants(self) -> tuple[float, float, float, float]:
        """Largest code, smallest and largest scale, and what is added to a scale to round it up."""
        return (float(_CODE_MAX), _SMALLEST_SCALE, _LARGEST_SCALE, _ROUND_UP)

    def statics(self) -> tuple[torch.Tensor, ...]:
        """K's shift, scale and inverse scale, float32 [layers, kv_heads, k_dim] on the CPU."""
        return self._whole

    def static_addresses(self, layer: int) -> tuple[int, int]:
        """Addresses of the layer's K shift and inverse K scale, float32 [kv_heads, k_dim]."""
        return self._statics[layer]

    def shift_scores(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor | None:
        """The query times the shift, times scaling."""
        return torch.bmm(query, self._shift[layer].transpose(1, 2)).mul_(scaling)

    def _encode_k(self, layer: int, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centred = torch.sub(k, self._shift[layer], out=scratch("encode_k", *k.shape))
        return self._encode(layer, k, centred.mul_(self._inverse[layer]), centred)

    def _encode_v(self, layer: int, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes = scratch("encode_v", *v.shape)
        return self._encode(layer, v, v if v.dtype == torch.float32 else codes.copy_(v), codes)

    def _encode_token(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> TokenCodes:
        if not self._together:
            return super()._encode_token(layer, k, v)
        both = torch.cat((k, v), dim=2)
        values = torch.sub(both, self._both_shift[layer]).mul_(self._both_inverse[layer])
        codes, scales = self._encode(layer, both, values, values)
        k_codes, v_codes = codes.unbind(2)
        return TokenCodes(k_codes, v_codes, scales.squeeze(3))

    def _decoded_k(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        return k.mul_(self._scale[layer]).add_(self._shift[layer])

    def _encode(
        self, layer: int, source: torch.Tensor, values: torch.Tensor, codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [..., n, dim] -> codes (float32, in `codes`, which may be `values`) and float16 scales [..., n, 1]."""
        largest = torch.amax(torch.abs(values, out=scratch("encode_abs", *values.shape)), dim=-1, keepdim=True)
        # NaN compares false: one comparison finds everything that needs the careful path.
        tame = float(largest.max()) <= _LARGEST_VALUE
        if not tame:
            values = self._tamed(layer, source, values)
            largest = torch.amax(values.abs(), dim=-1, keepdim=True)
        # Two roundings, not one fused: the compiled append must give the same bytes.
        scales = torch.mul(largest, 1 / _CODE_MAX).add_(_ROUND_UP).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        stored = scales.to(torch.float16)
        torch.mul(values, scales.copy_(stored).reciprocal_(), out=codes).round_()
        if not tame:
            codes.clamp_(-_CODE_MAX, _CODE_MAX)
        return codes, stored

    def _tamed(self, layer: int, source: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        bad = torch.isfinite(source).logical_not_()
        count = int(bad.sum())
        if count:
            with self._count_lock:
                self._nonfinite[layer] += count
        # Finite input may have become infinite on its way through shift and scale: it saturates.
        finite = values.float().nan_to_num(nan=0.0, posinf=3e38, neginf=-3e38)
        return finite.masked_fill_(bad, 0.0)
