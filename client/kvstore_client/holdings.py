"""What a request must give back, kept apart from the request so that it can be given back when that is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_client.blocks import Block, Origin
from kvstore_client.device_work import Done
from kvstore_client.transports.base import SlotRef

if TYPE_CHECKING:
    from kvstore_client.local import LocalSlabs


@dataclass(slots=True)
class Debt:
    """Leases and slots of one epoch that are to be given back to the service."""

    leases: set[int] = field(default_factory=set)
    slots: set[SlotRef] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.leases or self.slots)

    def add(self, other: Debt) -> None:
        """Takes over another debt of the same epoch."""
        self.leases |= other.leases
        self.slots |= other.slots


class Holdings:
    """Leases, slots of the service and worker-local slots of one request.

    Invariants: everything is in here from the moment it is ours until it is given back, once; a local slot is not freed
    while a pending commit reads it; after close() nothing can be added.
    """

    def __init__(self, local: LocalSlabs, opened_at: float) -> None:
        self.opened_at = opened_at
        self._local_slabs = local
        self._lock = threading.Lock()
        self._debts: dict[int, Debt] = {}
        self._local: set[Block] = set()
        self._reading: dict[Block, int] = {}
        # To be freed when their commits have read them, behind what a device still does with them.
        self._doomed: dict[Block, Done | None] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether everything was given back."""
        return self._closed

    def add(self, epoch: int, *, leases: Iterable[int] = (), slots: Iterable[SlotRef] = ()) -> bool:
        """Takes leases and slots in. False when it is too late: the caller gives them back."""
        with self._lock:
            if not self._closed:
                self._debts.setdefault(epoch, Debt()).add(Debt(set(leases), set(slots)))
            return not self._closed

    def remove(self, epoch: int, ref: SlotRef) -> bool:
        """Takes a slot out, for the caller to give back. False if it isn't held."""
        with self._lock:
            debt = self._debts.get(epoch)
            if debt is None or ref not in debt.slots:
                return False
            debt.slots.remove(ref)
            return True

    def drop_leases(self, epoch: int, leases: set[int]) -> None:
        """Takes leases out, for the caller to give back."""
        with self._lock:
            debt = self._debts.get(epoch)
            if debt is not None:
                debt.leases -= leases

    def add_local(self, blocks: Iterable[Block]) -> bool:
        """Takes worker-local blocks in. False when it is too late: they are free again."""
        with self._lock:
            if not self._closed:
                self._local.update(blocks)
                return True
        for block in blocks:
            self._local_slabs.free(block)
        return False

    def free_local(self, block: Block, after: Done | None = None) -> None:
        """Frees a worker-local block, after the commits that read it and the device work `after`. Idempotent."""
        with self._lock:
            if block not in self._local:
                return
            if self._reading.get(block):
                self._doomed[block] = after
                return
            self._local.remove(block)
        self._local_slabs.free(block, after)

    def begin_reading(self, blocks: Iterable[Block]) -> None:
        """A commit is queued that reads these blocks."""
        with self._lock:
            for block in blocks:
                if block.origin is Origin.LOCAL:
                    self._reading[block] = self._reading.get(block, 0) + 1

    def end_reading(self, blocks: Iterable[Block]) -> None:
        """That commit is done or was dropped."""
        freed: list[tuple[Block, Done | None]] = []
        with self._lock:
            for block in blocks:
                if block.origin is not Origin.LOCAL:
                    continue
                self._reading[block] -= 1
                if self._reading[block]:
                    continue
                del self._reading[block]
                if block in self._doomed:
                    after = self._doomed.pop(block)
                    self._local.remove(block)
                    freed.append((block, after))
        for block, after in freed:
            self._local_slabs.free(block, after)

    def close(self, after: Done | None = None) -> dict[int, Debt]:
        """Frees the local blocks, behind the device work `after`; what is to be given back to the service, by epoch.

        Empty the second time.
        """
        with self._lock:
            self._closed = True
            debts, self._debts = self._debts, {}
            for block in self._reading:
                self._doomed.setdefault(block, after)
            freed = self._local - self._doomed.keys()
            self._local -= freed
        for block in freed:
            self._local_slabs.free(block, after)
        return debts
