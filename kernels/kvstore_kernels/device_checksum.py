"""Checksums of blocks where they lie: on a CUDA device in one launch, on the host by kvstore_kernels.checksum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from kvstore_kernels.checksum import ROW_WORDS, block_checksum
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.slab import Slab

# Lines of 512 words that one program sums.
_LINES = 16


def block_checksums(slab: Slab, slots: Sequence[int], nbytes: int) -> list[int]:
    """The checksums of the first `nbytes` (a multiple of 8) of these slots: checksum.block_checksum of each.

    On a CUDA slab the work goes to the current stream, which is waited for once at the end. Raises LayoutError on a
    slot or a length that the slab doesn't have.
    """
    if nbytes % 8 or not 0 < nbytes <= slab.slot_bytes:
        raise LayoutError(f"checksum of {nbytes} bytes: expected a multiple of 8 from 8 to {slab.slot_bytes}")
    for slot in slots:
        slab.check_slot(slot)
    if not slots:
        return []
    if slab.device.type == "cpu":
        return [block_checksum(slab.slot_buffer(slot)[:nbytes]) for slot in slots]
    with torch.inference_mode(False), torch.cuda.device(slab.device):
        return launch_checksums(slab, slots, nbytes, torch.cuda.current_stream(slab.device).cuda_stream)


def launch_checksums(slab: Slab, slots: Sequence[int], nbytes: int, stream: int) -> list[int]:
    """The kernel's part of `block_checksums`: works on any memory that the kernels reach."""
    from kvstore_kernels.gpu.launch import pointer

    checksum, finish = _launchers(slab.device)
    words = nbytes // 8
    count = len(slots)
    tiles = -(-words // (_LINES * ROW_WORDS))
    numbers = torch.empty((2, count), dtype=torch.int64, device=slab.device)
    host = torch.from_numpy(np.array([list(slots), [0] * count], np.int64))
    numbers.copy_(host.pin_memory() if slab.device.type == "cuda" else host, non_blocking=True)
    data = slab.data[: slab.slots * slab.slot_bytes].view(torch.int64)
    sums = numbers[1]
    checksum((count, tiles, 1), stream, pointer(data), pointer(numbers[0]), pointer(sums), slab.slot_bytes // 8, words)
    finish((-(-count // 32), 1, 1), stream, pointer(sums), count, words)
    return [number & ((1 << 64) - 1) for number in sums.tolist()]


@lru_cache(maxsize=64)
def _launchers(device: torch.device):  # type: ignore[no-untyped-def]  # gpu.launch imports Triton
    from kvstore_kernels.gpu.kernels.checksum import checksum_kernel, finish_kernel
    from kvstore_kernels.gpu.launch import launcher

    # A row of `numbers` starts at any multiple of 8 bytes.
    unaligned = frozenset(("slots", "sums"))
    long = ["*i64", "*i64", "*i64", "i64", "i64"]
    return (
        launcher(checksum_kernel, long, {"ROWS": _LINES}, device, unaligned=unaligned, num_warps=4),
        launcher(finish_kernel, ["*i64", "i32", "i64"], {"TILE": 32}, device, unaligned=unaligned, num_warps=1),
    )
