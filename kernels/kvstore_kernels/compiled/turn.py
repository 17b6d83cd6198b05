"""Turning a matrix of bytes: eight by eight of them in eight registers at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore_kernels.compiled.memory import EXACT

_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_QUADS = np.uint64(0x00000000FFFFFFFF)
_ONE, _TWO, _FOUR = np.uint64(8), np.uint64(16), np.uint64(32)


@njit(inline="always", **{**EXACT, "cache": False})
def _swap(a: Any, b: Any, mask: Any, shift: Any) -> Any:
    """Exchanges the parts of `a` above `mask` with the parts of `b` below it."""
    other = ((a >> shift) ^ b) & mask
    return a ^ (other << shift), b ^ other


@njit(**EXACT)
def turn_bytes(source: Any, target: Any, place: int, count: int) -> None:
    """Writes source[t, d] to target[d, place + t] for t < count. int8 [tokens, channels] -> [channels, block_tokens].

    Both C-contiguous. Squares of 8 x 8 go through registers (byte, pair and quad swaps: three steps of a butterfly);
    what is left over, or all of it where places or widths are not multiples of 8, goes byte by byte.
    """
    channels = source.shape[1]
    size = target.shape[1]
    squares = count // 8 if place % 8 == 0 and channels % 8 == 0 and size % 8 == 0 else 0
    if squares:
        rows = source.view(np.uint64)
        columns = target.view(np.uint64)
        for right in range(channels // 8):
            for down in range(squares):
                t = 8 * down
                r0, r1, r2, r3 = rows[t, right], rows[t + 1, right], rows[t + 2, right], rows[t + 3, right]
                r4, r5, r6, r7 = rows[t + 4, right], rows[t + 5, right], rows[t + 6, right], rows[t + 7, right]
                r0, r1 = _swap(r0, r1, _BYTES, _ONE)
                r2, r3 = _swap(r2, r3, _BYTES, _ONE)
                r4, r5 = _swap(r4, r5, _BYTES, _ONE)
                r6, r7 = _swap(r6, r7, _BYTES, _ONE)
                r0, r2 = _swap(r0, r2, _PAIRS, _TWO)
                r1, r3 = _swap(r1, r3, _PAIRS, _TWO)
                r4, r6 = _swap(r4, r6, _PAIRS, _TWO)
                r5, r7 = _swap(r5, r7, _PAIRS, _TWO)
                r0, r4 = _swap(r0, r4, _QUADS, _FOUR)
                r1, r5 = _swap(r1, r5, _QUADS, _FOUR)
                r2, r6 = _swap(r2, r6, _QUADS, _FOUR)
                r3, r7 = _swap(r3, r7, _QUADS, _FOUR)
                d, at = 8 * right, place // 8 + down
                columns[d, at], columns[d + 1, at], columns[d + 2, at], columns[d + 3, at] = r0, r1, r2, r3
                columns[d + 4, at], columns[d + 5, at], columns[d + 6, at], columns[d + 7, at] = r4, r5, r6, r7
    for d in range(channels):
        for t in range(8 * squares, count):
            target[d, place + t] = source[t, d]
