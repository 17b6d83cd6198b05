"""Float32 work buffers, one set a thread, reused from call to call: allocation costs more than the work on a tile."""

from __future__ import annotations

import math
import threading

import torch

# Numbers in a tile of K, of V, or of one codec step: 1 MiB in float32, so that two tiles fit an L2 cache.
TILE_NUMBERS = 1 << 18
# Numbers in a tile of attention scores.
SCORE_NUMBERS = 1 << 20

_local = threading.local()


def scratch(name: str, *shape: int) -> torch.Tensor:
    """The calling thread's buffer `name` as uncleared contiguous float32 of `shape`; valid until its next use there.

    Bounded by what callers ask for: tiles of TILE_NUMBERS or SCORE_NUMBERS, and one block at the least.
    """
    buffers: dict[str, torch.Tensor] = _local.__dict__
    numbers = math.prod(shape)
    buffer = buffers.get(name)
    if buffer is None or buffer.numel() < numbers:
        # A buffer made in inference mode could not be written outside it later.
        with torch.inference_mode(False):
            buffer = torch.empty(numbers)
        buffers[name] = buffer
    return buffer[:numbers].view(shape)
