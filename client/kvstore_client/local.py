"""Slots in this process's own memory, for when the service has none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_client.blocks import Block, Origin
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

    Invariants: the bytes of all slabs never exceed the budget; a slot is free or taken, never both; an unused slab is
    kept only while it is the one of its size, and goes when another size needs its room.
    """

    def __init__(self, budget: int | None, slab_bytes: int, available: Callable[[], int] | None = None) -> None:
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._available = available_memory if available is None else available
        self._lock = threading.Lock()
        self._arenas: dict[int, _Arena] = {}
        self._allocated = 0
        self._taken = 0

    def settle_budget(self) -> None:
        """Fixes an open budget to half of the memory that is available now. Later calls change nothing."""
        with self._lock:
            self._limit()

    def take(self, layout: BlockLayout) -> Block:
        """A free slot; its content is undefined. Raises LocalBudgetExceeded."""
        with self._lock:
            arena = self._arenas.setdefault(layout.block_bytes, _Arena())
            slab = next((slab for slab, slots in arena.free.items() if slots), None)
            if slab is None:
                slab = self._grow(layout.block_bytes)
                arena.free[slab] = list(range(slab.slots - 1, -1, -1))
            self._taken += 1
            return Block(slab, arena.free[slab].pop(), Origin.LOCAL)

    def free(self, block: Block) -> None:
        """Gives a slot back; the caller sees to it that this happens once."""
        with self._lock:
            arena = self._arenas[block.slab.slot_bytes]
            slots = arena.free[block.slab]
            slots.append(block.slot)
            self._taken -= 1
            if len(slots) == block.slab.slots and len(arena.free) > 1:
                self._drop(arena, block.slab)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._allocated

    @property
    def taken_blocks(self) -> int:
        """Slots in use."""
        return self._taken

    @property
    def budget_bytes(self) -> int:
        """The hard limit; fixed by the first use."""
        with self._lock:
            return self._limit()

    def _limit(self) -> int:
        if self._budget is None:
            self._budget = self._available() // 2
        return self._budget

    def _grow(self, slot_bytes: int) -> Slab:
        from kvstore_kernels.slab import Slab

        if self._slots_within(slot_bytes) < 1:
            for arena in self._arenas.values():
                for slab in [s for s, slots in arena.free.items() if len(slots) == s.slots]:
                    self._drop(arena, slab)
        slots = self._slots_within(slot_bytes)
        if slots < 1:
            raise LocalBudgetExceeded(
                f"no room for another local block of {slot_bytes} bytes: {self._allocated} of {self._limit()} bytes "
                "are in use; raise local_budget (connect(local_budget=...) or KVSTORE_CLIENT_LOCAL_BUDGET), give the "
                'service a larger budget, or attach with fallback="native"'
            )
        self._allocated += slots * slot_bytes
        return Slab.allocate(slot_bytes, slots)

    def _slots_within(self, slot_bytes: int) -> int:
        room = (self._limit() - self._allocated) // slot_bytes
        return min(max(1, self._slab_bytes // slot_bytes), room)

    def _drop(self, arena: _Arena, slab: Slab) -> None:
        del arena.free[slab]
        self._allocated -= slab.slots * slab.slot_bytes


def available_memory() -> int:
    """Bytes this process could still use: MemAvailable, or less inside a memory-limited control group."""
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
