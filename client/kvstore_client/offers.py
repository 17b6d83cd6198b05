"""What the service says a slab is, how to get at it, and whether that can be true."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvstore_proto.v1 import blocks_pb2, descriptor_pb2

from kvstore_client.cuda import GRANULE, HANDLE_BYTES, UUID_BYTES, uuid_text
from kvstore_client.errors import BadReplyError, CudaError, ServiceUnavailableError
from kvstore_client.memory import can_shrink

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore_client.descriptors import DescriptorSocket, Received
    from kvstore_client.link import Link

MEMFD = "memfd"
VMM = "cuda-vmm"
LEGACY = "cuda-legacy"
KINDS = (MEMFD, VMM, LEGACY)
# No slab comes near it; a larger one is a broken or hostile reply.
MOST_SLAB_BYTES = 1 << 44
ALLOCATION_ID_BYTES = 16
_KIND_OF_SEGMENT = {
    descriptor_pb2.MEMORY_KIND_UNSPECIFIED: MEMFD,
    descriptor_pb2.MEMORY_KIND_MEMFD: MEMFD,
    descriptor_pb2.MEMORY_KIND_CUDA_VMM: VMM,
}


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """What a service's slabs are, by its welcome. Only slabs of that kind, device and boot are ever mapped."""

    kind: str = MEMFD
    device_uuid: bytes = b""
    name: str = "cpu"
    """Its device, in the service's words."""
    device: str = "cpu"
    """The same device as this process knows it: "cpu", "cuda:0", ...; empty if it isn't visible here."""
    boot_id: bytes = b""

    @property
    def ordinal(self) -> int:
        """The device as torch counts it. Raises CudaError when it is not a CUDA device visible here."""
        if not self.device.startswith("cuda:"):
            raise CudaError(f"the service's device {self.name} {uuid_text(self.device_uuid)} is not visible here")
        return int(self.device.removeprefix("cuda:"))


@dataclass(slots=True)
class Offer:
    """A slab as the service describes it, unchecked. `fd` or `handle` is how to get at it; closed with the block."""

    kind: str
    nbytes: int
    slot_bytes: int
    slots: int
    device_uuid: bytes = b""
    allocation_id: bytes = b""
    received: Received | None = None
    handle: bytes = b""
    slab_id: int = 0
    boot_id: bytes = b""
    exporter_pid: int = 0
    closed: bool = field(default=False, init=False)

    @property
    def fd(self) -> int:
        """Its descriptor. Raises BadReplyError when it came without one."""
        if self.received is None:
            raise BadReplyError(f"a slab of kind {self.kind} came without a descriptor; it was not mapped")
        return self.received.fd

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self.received is not None and not self.closed:
            self.closed = True
            os.close(self.received.fd)


class SlabSource(Protocol):
    """Where slabs come from during one attachment."""

    def fetch(self, slab_id: int, *, writable: bool) -> Offer:
        """Asks the service for a slab, which grants it to its writer only if `writable`. Raises a ServiceError."""


class DescriptorSource:
    """Slabs by descriptor, over the descriptor socket."""

    def __init__(self, descriptors: DescriptorSocket, timeout_s: float) -> None:
        self._descriptors = descriptors
        self._timeout_s = timeout_s

    def fetch(self, slab_id: int, *, writable: bool) -> Offer:
        """See SlabSource."""
        segment, received = self._descriptors.open_slab(slab_id, writable=writable, timeout_s=self._timeout_s)
        return offer_of_segment(segment, received)


class HandleSource:
    """Slabs by legacy CUDA handle, over the API."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._link: weakref.ref[Link] | None = None

    def bind(self, link: Link) -> None:
        """Whom to ask. Weakly: the link owns the slabs that this serves."""
        self._link = weakref.ref(link)

    def fetch(self, slab_id: int, *, writable: bool) -> Offer:
        """See SlabSource."""
        link = None if self._link is None else self._link()
        if link is None:
            raise ServiceUnavailableError(f"slab {slab_id} can't be opened: the attachment is over")
        request = blocks_pb2.OpenSlabRequest(slab_id=slab_id, writable=writable)
        reply: blocks_pb2.OpenSlabResponse = link.call("OpenSlab", link.blocks.OpenSlab, request, self._timeout_s)
        return offer_of_handle(reply.handle)


def offer_of_segment(segment: descriptor_pb2.Segment, received: Received) -> Offer:
    """What came over the descriptor socket."""
    return Offer(
        kind=_KIND_OF_SEGMENT.get(segment.memory, f"{segment.memory}"),
        nbytes=segment.bytes,
        slot_bytes=segment.slot_bytes,
        slots=segment.slots,
        device_uuid=segment.device_uuid,
        allocation_id=segment.allocation_id,
        received=received,
    )


def offer_of_handle(handle: blocks_pb2.CudaIpcHandle) -> Offer:
    """What came over the API."""
    return Offer(
        kind=LEGACY,
        nbytes=handle.bytes,
        slot_bytes=handle.slot_bytes,
        slots=handle.slots,
        device_uuid=handle.device_uuid,
        allocation_id=handle.allocation_id,
        handle=handle.handle,
        slab_id=handle.slab_id,
        boot_id=handle.boot_id,
        exporter_pid=handle.exporter_pid,
    )


def check_offer(offer: Offer, home: ServiceMemory, slab_id: int, slot_bytes: int) -> None:
    """Compares an offer with what is known. Raises BadReplyError: it must not be mapped then."""
    problem = memory_problem(offer, home)
    if problem:
        pass
    elif offer.kind == LEGACY and offer.slab_id != slab_id:
        problem = f"came as slab {offer.slab_id}"
    elif offer.slot_bytes != slot_bytes:
        problem = f"has slots of {offer.slot_bytes} bytes; the layout's blocks have {slot_bytes}"
    elif not 0 < offer.slots <= offer.nbytes // slot_bytes:
        problem = f"claims {offer.slots} slots of {slot_bytes} bytes in {offer.nbytes}"
    elif offer.kind == MEMFD and can_shrink(offer.fd):
        problem = "is not sealed against shrinking"
    if problem:
        raise BadReplyError(f"slab {slab_id} {problem}; it was not mapped")


def memory_problem(offer: Offer, home: ServiceMemory) -> str:
    """What is wrong with the memory that an offer names; empty if nothing is."""
    if offer.kind != home.kind:
        return f"is of kind {offer.kind!r}, the service's slabs are {home.kind!r}"
    if offer.kind == MEMFD:
        actual = 0 if offer.received is None else offer.received.size
        if not 0 < offer.nbytes <= min(actual, MOST_SLAB_BYTES):
            return f"claims {offer.nbytes} bytes, its descriptor has {actual}"
        return ""
    if not 0 < offer.nbytes <= MOST_SLAB_BYTES or offer.nbytes % GRANULE:
        return f"claims {offer.nbytes} bytes; expected a multiple of {GRANULE}, at most {MOST_SLAB_BYTES}"
    if len(offer.device_uuid) != UUID_BYTES or offer.device_uuid != home.device_uuid:
        return f"lies on {uuid_text(offer.device_uuid)}; the service said {uuid_text(home.device_uuid)}"
    if len(offer.allocation_id) != ALLOCATION_ID_BYTES:
        return f"has an allocation id of {len(offer.allocation_id)} bytes; expected {ALLOCATION_ID_BYTES}"
    if offer.kind == LEGACY and len(offer.handle) != HANDLE_BYTES:
        return f"has a handle of {len(offer.handle)} bytes; expected {HANDLE_BYTES}"
    if offer.kind == LEGACY and offer.boot_id != home.boot_id:
        return f"has a handle of boot {offer.boot_id.hex() or 'unknown'}; the service's is {home.boot_id.hex()}"
    return ""


def pid_problem(offer: Offer) -> str:
    """Why CUDA would refuse a legacy handle because of process ids; empty if it would not."""
    if offer.exporter_pid != os.getpid():
        return ""
    return (
        f"the service and this worker both have pid {offer.exporter_pid}, each in its own pid namespace, and CUDA "
        "opens no legacy handle between equal pids; share the service's Unix socket with this container (the fd "
        "transport has no such rule), or give one of them another pid (docker run --init, or a shared --pid namespace)"
    )
