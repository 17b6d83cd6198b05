"""The service's slabs in this process's address space."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstore_client.device_work import is_cuda
from kvstore_client.errors import BadReplyError, CudaError, KVStoreError, ServiceUnavailableError
from kvstore_client.holds import Hold, take_hold
from kvstore_client.offers import Offer, ServiceMemory, SlabSource, check_offer

if TYPE_CHECKING:
    from kvstore_kernels.slab import Slab

log = logging.getLogger("kvstore_client")
MOST_RETIRED = 65536
UnmappedCallback = Callable[[int], None]
Later = Callable[[Callable[[], None]], None]


class MappedSlab:
    """One mapping. It ends when the last tensor, block or view over it is gone, wherever that is."""

    def __init__(self, slab: Slab, hold: Hold, *, writable: bool) -> None:
        self.slab = slab
        self.hold = hold
        self.writable = writable

    def change(self, offer: Offer | None, *, writable: bool) -> None:
        """Other rights over the same memory: no second alias exists at any time."""
        if not writable:
            # Before the rights go: a codec must be told by us, not by a fault.
            self.slab.writable = False
        self.hold.change(offer, writable=writable)
        self.writable = self.slab.writable = writable
        self.slab.pinned = self.hold.pinned

    def pin(self, ordinal: int) -> None:
        """Lets a CUDA device read host memory asynchronously, if it can be pinned."""
        self.hold.pin(ordinal, writable=self.writable)
        self.slab.pinned = self.hold.pinned


class SlabMap:
    """The mapped slabs of one attachment.

    Invariants: at most one mapping a slab; a slab that the service asked back is never mapped again; a mapping ends
    when nothing in this process refers to it and the device is done with it; `tell_unmapped` is called then, once for
    each slab.
    """

    def __init__(
        self, source: SlabSource, tell_unmapped: UnmappedCallback, later: Later, home: ServiceMemory | None = None
    ) -> None:
        """`later(action)` runs an action soon in a thread that may wait; callable from finalizers."""
        self.home = ServiceMemory() if home is None else home
        self._source = source
        self._tell_unmapped = tell_unmapped
        self._later = later
        self._lock = threading.Lock()
        self._mapped: dict[int, MappedSlab] = {}
        self._retired: dict[int, None] = {}
        # Of all mappings that are still there. Finalizers change it: no lock.
        self._alive: set[int] = set()

    def open(self, slab_id: int, slot_bytes: int, *, writable: bool, compute_device: str = "cpu") -> Slab:
        """The slab, mapped with at least the rights asked for; pinned if it is host memory that a CUDA device reads.

        Raises a ServiceError; nothing is mapped then, or it stays mapped unpinned, for writing alone.
        """
        with self._lock:
            if slab_id in self._retired:
                raise ServiceUnavailableError(f"slab {slab_id} is being returned to the service")
            mapped = self._mapped.get(slab_id)
            if mapped is None or (writable and not mapped.writable):
                try:
                    mapped = self._fetch(slab_id, slot_bytes, mapped, writable=writable)
                except (OSError, CudaError) as error:
                    raise ServiceUnavailableError(f"slab {slab_id} can't be mapped: {error}") from None
                self._mapped[slab_id] = mapped
            slab = mapped.slab
            if slab.slot_bytes != slot_bytes:
                raise BadReplyError(f"slab {slab_id} has slots of {slab.slot_bytes} bytes; expected {slot_bytes}")
            if not is_cuda(self.home.device) and is_cuda(compute_device) and not slab.pinned:
                mapped.pin(int(compute_device.removeprefix("cuda:")))
                if not slab.pinned and not writable:
                    # A copy into it needs no pinning; a kernel's pass over it would fail in the middle of an answer.
                    raise ServiceUnavailableError(
                        f"slab {slab_id} can't be read by {compute_device}: its {mapped.hold.nbytes} bytes of host "
                        "memory could not be pinned; free memory of this host, or serve with --device cuda"
                    )
            return slab

    def downgrade(self, slab_ids: list[int]) -> list[int]:
        """Makes mappings read-only. The slabs for which that is true now; the others stay as they are."""
        done: list[int] = []
        with self._lock:
            for slab_id in slab_ids:
                mapped = self._mapped.get(slab_id)
                if mapped is not None and mapped.writable:
                    try:
                        self._give_up_writing(slab_id, mapped)
                    except (KVStoreError, OSError) as error:
                        log.warning("slab %d can't be made read-only: %s", slab_id, error)
                        mapped.slab.writable = mapped.writable
                        continue
                done.append(slab_id)
        return done

    def retire(self, slab_ids: list[int]) -> None:
        """The service wants slabs back: each is unmapped as soon as nothing refers to it."""
        with self._lock:
            fresh = [slab_id for slab_id in slab_ids if slab_id not in self._retired]
            absent = [slab_id for slab_id in fresh if slab_id not in self._mapped]
            dropped = [self._mapped.pop(slab_id, None) for slab_id in fresh]
            self._retire(fresh)
        # Outside the lock: the last reference to a mapping may be among them.
        del dropped
        for slab_id in absent:
            self._tell_unmapped(slab_id)

    def writable_ids(self) -> list[int]:
        """Slabs mapped for writing."""
        with self._lock:
            return [i for i, m in self._mapped.items() if m.writable]

    @property
    def alive(self) -> int:
        """Mappings that are still there, those given up but still referred to included."""
        return len(self._alive)

    def rebind(self, source: SlabSource) -> None:
        """The session goes on over another connection to the same service."""
        with self._lock:
            self._source = source

    def close(self) -> None:
        """Lets all mappings go; those still in use stay until they are not."""
        with self._lock:
            self._retire(list(self._mapped))
            dropped, self._mapped = self._mapped, {}
        del dropped

    def __len__(self) -> int:
        return len(self._mapped)

    def _retire(self, slab_ids: list[int]) -> None:
        self._retired.update(dict.fromkeys(slab_ids))
        # Ids are never used again, and a service that asked for so many slabs since doesn't name the oldest any more.
        while len(self._retired) > MOST_RETIRED:
            del self._retired[next(iter(self._retired))]

    def _fetch(self, slab_id: int, slot_bytes: int, mapped: MappedSlab | None, *, writable: bool) -> MappedSlab:
        with self._source.fetch(slab_id, writable=writable) as offer:
            check_offer(offer, self.home, slab_id, slot_bytes)
            if mapped is None:
                return self._map(slab_id, offer, writable=writable)
            if offer.nbytes != mapped.hold.nbytes:
                raise BadReplyError(f"slab {slab_id} has {offer.nbytes} bytes; it had {mapped.hold.nbytes}")
            mapped.change(offer, writable=writable)
            return mapped

    def _give_up_writing(self, slab_id: int, mapped: MappedSlab) -> None:
        if not mapped.hold.asks_to_change:
            mapped.change(None, writable=False)
            return
        with self._source.fetch(slab_id, writable=False) as offer:
            check_offer(offer, self.home, slab_id, mapped.slab.slot_bytes)
            mapped.change(offer, writable=False)

    def _map(self, slab_id: int, offer: Offer, *, writable: bool) -> MappedSlab:
        hold = take_hold(offer, self.home, writable=writable)
        try:
            slab, memory = hold.slab(offer, writable=writable)
        except BaseException:
            hold.release()
            raise
        self._alive.add(slab_id)
        end = partial(_end, os.getpid(), hold, slab_id, self._alive, self._tell_unmapped)
        weakref.finalize(memory, _gone, hold, end, self._later).atexit = False
        return MappedSlab(slab, hold, writable=writable)


def _gone(hold: Hold, end: Callable[[], None], later: Later) -> None:
    """Nobody looks through a mapping any more. Runs in a finalizer, which must not wait for a device."""
    if hold.waits:
        later(end)
    else:
        end()


def _end(pid: int, hold: Hold, slab_id: int, alive: set[int], tell_unmapped: UnmappedCallback) -> None:
    # A forked child has copies of these objects but not the mapping; the address may be something else there.
    if os.getpid() != pid:
        return
    try:
        hold.release()
    except (CudaError, OSError) as error:
        # It stays mapped, so the service must not hear that it is gone.
        log.warning("slab %d can't be unmapped: %s", slab_id, error)
        return
    alive.discard(slab_id)
    tell_unmapped(slab_id)
