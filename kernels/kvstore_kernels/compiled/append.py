"""One fresh token a row into its block: encoded as the torch codec encodes it, byte for byte."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import boolean, carray, int64, njit, types

from kvstore_kernels.compiled.memory import EXACT, dimensions_of, half_bits, half_number, pointer

AppendFunction = Callable[[int, int, int, int, int, int, int, int, int], bool]


@functools.lru_cache(maxsize=8)
def append_function(
    scaled: bool, code_max: float, smallest_scale: float, largest_scale: float, round_up: float
) -> AppendFunction:
    """Compiles (or loads from numba's cache) the append of one token a row, as int8 codes with scales or as float32.

    The function takes addresses and counts, all int64: dimensions (`memory.DIMENSIONS`), address of the block each
    row's token goes to int64 [rows] (0: the row has no token), the token's place in its block int64 [rows], rows,
    bytes from a block to the layer, k float32 [rows, kv_heads, k_dim], v float32 [rows, kv_heads, v_dim], and the
    layer's shift and inverse channel scale, float32 [kv_heads, k_dim]. False, with nothing written: a number is not
    finite or too large, the careful path must do it.
    """
    code = types.int8 if scaled else types.float32
    top = np.float32(code_max)
    per_code = np.float32(1.0 / code_max)
    smallest, largest, extra = np.float32(smallest_scale), np.float32(largest_scale), np.float32(round_up)
    limit = np.float32(largest_scale * code_max)

    @njit(boolean(*[int64] * 9), **EXACT)
    def append(
        dimensions_at: int,
        blocks_at: int,
        places_at: int,
        rows: int,
        layer_offset: int,
        k_at: int,
        v_at: int,
        shift_at: int,
        inverse_at: int,
    ) -> bool:
        heads, k_dim, v_dim, size, head_bytes, k_offset, k_scales, v_offset, v_scales = dimensions_of(dimensions_at)
        blocks = carray(pointer(blocks_at, types.int64), (rows,))
        places = carray(pointer(places_at, types.int64), (rows,))
        keys = carray(pointer(k_at, types.float32), (rows, heads, k_dim))
        values = carray(pointer(v_at, types.float32), (rows, heads, v_dim))
        if scaled:
            shift = carray(pointer(shift_at, types.float32), (heads, k_dim))
            inverse = carray(pointer(inverse_at, types.float32), (heads, k_dim))
            centred = np.empty((rows, heads, k_dim), np.float32)
            most = np.zeros((2, rows, heads), np.float32)
            for row in range(rows):
                for head in range(heads):
                    for d in range(k_dim):
                        x = (keys[row, head, d] - shift[head, d]) * inverse[head, d]
                        centred[row, head, d] = x
                        # NaN compares false.
                        if not abs(x) <= limit:
                            return False
                        most[0, row, head] = max(most[0, row, head], abs(x))
                    for d in range(v_dim):
                        x = values[row, head, d]
                        if not abs(x) <= limit:
                            return False
                        most[1, row, head] = max(most[1, row, head], abs(x))
        for row in range(rows):
            if blocks[row] == 0:
                continue
            place = places[row]
            for head in range(heads):
                base = blocks[row] + layer_offset + head * head_bytes
                k_codes = carray(pointer(base + k_offset, code), (size, k_dim))
                v_codes = carray(pointer(base + v_offset, code), (v_dim, size))
                if scaled:
                    k_bits = half_bits(min(max(most[0, row, head] * per_code + extra, smallest), largest))
                    v_bits = half_bits(min(max(most[1, row, head] * per_code + extra, smallest), largest))
                    carray(pointer(base + k_scales, types.uint16), (size,))[place] = k_bits
                    carray(pointer(base + v_scales, types.uint16), (size,))[place] = v_bits
                    k_share, v_share = np.float32(1.0) / half_number(k_bits), np.float32(1.0) / half_number(v_bits)
                    for d in range(k_dim):
                        k_codes[place, d] = np.int8(np.rint(min(max(centred[row, head, d] * k_share, -top), top)))
                    for d in range(v_dim):
                        v_codes[d, place] = np.int8(np.rint(min(max(values[row, head, d] * v_share, -top), top)))
                else:
                    for d in range(k_dim):
                        k_codes[place, d] = keys[row, head, d]
                    for d in range(v_dim):
                        v_codes[d, place] = values[row, head, d]
        return True

    return append
