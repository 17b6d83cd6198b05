"""Slots in this process's own memory, for when the service has none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_client.blocks import Block, Origin
from kvstore_client.device_work import Done, Pending, Settled, is_cuda, wait
from kvstore_client.errors import LocalBudgetExceeded

if TYPE_CHECKING:
    from kvstore_kernels.layout import BlockLayout
    from kvstore_kernels.slab import Slab

_CGROUP = Path("/sys/fs/cgroup")


class _Arena:
    """Slabs with slots of one size. `free` holds, for each slab, the slots nobody uses."""

    def __init__(self) -> None:
        self.free: dict[Slab, list[int]] = {}


class LocalSlabs:
    """Worker-local slots, allocated a slab at a time up to a hard budget.

    They lie on the device that computes. The budget holds for each device by itself.

    Invariants: the bytes of all slabs of a device never exceed its budget; a slot is free or taken, never both; an
    unused slab is kept only while it is the one of its size, and goes when another size needs its room.
    """

    def __init__(self, budget: int | None, slab_bytes: int, available: Callable[[str], int] | None = None) -> None:
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._available = available_memory if available is None else available
        self._lock = threading.Lock()
        self._limits: dict[str, int] = {}
        self._arenas: dict[tuple[str, int], _Arena] = {}
        self._allocated: dict[str, int] = {}
        self._homes: dict[Slab, str] = {}
        self._cooling: list[tuple[Block, Pending]] = []
        self._taken = 0

    def settle_budget(self, device: str = "cpu") -> None:
        """Fixes an open budget to half of the device's memory that is available now. Later calls change nothing."""
        with self._lock:
            self._limit(device)

    def take(self, layout: BlockLayout, device: str = "cpu") -> Block:
        """A free slot on a device; its content is undefined. Raises LocalBudgetExceeded."""
        with self._lock:
            if self._cooling:
                self._sweep()
            try:
                return self._take(layout, device)
            except LocalBudgetExceeded:
                cooling = [using for _, using in self._cooling]
                if not cooling:
                    raise
        # Rare: all that is left is still read by a device, which has been told to finish long ago.
        wait(Settled(cooling), "the device work on local blocks that were given back")
        with self._lock:
            self._sweep()
            return self._take(layout, device)

    def _take(self, layout: BlockLayout, device: str) -> Block:
        arena = self._arenas.setdefault((device, layout.block_bytes), _Arena())
        slab = next((slab for slab, slots in arena.free.items() if slots), None)
        if slab is None:
            slab = self._grow(device, layout.block_bytes)
            arena.free[slab] = list(range(slab.slots - 1, -1, -1))
        self._taken += 1
        return Block(slab, arena.free[slab].pop(), Origin.LOCAL)

    def free(self, block: Block, after: Done | None = None) -> None:
        """Gives a slot back; the caller sees to it that this happens once. It is handed out again behind the device
        work `after`, whatever stream its next user has.
        """
        using = Pending(after)
        with self._lock:
            if using.settled():
                self._free(block)
            else:
                self._cooling.append((block, using))

    def _sweep(self) -> None:
        """Frees what no device uses any more. What a device is given up on for stays taken."""
        still = []
        for block, using in self._cooling:
            if not using.settled():
                still.append((block, using))
            elif not using.problem:
                self._free(block)
        self._cooling = still

    def _free(self, block: Block) -> None:
        device = self._homes[block.slab]
        arena = self._arenas[device, block.slab.slot_bytes]
        slots = arena.free[block.slab]
        slots.append(block.slot)
        self._taken -= 1
        if len(slots) == block.slab.slots and len(arena.free) > 1:
            self._drop(device, arena, block.slab)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(self._allocated.values())

    @property
    def taken_blocks(self) -> int:
        """Slots in use."""
        return self._taken

    @property
    def budget_bytes(self) -> int:
        """The hard limits of the devices in use (of the CPU, before the first use) together."""
        with self._lock:
            return sum(self._limits.values()) if self._limits else self._limit("cpu")

    def _limit(self, device: str) -> int:
        limit = self._limits.get(device)
        if limit is None:
            limit = self._limits[device] = self._available(device) // 2 if self._budget is None else self._budget
        return limit

    def _grow(self, device: str, slot_bytes: int) -> Slab:
        if self._slots_within(device, slot_bytes) < 1:
            for (where, _), arena in self._arenas.items():
                for slab in [s for s, slots in arena.free.items() if len(slots) == s.slots and where == device]:
                    self._drop(device, arena, slab)
        slots = self._slots_within(device, slot_bytes)
        if slots < 1:
            raise LocalBudgetExceeded(
                f"no room for another local block of {slot_bytes} bytes on {device}: "
                f"{self._allocated.get(device, 0)} of {self._limit(device)} bytes are in use; raise local_budget "
                "(connect(local_budget=...) or KVSTORE_CLIENT_LOCAL_BUDGET), give the service a larger budget, or "
                'attach with fallback="native"'
            )
        slab = allocate(slot_bytes, slots, device)
        self._homes[slab] = device
        self._allocated[device] = self._allocated.get(device, 0) + slots * slot_bytes
        return slab

    def _slots_within(self, device: str, slot_bytes: int) -> int:
        room = (self._limit(device) - self._allocated.get(device, 0)) // slot_bytes
        return min(max(1, self._slab_bytes // slot_bytes), room)

    def _drop(self, device: str, arena: _Arena, slab: Slab) -> None:
        del arena.free[slab], self._homes[slab]
        self._allocated[device] -= slab.slots * slab.slot_bytes


def allocate(slot_bytes: int, slots: int, device: str) -> Slab:
    """A slab in this process's own memory. Raises LocalBudgetExceeded when the device has none left."""
    import torch
    from kvstore_kernels.slab import Slab

    try:
        return Slab.allocate(slot_bytes, slots, device=device)
    except torch.OutOfMemoryError as error:
        raise LocalBudgetExceeded(
            f"no room for another local block of {slot_bytes} bytes on {device}: the device has none left, though "
            f"local_budget allows it; lower what else lives there, or give the service a larger budget ({error})"
        ) from None


def available_memory(device: str = "cpu") -> int:
    """Bytes this process could still use on a device.

    "cpu": MemAvailable, or less inside a memory-limited control group. "cuda:N": what the driver calls free.
    """
    if is_cuda(device):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return free
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
