"""Fresh tokens into their blocks: encoded as the torch codec encodes them, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import boolean, carray, int64, njit, types

from kvstore_kernels.compiled.memory import EXACT, dimensions_of, half_bits, half_number, pointer
from kvstore_kernels.compiled.turn import turn_bytes

# What a write is told of its input, int64 [8], in this order: rows, tokens, and of k, then of v: numbers from one row,
# head and token to the next.
SHAPE_NUMBERS = 8
AppendFunction = Callable[[int, int, int, int, int, int, int, int, int, int, int], bool]

_MAGNITUDE = np.int32(0x7FFFFFFF)


@functools.lru_cache(maxsize=8)
def append_function(
    scaled: bool, code_max: float, smallest_scale: float, largest_scale: float, round_up: float
) -> AppendFunction:
    """Compiles (or loads from numba's cache) the append of tokens, as int8 codes with scales or as float32.

    The function takes addresses and counts, all int64: dimensions (`memory.DIMENSIONS`), the input's shape (see
    SHAPE_NUMBERS), block addresses [blocks of all rows] int64, index of each row's first block int64 [rows], positions
    to leave out at each row's start int64 [rows], token of the row that the first one kept becomes int64 [rows], bytes
    from a block to the layer, k and v float32 [rows, kv_heads, tokens, dim] (the last dimension without gaps), and
    the layer's shift and inverse channel scale, float32 [kv_heads, k_dim].
    False: a number is not finite or too large; the careful path must write all of it again.
    """
    code = types.int8 if scaled else types.float32
    per_code = np.float32(1.0 / code_max)
    smallest, largest, extra = np.float32(smallest_scale), np.float32(largest_scale), np.float32(round_up)
    # As bits, magnitudes compare like integers, and NaN is above every number.
    limit = int(np.float32(largest_scale * code_max).view(np.int32))

    def append(
        dimensions_at: int,
        shape_at: int,
        addresses_at: int,
        first_at: int,
        skips_at: int,
        starts_at: int,
        layer_offset: int,
        k_at: int,
        v_at: int,
        shift_at: int,
        inverse_at: int,
    ) -> bool:
        heads, k_dim, v_dim, size, head_bytes, k_offset, k_scales, v_offset, v_scales = dimensions_of(dimensions_at)
        shape = carray(pointer(shape_at, types.int64), (8,))
        rows, tokens = shape[0], shape[1]
        first = carray(pointer(first_at, types.int64), (rows,))
        skips = carray(pointer(skips_at, types.int64), (rows,))
        starts = carray(pointer(starts_at, types.int64), (rows,))
        shift = carray(pointer(shift_at, types.float32), (heads, k_dim))
        inverse = carray(pointer(inverse_at, types.float32), (heads, k_dim))
        tile = np.empty((size, max(k_dim, v_dim)), np.float32)
        tile_bits = tile.view(np.int32)
        # V's codes of a block, still token by token.
        small = np.empty((size, v_dim), code)
        for row in range(rows):
            token = skips[row]
            target = starts[row]
            while token < tokens:
                block, place = target // size, target % size
                count = min(size - place, tokens - token)
                address = carray(pointer(addresses_at + 8 * (first[row] + block), types.int64), (1,))[0]
                for head in range(heads):
                    base = address + layer_offset + head * head_bytes
                    # K, token by token.
                    codes = carray(pointer(base + k_offset, code), (size, k_dim))
                    halves = carray(pointer(base + k_scales, types.uint16), (size,))
                    for t in range(count):
                        at = row * shape[2] + head * shape[3] + (token + t) * shape[4]
                        source = carray(pointer(k_at + 4 * at, types.float32), (k_dim,))
                        if scaled:
                            top = np.int32(0)
                            for d in range(k_dim):
                                tile[t, d] = (source[d] - shift[head, d]) * inverse[head, d]
                            for d in range(k_dim):
                                top = max(top, tile_bits[t, d] & _MAGNITUDE)
                            if top > limit:
                                return False
                            most = np.int32(top).view(np.float32)
                            bits = half_bits(min(max(most * per_code + extra, smallest), largest))
                            halves[place + t] = bits
                            share = np.float32(1.0) / half_number(bits)
                            for d in range(k_dim):
                                codes[place + t, d] = np.int8(np.rint(tile[t, d] * share))
                        else:
                            for d in range(k_dim):
                                codes[place + t, d] = source[d]
                    # V, turned from tokens to channels.
                    turned = carray(pointer(base + v_offset, code), (v_dim, size))
                    halves = carray(pointer(base + v_scales, types.uint16), (size,))
                    for t in range(count):
                        at = row * shape[5] + head * shape[6] + (token + t) * shape[7]
                        source = carray(pointer(v_at + 4 * at, types.float32), (v_dim,))
                        for d in range(v_dim):
                            tile[t, d] = source[d]
                        if scaled:
                            top = np.int32(0)
                            for d in range(v_dim):
                                top = max(top, tile_bits[t, d] & _MAGNITUDE)
                            if top > limit:
                                return False
                            most = np.int32(top).view(np.float32)
                            bits = half_bits(min(max(most * per_code + extra, smallest), largest))
                            halves[place + t] = bits
                            share = np.float32(1.0) / half_number(bits)
                            for d in range(v_dim):
                                small[t, d] = np.int8(np.rint(tile[t, d] * share))
                    if scaled:
                        turn_bytes(small, turned, place, count)
                    else:
                        for d in range(v_dim):
                            for t in range(count):
                                turned[d, place + t] = tile[t, d]
                token += count
                target += count
        return True

    # Numba names its files by this, and numbers the variants of one name without a lock: processes that compile at the
    # same time would take one variant for the other.
    append.__qualname__ = f"append_{'int8' if scaled else 'float32'}"
    compiled: AppendFunction = njit(boolean(*[int64] * 11), **EXACT)(append)
    return compiled
