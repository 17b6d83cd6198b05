"""Checksums, errors and copies of whole blocks, wherever they lie.

What is read must be complete: the caller has seen to that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore_client.blocks import Block
from kvstore_client.device_work import Done, is_cuda, on_side_stream, sent_so_far, wait

if TYPE_CHECKING:
    import torch
    from kvstore_kernels.layout import BlockLayout
    from kvstore_kernels.slab import Slab

_T = TypeVar("_T")
# Host memory is summed at some GB/s a thread: below this, threads cost more than they save.
_THREADS_FROM_BYTES = 32 * 2**20
_MOST_THREADS = 4
# Of the device that sums copies of host memory.
_SCRATCH_BYTES = 32 * 2**20


def checksums_of(blocks: Sequence[Block], layout: BlockLayout, compute_device: str = "cpu") -> list[int]:
    """The checksums of the blocks' bytes, in order: one batch a slab, on the device that holds it.

    Of host memory the CUDA device `compute_device`, if it is one, sums a copy: it fetches and sums a GiB in some 20 ms,
    a core takes a third of a second. Raises CudaError.
    """
    by_slab: dict[Slab, list[int]] = {}
    for index, block in enumerate(blocks):
        by_slab.setdefault(block.slab, []).append(index)
    sums = [0] * len(blocks)
    for slab, indices in by_slab.items():
        slots = [blocks[index].slot for index in indices]
        if slab.device.type != "cpu":
            values = _device_sums(slab, slots, layout.block_bytes)
        elif slab.pinned and is_cuda(compute_device):
            values = _fetched_sums(slab, slots, layout.block_bytes, compute_device)
        else:
            values = _host_sums(slab, slots, layout.block_bytes)
        for index, value in zip(indices, values, strict=True):
            sums[index] = value
    return sums


def noise_of(blocks: Sequence[Block], layout: BlockLayout, compute_device: str = "cpu") -> torch.Tensor:
    """The rounding error of K and V in each layer of the blocks, in order: float32 [blocks, layers, 2], on the CPU.

    Measured where `checksums_of` would sum: on the device that holds them, or on `compute_device`. Raises CudaError.
    """
    import torch
    from kvstore_kernels.noise import block_noise

    noise = torch.zeros(len(blocks), layout.layers, 2)
    if set(layout.layer_codecs) == {"passthrough"}:
        return noise  # No need to fetch them.
    by_slab: dict[Slab, list[int]] = {}
    for index, block in enumerate(blocks):
        by_slab.setdefault(block.slab, []).append(index)
    for slab, indices in by_slab.items():
        slots = [blocks[index].slot for index in indices]
        if slab.device.type != "cpu":
            with on_side_stream(slab.device):
                noise[indices] = block_noise(slab, slots, layout)
        elif slab.pinned and is_cuda(compute_device):
            parts = _fetched(slab, slots, compute_device, lambda scratch, part: [block_noise(scratch, part, layout)])
            noise[indices] = torch.cat(parts)
        else:
            noise[indices] = block_noise(slab, slots, layout)
    return noise


def copy_blocks(moves: Sequence[tuple[Block, Block]], layout: BlockLayout) -> None:
    """Copies blocks (source, target), and returns when the copies are done. Raises CudaError."""
    by_device: dict[Any, list[tuple[Any, Any]]] = {}
    for source, target in moves:
        pair = tuple(block.slab.slot_tensor(block.slot)[: layout.block_bytes] for block in (source, target))
        device = pair[0].device if pair[0].device.type == "cuda" else pair[1].device
        by_device.setdefault(device, []).append((pair[0], pair[1]))
    for device, pairs in by_device.items():
        with on_side_stream(device):
            for source_bytes, target_bytes in pairs:
                # Asynchronous where both ends allow it; from or to memory that isn't pinned the driver stages it.
                target_bytes.copy_(source_bytes, non_blocking=True)


def host_copies(blocks: Sequence[Block], layout: BlockLayout) -> Iterator[memoryview]:
    """The bytes of each block in turn, in host memory, valid until the next one. Raises CudaError."""
    staging: Any = None
    for block in blocks:
        if block.slab.device.type == "cpu":
            yield block.slab.slot_buffer(block.slot)[: layout.block_bytes]
            continue
        if staging is None:
            staging = _staging(layout.block_bytes)
        with on_side_stream(block.slab.device):
            staging.copy_(block.slab.slot_tensor(block.slot)[: layout.block_bytes], non_blocking=True)
        yield _view(staging)


class HostFiller:
    """Host memory to write a block's bytes to, one block after the other, whatever memory the block lies in.

    Copies to a device go over the current stream of this thread, so what it computes next sees them, and what it
    computed before is done with the memory. At most one block is staged.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._staging: Any = None
        self._under_way: Done | None = None

    def begin(self, block: Block) -> memoryview:
        """Where to write the block's bytes."""
        if block.slab.device.type == "cpu":
            return block.slab.slot_buffer(block.slot)[: self._layout.block_bytes]
        if self._staging is None:
            self._staging = _staging(self._layout.block_bytes)
        self.finish()
        return _view(self._staging)

    def end(self, block: Block) -> None:
        """All of its bytes are written."""
        if block.slab.device.type == "cpu":
            return
        import torch

        block.slab.slot_tensor(block.slot)[: self._layout.block_bytes].copy_(self._staging, non_blocking=True)
        self._under_way = sent_so_far(torch.cuda.current_stream(block.slab.device))

    def finish(self) -> None:
        """Waits for the copy under way. Raises CudaError."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            wait(under_way, "a copy to the device")


def _host_sums(slab: Slab, slots: Sequence[int], nbytes: int) -> list[int]:
    from kvstore_kernels.checksum import block_checksum

    def one(slot: int) -> int:
        return block_checksum(slab.slot_buffer(slot)[:nbytes])

    threads = min(_MOST_THREADS, len(slots), os.cpu_count() or 1)
    if threads < 2 or len(slots) * nbytes < _THREADS_FROM_BYTES:
        return [one(slot) for slot in slots]
    # numpy computes them without holding the interpreter.
    with ThreadPoolExecutor(threads, "kvstore-checksum") as pool:
        return list(pool.map(one, slots))


def _device_sums(slab: Slab, slots: Sequence[int], nbytes: int) -> list[int]:
    from kvstore_kernels.device_checksum import block_checksums

    with on_side_stream(slab.device):
        return block_checksums(slab, list(slots), nbytes)


def _fetched_sums(slab: Slab, slots: Sequence[int], nbytes: int, compute_device: str) -> list[int]:
    from kvstore_kernels.device_checksum import block_checksums

    return _fetched(slab, slots, compute_device, lambda scratch, part: block_checksums(scratch, part, nbytes))


def _fetched(
    slab: Slab, slots: Sequence[int], compute_device: str, measure: Callable[[Slab, Sequence[int]], list[_T]]
) -> list[_T]:
    """What `measure` gives for copies of the slots on the device, some at a time."""
    import torch
    from kvstore_kernels.slab import Slab

    batch = max(1, min(len(slots), _SCRATCH_BYTES // slab.slot_bytes))
    found: list[_T] = []
    with on_side_stream(torch.device(compute_device)):
        scratch = Slab.allocate(slab.slot_bytes, batch, device=compute_device)
        for first in range(0, len(slots), batch):
            part = slots[first : first + batch]
            for place, slot in enumerate(part):
                scratch.slot_tensor(place).copy_(slab.slot_tensor(slot), non_blocking=True)
            found += measure(scratch, range(len(part)))
    return found


def _staging(nbytes: int) -> Any:
    import torch

    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _view(staging: Any) -> memoryview:
    return memoryview(staging.numpy())
