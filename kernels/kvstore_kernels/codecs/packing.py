"""Codes of less than 8 bits, several to a byte.

A byte holds codes of tokens that lie half a block (4 bits), a quarter (2) or an eighth (1) of a block apart: unpacking
then gives runs of neighbouring tokens, nothing has to be interleaved.
"""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """uint8 codes below 2**bits -> uint8, 8 // bits of them a byte; `dim` shrinks by that. bits: 1, 2 or 4."""
    parts = codes.chunk(8 // bits, dim)
    packed = parts[0].clone()
    for number, part in enumerate(parts[1:], 1):
        packed |= part << (number * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """What `pack` was given."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim)
