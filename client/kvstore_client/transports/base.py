"""What every transport does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvstore_client.blocks import Block
from kvstore_client.errors import BadReplyError

if TYPE_CHECKING:
    from kvstore_proto.v1 import blocks_pb2 as pb

    from kvstore_client.link import Link
    from kvstore_client.namespace import Namespace


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One slot of the service, as it was handed out."""

    slab_id: int
    slot: int
    generation: int


@dataclass(slots=True)
class Receipt:
    """What became of a lease: the leading blocks that can be read, and why not all (see Match.reason)."""

    blocks: list[Block] = field(default_factory=list)
    reason: str = ""
    damaged: list[int] = field(default_factory=list)
    """Indices in the lease whose bytes don't match their checksum."""
    nbytes: int = 0
    """Payload bytes received."""
    verify_s: float = 0.0


class Transport(ABC):
    """Moves payloads between the service's slots and blocks of this process. Without state: threads may share it."""

    name: ClassVar[str]
    in_place: ClassVar[bool]
    """Whether blocks are read where they lie. If not, a lease may end as soon as it is received."""

    @abstractmethod
    def receive(self, link: Link, namespace: Namespace, lease: pb.Lease) -> Receipt:
        """Makes a lease's blocks readable, checksums compared. Raises a ServiceError when not a single one is."""

    @abstractmethod
    def send(self, link: Link, namespace: Namespace, moves: Sequence[tuple[Block, SlotRef]]) -> int:
        """Copies complete blocks into private slots of this session; done when it returns. Bytes sent. Raises a
        ServiceError.
        """


@dataclass(frozen=True, slots=True)
class TransportSet:
    """The transports of one store."""

    fd: Transport
    cuda_ipc: Transport
    bytes: Transport


def check_lease(lease: pb.Lease, asked: int) -> None:
    """A lease must be one of parallel arrays, no longer than what was asked for. Raises BadReplyError."""
    count = len(lease.slots)
    lengths = {count, len(lease.slab_ids), len(lease.generations), len(lease.checksums)}
    if len(lengths) != 1 or count > asked or (count > 0) != (lease.lease_id > 0):
        raise BadReplyError(
            f"lease {lease.lease_id} names {count} slots, {len(lease.slab_ids)} slabs and {len(lease.checksums)} "
            f"checksums for {asked} blocks; nothing of it was used"
        )


def check_reservation(reply: pb.ReserveResponse, digests: int, anonymous: int) -> list[SlotRef]:
    """The slots of a reservation: parallel arrays, no more of them than were asked for. Raises BadReplyError."""
    refs = slots_of(reply)
    counts = {len(refs), len(reply.slab_ids), len(reply.slots), len(reply.generations)}
    if len(counts) != 1 or len(refs) > digests + anonymous or len(reply.statuses) != digests:
        raise BadReplyError(
            f"a reservation has {len(reply.slots)} slots and {len(reply.statuses)} states for {digests} digests and "
            f"{anonymous} more; nothing of it was used"
        )
    return refs


def slots_of(reply: pb.ReserveResponse) -> list[SlotRef]:
    """The slots that a reservation names."""
    return [SlotRef(*ref) for ref in zip(reply.slab_ids, reply.slots, reply.generations, strict=False)]
