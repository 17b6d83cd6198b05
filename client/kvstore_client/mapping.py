"""The service's slabs in this process's address space."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore_client.descriptors import DescriptorSocket
from kvstore_client.errors import BadReplyError, KVStoreError, ServiceUnavailableError
from kvstore_client.memory import buffer_at, can_shrink, map_shared, unmap

if TYPE_CHECKING:
    from kvstore_kernels.slab import Slab
    from kvstore_proto.v1 import descriptor_pb2 as pb

# No slab comes near it; a larger one is a broken or hostile reply.
MOST_SLAB_BYTES = 1 << 44
MOST_RETIRED = 65536
UnmappedCallback = Callable[[int], None]


class MappedSlab:
    """One mapping. It ends when the last tensor, block or view over it is gone, wherever that is."""

    def __init__(self, slab: Slab, address: int, nbytes: int, *, writable: bool) -> None:
        self.slab = slab
        self.address = address
        self.nbytes = nbytes
        self.writable = writable

    def replace(self, fd: int, *, writable: bool) -> None:
        """Maps `fd` over the same address, so that no second alias with other rights exists."""
        map_shared(fd, self.nbytes, writable=writable, address=self.address)
        self.writable = writable
        self.slab.writable = writable


class SlabMap:
    """The mapped slabs of one attachment.

    Invariants: at most one mapping a slab; a slab that the service asked back is never mapped again; `tell_unmapped` is
    called once for each slab asked back, when nothing in this process refers to it.
    """

    def __init__(self, descriptors: DescriptorSocket, timeout_s: float, tell_unmapped: UnmappedCallback) -> None:
        self._descriptors = descriptors
        self._timeout_s = timeout_s
        self._tell_unmapped = tell_unmapped
        self._lock = threading.Lock()
        self._mapped: dict[int, MappedSlab] = {}
        self._retired: dict[int, None] = {}
        # Of all mappings that something in this process still refers to. Finalizers change it: no lock.
        self._alive: set[int] = set()

    def open(self, slab_id: int, slot_bytes: int, *, writable: bool) -> Slab:
        """The slab, mapped with at least the rights asked for. Raises a ServiceError; nothing is mapped then."""
        with self._lock:
            if slab_id in self._retired:
                raise ServiceUnavailableError(f"slab {slab_id} is being returned to the service")
            mapped = self._mapped.get(slab_id)
            if mapped is not None and (mapped.writable or not writable):
                self._check_slots(mapped.slab, slot_bytes, slab_id)
                return mapped.slab
            segment, received = self._descriptors.open_slab(slab_id, writable=writable, timeout_s=self._timeout_s)
            with received as fd:
                check_segment(segment, fd, slab_id, slot_bytes)
                try:
                    if mapped is not None:
                        if segment.bytes != mapped.nbytes:
                            raise BadReplyError(f"slab {slab_id} has {segment.bytes} bytes; it had {mapped.nbytes}")
                        mapped.replace(fd, writable=True)
                        return mapped.slab
                    mapped = self._map(slab_id, segment, fd, writable=writable)
                except OSError as error:
                    raise ServiceUnavailableError(f"slab {slab_id} can't be mapped: {error}") from None
            self._mapped[slab_id] = mapped
            return mapped.slab

    def downgrade(self, slab_ids: list[int]) -> list[int]:
        """Makes mappings read-only. The slabs for which that is true now; the others stay as they are."""
        done: list[int] = []
        with self._lock:
            for slab_id in slab_ids:
                mapped = self._mapped.get(slab_id)
                if mapped is None or not mapped.writable:
                    done.append(slab_id)
                    continue
                try:
                    segment, received = self._descriptors.open_slab(slab_id, writable=False, timeout_s=self._timeout_s)
                    with received as fd:
                        check_segment(segment, fd, slab_id, mapped.slab.slot_bytes)
                        mapped.replace(fd, writable=False)
                except (KVStoreError, OSError):
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

    def rebind(self, descriptors: DescriptorSocket) -> None:
        """The session goes on over another connection to the same service."""
        with self._lock:
            self._descriptors = descriptors

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

    def _map(self, slab_id: int, segment: pb.Segment, fd: int, *, writable: bool) -> MappedSlab:
        from kvstore_kernels.slab import Slab

        address = map_shared(fd, segment.bytes, writable=writable)
        memory = buffer_at(address, segment.bytes)
        self._alive.add(slab_id)
        weakref.finalize(
            memory, _unmap, os.getpid(), address, segment.bytes, slab_id, self._alive, self._tell_unmapped
        ).atexit = False
        slab = Slab.from_buffer(memory, segment.slot_bytes, slots=segment.slots)
        slab.writable = writable
        return MappedSlab(slab, address, segment.bytes, writable=writable)

    @staticmethod
    def _check_slots(slab: Slab, slot_bytes: int, slab_id: int) -> None:
        if slab.slot_bytes != slot_bytes:
            raise BadReplyError(f"slab {slab_id} has slots of {slab.slot_bytes} bytes; expected {slot_bytes}")


def check_segment(segment: pb.Segment, fd: int, slab_id: int, slot_bytes: int) -> None:
    """Compares what the service says with the descriptor itself. Raises BadReplyError: it must not be mapped then."""
    actual = os.fstat(fd).st_size
    problem = ""
    if not 0 < segment.bytes <= min(actual, MOST_SLAB_BYTES):
        problem = f"claims {segment.bytes} bytes, its descriptor has {actual}"
    elif segment.slot_bytes != slot_bytes:
        problem = f"has slots of {segment.slot_bytes} bytes; the layout's blocks have {slot_bytes}"
    elif not 0 < segment.slots <= segment.bytes // slot_bytes:
        problem = f"claims {segment.slots} slots of {slot_bytes} bytes in {segment.bytes}"
    elif can_shrink(fd):
        problem = "is not sealed against shrinking"
    if problem:
        raise BadReplyError(f"slab {slab_id} {problem}; it was not mapped")


def _unmap(pid: int, address: int, nbytes: int, slab_id: int, alive: set[int], tell_unmapped: UnmappedCallback) -> None:
    # A forked child has copies of these objects but not the mapping; the address may be something else there.
    if os.getpid() != pid:
        return
    unmap(address, nbytes)
    alive.discard(slab_id)
    tell_unmapped(slab_id)
