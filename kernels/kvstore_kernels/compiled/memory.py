"""What the compiled functions share: arrays at an address, and float16 by its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from kvstore_kernels.layout import BlockLayout


def _may_cache() -> bool:
    """Whether numba finds a folder for its cache; where none is writable, `cache=True` would be an error."""
    try:
        FunctionCache(_may_cache)
    except RuntimeError:
        return False
    return True


# No contraction and no reordering: the bytes must be those of the torch codec.
EXACT: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "cache": _may_cache()}
# Sums may be reordered, which is what lets them use vectors; NaN and infinity keep their meaning.
FAST: dict[str, Any] = {**EXACT, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}

# What the functions are told of a layout, int64 [9], in this order.
DIMENSIONS = ("kv_heads", "k_dim", "v_dim", "block_tokens", "head_bytes", "k_codes", "k_scales", "v_codes", "v_scales")

_HALF_TO_FLOAT = np.float32(2.0**112)
_SMALLEST_NORMAL_HALF = np.float32(2.0**-14)
_HALF_STEP = np.float32(2.0**24)


@intrinsic
def pointer(typing_context: Any, address: Any, dtype: Any) -> Any:  # noqa: ARG001
    """An int64 address as a pointer to `dtype`, for numba.carray."""
    result = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return result(types.int64, dtype), generate


@njit(**EXACT)
def dimensions_of(address: Any) -> Any:
    """The DIMENSIONS at an address."""
    d = carray(pointer(address, types.int64), (9,))
    return d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8]


@njit(**EXACT)
def load_halves(halves: Any, bits: Any, numbers: Any) -> None:
    """float16 as uint16 [n] -> float32 in `numbers` [n]; `bits` is the same memory as uint32. Finite and >= 0."""
    for index in range(numbers.shape[0]):
        bits[index] = np.uint32(halves[index]) << np.uint32(13)
    for index in range(numbers.shape[0]):
        numbers[index] *= _HALF_TO_FLOAT


@njit(**EXACT)
def half_bits(number: Any) -> Any:
    """A float32 in [2**-24, 65504] as float16, rounded to nearest even: its 16 bits."""
    if number < _SMALLEST_NORMAL_HALF:
        return np.uint16(np.rint(number * _HALF_STEP))
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    return np.uint16((bits - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13))


@njit(**EXACT)
def half_number(bits: Any) -> Any:
    """The float32 that a float16 >= 0 with these bits stands for."""
    return np.uint32(np.uint32(bits) << np.uint32(13)).view(np.float32) * _HALF_TO_FLOAT


def dimensions(layout: BlockLayout) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The DIMENSIONS of a layout; offsets are bytes inside a (layer, head), 0 for a part it doesn't have."""
    offsets = {part.name: part.offset for part in layout.parts}
    return np.array(
        [getattr(layout, name, offsets.get(name, 0)) for name in DIMENSIONS],
        dtype=np.int64,
    )
