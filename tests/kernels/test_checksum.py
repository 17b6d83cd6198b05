"""The block checksum against its definition, and what it must notice."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_kernels.checksum import ROW_WORDS, block_checksum

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = x * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow(data: bytes) -> int:
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = len(data)
    for row in range(0, len(words), 512):
        line = 0
        for column, word in enumerate(words[row : row + 512]):
            line += word * (mix(2 * column + 1) | 1) + (word >> 32) * (mix(2 * column + 2) | 1)
        total += mix((line + mix(2**32 + row // 512)) & MASK)
    return mix(total & MASK)


def noise(words: int) -> np.ndarray:
    return np.random.default_rng(words).integers(0, 2**63, words, dtype=np.uint64)


@pytest.mark.parametrize("words", [0, 1, 7, 511, 512, 513, 1024, 512 * 65 + 3])
def test_definition(words: int) -> None:
    data = noise(words).tobytes()
    assert block_checksum(data) == slow(data)


def test_stated_value() -> None:
    """Pins the format: blocks outlive the code that wrote them."""
    assert block_checksum(bytes(range(256)) * 32) == slow(bytes(range(256)) * 32) == 0xAA71763E83250B73


@settings(max_examples=60, deadline=500)
@given(st.integers(0, 2047), st.integers(0, 2047), st.integers(1, MASK))
def test_changed_and_swapped_words_are_noticed(first: int, second: int, flip: int) -> None:
    words = noise(2048)
    before = block_checksum(words)
    changed = words.copy()
    changed[first] ^= np.uint64(flip)
    assert block_checksum(changed) != before
    if first != second:
        # Words that differ in their top bit only are what a sum of odd multiples misses.
        words[second] = words[first] ^ np.uint64(1 << 63)
        before = block_checksum(words)
        words[[first, second]] = words[[second, first]]
        assert block_checksum(words) != before


def test_swapped_rows_and_halves_are_noticed() -> None:
    grid = noise(4 * ROW_WORDS).reshape(4, ROW_WORDS)
    before = block_checksum(grid)
    assert block_checksum(np.ascontiguousarray(grid[[1, 0, 2, 3]])) != before
    assert block_checksum(np.ascontiguousarray(grid[[2, 3, 0, 1]])) != before
    assert block_checksum(np.roll(grid.ravel(), 1)) != before


def test_length_counts() -> None:
    assert len({block_checksum(bytes(8 * n)) for n in range(1030)}) == 1030


def test_every_kind_of_buffer() -> None:
    data = noise(777).tobytes()
    expected = block_checksum(data)
    assert block_checksum(bytearray(data)) == expected
    assert block_checksum(memoryview(data)) == expected
    assert block_checksum(np.frombuffer(data, np.int8)) == expected
    with mmap.mmap(-1, 8192) as mapped:
        mapped[: len(data)] = data
        with memoryview(mapped) as view, view[: len(data)].toreadonly() as readable:
            assert block_checksum(readable) == expected


def test_odd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        block_checksum(bytes(12))
