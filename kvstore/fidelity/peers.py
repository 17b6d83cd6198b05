"""Other schemes, simulated: K (after RoPE) and V rounded as they would be read back. Scales count in the bits.

A token is seen rounded by itself and all that follow it. Where a scheme groups tokens, groups are aligned in the
window, and a token sees its own group exact: as those schemes keep their newest tokens until a group is full.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch

_Round = Callable[[torch.Tensor], torch.Tensor]
_FP8_MOST = 448.0
_FP16_LEAST, _FP16_MOST = 2.0**-14, 65504.0
_SCALE_BITS = 16
_SEED = 20261203
_LLOYD_MAX_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name, bits a number for a head dimension (K and V together), and what becomes of K and V
    [rows, kv_heads, tokens, dim]. `group`: tokens that are rounded together, as interpose.rounded takes it.
    """

    name: str
    bits: Callable[[int], float]
    key: _Round
    value: _Round
    group: int = 1

    def rounding(self, _layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As interpose.Rounding."""
        return self.key(key), self.value(value)


def schemes() -> list[Scheme]:
    """All of them, most bits first."""
    return [
        _same("bf16", lambda _: 16.0, lambda x: x.to(torch.bfloat16).to(x.dtype)),
        _same("fp8 e4m3", lambda _: 8.0, fp8),
        _same("fp8 e4m3 a token and head", lambda dim: 8 + _SCALE_BITS / dim, fp8_scaled),
        _same("int8 a token and head", lambda dim: 8 + _SCALE_BITS / dim, int8_symmetric),
        _kivi(4, 32),
        _kivi(4, 64),
        _same("int4 a token and head", lambda dim: 4 + 2 * _SCALE_BITS / dim, lambda x: uniform(x, 4, -1)),
        _same("rotated Lloyd-Max 4 bit", lambda dim: 4 + _SCALE_BITS / dim, lambda x: rotated_lloyd_max(x, 4)),
        _same("rotated Lloyd-Max 3 bit", lambda dim: 3 + _SCALE_BITS / dim, lambda x: rotated_lloyd_max(x, 3)),
        _kivi(2, 32),
    ]


def fp8(x: torch.Tensor) -> torch.Tensor:
    """Float8 e4m3 without a scale; what is too large becomes the largest number, as servers do it."""
    return x.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).to(x.dtype)


def fp8_scaled(x: torch.Tensor) -> torch.Tensor:
    """Float8 e4m3 with one fp16 scale a token and head."""
    scale = _fp16(x.abs().amax(-1, keepdim=True) / _FP8_MOST)
    return fp8(x / scale) * scale


def int8_symmetric(x: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 with one fp16 scale a token and head."""
    scale = _fp16(x.abs().amax(-1, keepdim=True) / 127)
    return (x / scale).round().clamp(-127, 127) * scale


def uniform(x: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Even steps between the least and the largest number along `axis`; scale and zero in fp16."""
    least, most = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    levels = 2**bits - 1
    scale, zero = _fp16((most - least) / levels), least.half().to(x.dtype)
    return ((x - zero) / scale).round().clamp(0, levels) * scale + zero


def by_channel(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Each channel of each `group` tokens on its own; the tokens behind the last whole group stay exact."""
    whole = x.shape[-2] // group * group
    inside = x[..., :whole, :]
    grouped = inside.reshape(*x.shape[:-2], whole // group, group, x.shape[-1])
    return torch.cat((uniform(grouped, bits, -2).reshape(inside.shape), x[..., whole:, :]), dim=-2)


def by_token(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Each token in groups of neighbouring channels."""
    grouped = x.reshape(*x.shape[:-1], -1, _group_of(x.shape[-1], group))
    return uniform(grouped, bits, -1).reshape(x.shape)


def rotated_lloyd_max(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A fixed random rotation, one fp16 norm a token and head, and the best codebook for normal numbers."""
    dim = x.shape[-1]
    turn = _rotation(dim).to(x)
    norm = x.norm(dim=-1, keepdim=True).clamp_max(_FP16_MOST).half().to(x.dtype)
    codebook = torch.tensor(lloyd_max(bits), dtype=x.dtype, device=x.device)
    spread = (x @ turn) / norm.clamp_min(_FP16_LEAST) * math.sqrt(dim)
    nearest = torch.bucketize(spread, (codebook[1:] + codebook[:-1]) / 2)
    rounded = codebook[nearest] / math.sqrt(dim) * norm
    return torch.matmul(rounded, turn.T)


@functools.lru_cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2**bits levels with the least squared error for numbers of a standard normal distribution."""
    normal = NormalDist()
    levels = [normal.inv_cdf((index + 0.5) / 2**bits) for index in range(2**bits)]
    for _ in range(_LLOYD_MAX_ROUNDS):
        edges = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(levels)), math.inf]
        # The mean of the distribution between two edges.
        levels = [
            (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
            for low, high in itertools.pairwise(edges)
        ]
    return tuple(levels)


@functools.lru_cache
def _rotation(dim: int) -> torch.Tensor:
    drawn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    rotation: torch.Tensor = torch.linalg.qr(drawn).Q
    return rotation.float()


def _fp16(scale: torch.Tensor) -> torch.Tensor:
    """As fp16 holds it; never 0, for it divides."""
    return scale.clamp(_FP16_LEAST, _FP16_MOST).half().to(scale.dtype)


def _group_of(dim: int, group: int) -> int:
    return math.gcd(dim, group)


def _kivi(bits: int, group: int) -> Scheme:
    """K by channel over `group` tokens, V by token over as many channels; each group has a scale and a zero."""
    return Scheme(
        f"KIVI {bits} bit, groups of {group}",
        lambda dim: bits + _SCALE_BITS / group + _SCALE_BITS / _group_of(dim, group),
        lambda x: by_channel(x, bits, group),
        lambda x: by_token(x, bits, group),
        group,
    )


def _same(name: str, bits: Callable[[int], float], change: _Round) -> Scheme:
    return Scheme(name, bits, change, change)
