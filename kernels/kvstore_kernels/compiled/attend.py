"""One query a row over the row's blocks: decode attention, compiled once for all shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, int64, njit, types, void

from kvstore_kernels.compiled.memory import FAST, dimensions_of, load_halves, pointer

# A weight below 2**-126 is nothing beside one of 1; below it float32 has no normal numbers.
_SMALLEST_EXPONENT = np.float32(-126.0)
_NOTHING = np.float32(-3.0e38)
# 2**x on [0, 1), to 1e-7.
_C6, _C5, _C4 = np.float32(1.5353362e-4), np.float32(1.3398874e-3), np.float32(9.618437e-3)
_C3, _C2, _C1 = np.float32(5.5503324e-2), np.float32(2.4022648e-1), np.float32(6.9314720e-1)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)

AttendFunction = Callable[[int, int, int, int, int, int, int, int, int], None]


@njit(**FAST)
def _exponentials(scores: Any, top: Any, powers: Any, power_bits: Any, size: int) -> Any:
    """Turns scores [size], in powers of two, into weights 2 ** (score - top); returns their sum."""
    for t in range(size):
        y = max(scores[t] - top, _SMALLEST_EXPONENT)
        whole = np.floor(y)
        x = y - whole
        power_bits[t] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        scores[t] = (((((_C6 * x + _C5) * x + _C4) * x + _C3) * x + _C2) * x + _C1) * x + _ONE
    total = _ZERO
    for t in range(size):
        weight = scores[t] * powers[t]
        scores[t] = weight
        total += weight
    return total


@functools.lru_cache(maxsize=2)
def attend_function(scaled: bool) -> AttendFunction:
    """Compiles (or loads from numba's cache) attention over int8 codes with scales, or over float32 numbers.

    The function takes addresses and counts, all int64: dimensions (`memory.DIMENSIONS`), block addresses [blocks of
    all rows] int64, index of each row's first block int64 [rows], tokens int64 [rows], rows, query heads a KV head,
    bytes from a block to the layer, query float32 [rows, kv_heads, group, k_dim] times everything that makes its
    products with codes scores in powers of two, result float32 [rows, kv_heads, group, v_dim]. A row without tokens
    gives zeros.
    """
    code = types.int8 if scaled else types.float32

    def attend(
        dimensions_at: int,
        addresses_at: int,
        first_at: int,
        tokens_at: int,
        rows: int,
        group: int,
        layer_offset: int,
        query_at: int,
        result_at: int,
    ) -> None:
        heads, k_dim, v_dim, size, head_bytes, k_offset, k_scales, v_offset, v_scales = dimensions_of(dimensions_at)
        # Query heads go four at a time: a code is converted once for all of them.
        padded = (group + 3) // 4 * 4
        first = carray(pointer(first_at, types.int64), (rows,))
        tokens = carray(pointer(tokens_at, types.int64), (rows,))
        queries = carray(pointer(query_at, types.float32), (rows, heads, group, k_dim))
        results = carray(pointer(result_at, types.float32), (rows, heads, group, v_dim))
        query = np.zeros((padded, k_dim), np.float32)
        scores = np.zeros((padded, size), np.float32)
        sums = np.zeros((padded, v_dim), np.float32)
        tops = np.empty(padded, np.float32)
        totals = np.empty(padded, np.float32)
        scales = np.empty(size, np.float32)
        power_bits = np.empty(size, np.int32)
        powers = power_bits.view(np.float32)
        scale_bits = scales.view(np.uint32)
        for row in range(rows):
            length = tokens[row]
            blocks = carray(pointer(addresses_at + 8 * first[row], types.int64), ((length + size - 1) // size,))
            for head in range(heads):
                query[:group] = queries[row, head]
                sums[:] = _ZERO
                tops[:] = _NOTHING
                totals[:] = _ZERO
                for block in range(blocks.shape[0]):
                    count = min(size, length - block * size)
                    base = blocks[block] + layer_offset + head * head_bytes
                    keys = carray(pointer(base + k_offset, code), (size, k_dim))
                    for g in range(0, padded, 4):
                        for t in range(size):
                            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
                            for d in range(k_dim):
                                x = np.float32(keys[t, d])
                                s0 += x * query[g, d]
                                if group - g > 1:
                                    s1 += x * query[g + 1, d]
                                if group - g > 2:
                                    s2 += x * query[g + 2, d]
                                if group - g > 3:
                                    s3 += x * query[g + 3, d]
                            scores[g, t], scores[g + 1, t], scores[g + 2, t], scores[g + 3, t] = s0, s1, s2, s3
                    if scaled:
                        halves = carray(pointer(base + k_scales, types.uint16), (size,))
                        load_halves(halves, scale_bits, scales)
                    for g in range(group):
                        if scaled:
                            for t in range(size):
                                scores[g, t] *= scales[t]
                        # Tokens behind the count were never written.
                        for t in range(count, size):
                            scores[g, t] = _NOTHING
                        top = tops[g]
                        for t in range(size):
                            top = max(top, scores[g, t])
                        if tops[g] != top:
                            shrink = np.float32(2.0) ** (tops[g] - top) if block else _ZERO
                            totals[g] *= shrink
                            for d in range(v_dim):
                                sums[g, d] *= shrink
                            tops[g] = top
                        totals[g] += _exponentials(scores[g], top, powers, power_bits, size)
                        for t in range(count, size):
                            scores[g, t] = _ZERO
                    if scaled:
                        halves = carray(pointer(base + v_scales, types.uint16), (size,))
                        load_halves(halves, scale_bits, scales)
                        for g in range(group):
                            for t in range(count):
                                scores[g, t] *= scales[t]
                    values = carray(pointer(base + v_offset, code), (v_dim, size))
                    # Unwritten codes are finite; unwritten numbers may be NaN, and NaN times weight 0 is NaN.
                    width = size if scaled or count == size else count
                    for g in range(0, padded, 4):
                        for d in range(v_dim):
                            s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
                            for t in range(width):
                                x = np.float32(values[d, t])
                                s0 += x * scores[g, t]
                                if group - g > 1:
                                    s1 += x * scores[g + 1, t]
                                if group - g > 2:
                                    s2 += x * scores[g + 2, t]
                                if group - g > 3:
                                    s3 += x * scores[g + 3, t]
                            sums[g, d] += s0
                            sums[g + 1, d] += s1
                            sums[g + 2, d] += s2
                            sums[g + 3, d] += s3
                for g in range(group):
                    share = _ONE / totals[g] if length else _ZERO
                    for d in range(v_dim):
                        results[row, head, g, d] = sums[g, d] * share

    # Numba names its files by this, and numbers the variants of one name without a lock: processes that compile at the
    # same time would take one variant for the other.
    attend.__qualname__ = f"attend_{'int8' if scaled else 'float32'}"
    compiled: AttendFunction = njit(void(*[int64] * 9), **FAST)(attend)
    return compiled
