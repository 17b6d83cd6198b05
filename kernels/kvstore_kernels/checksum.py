"""The 64-bit checksum of a block: lanes compute it in parallel, the same on CPU and GPU. Imports without torch.

Definition. All arithmetic is modulo 2**64. Read the buffer as n little-endian 64-bit words in rows of 512: row r,
column c is word 512 r + c (the last row may be short). With

    mix(x)    = splitmix64's finalizer of x * 0x9E3779B97F4A7C15
    low(c)    = mix(2 c + 1) | 1          a multiplier for the word
    high(c)   = mix(2 c + 2) | 1          a second one for its upper 32 bits
    line(r)   = sum over c of  w * low(c) + (w >> 32) * high(c)
    checksum  = mix( 8 n + sum over r of mix(line(r) + mix(2**32 + r)) )

Lanes take any words and any rows: both sums commute. A change inside one 32-bit half of a word is always found; other
changes, swapped words, swapped rows and swapped blocks are found but for a chance of about 2**-64.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_WORDS = 512
_TILE_ROWS = 64
_ROW_SEED = 1 << 32
_MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]
# What numpy can read without a copy; collections.abc.Buffer needs Python 3.12.
ReadableBuffer = bytes | bytearray | memoryview | npt.NDArray[Any]


def block_checksum(buffer: ReadableBuffer) -> int:
    """The checksum of `buffer` (C-contiguous, a multiple of 8 bytes, read-only is fine) as an int in [0, 2**64).

    Raises ValueError if the length isn't a multiple of 8.
    """
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.size % 8:
        raise ValueError(f"buffer of {flat.size} bytes: expected a multiple of 8")
    words = flat.view(np.uint64)
    if sys.byteorder == "big":
        words = words.byteswap()
    lines = _lines(words)
    index = np.arange(_ROW_SEED, _ROW_SEED + lines.size, dtype=np.uint64)
    total = int(_mix(lines + _mix(index)).sum(dtype=np.uint64))
    return int(_mix(np.array([(total + flat.size) & _MASK], dtype=np.uint64))[0])


def _lines(words: Words) -> Words:
    low, high = _multipliers()
    full = words.size // ROW_WORDS
    rest = words[full * ROW_WORDS :]
    lines = np.empty(full + (1 if rest.size else 0), dtype=np.uint64)
    grid = words[: full * ROW_WORDS].reshape(full, ROW_WORDS)
    # The one temporary: a tile that stays in the L2 cache.
    upper = np.empty((min(full, _TILE_ROWS), ROW_WORDS), dtype=np.uint64)
    for first in range(0, full, _TILE_ROWS):
        tile = grid[first : first + _TILE_ROWS]
        shifted = np.right_shift(tile, np.uint64(32), out=upper[: len(tile)])
        lines[first : first + len(tile)] = tile @ low + shifted @ high
    if rest.size:
        # Two dimensions: numpy warns when a scalar wraps around, not when an array does.
        short = rest[np.newaxis]
        lines[full:] = short @ low[: rest.size] + (short >> np.uint64(32)) @ high[: rest.size]
    return lines


@lru_cache(maxsize=1)
def _multipliers() -> tuple[Words, Words]:
    index = np.arange(ROW_WORDS, dtype=np.uint64) * np.uint64(2)
    one = np.uint64(1)
    return _mix(index + one) | one, _mix(index + np.uint64(2)) | one


def _mix(values: Words) -> Words:
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
