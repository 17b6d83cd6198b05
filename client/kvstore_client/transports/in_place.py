"""Blocks are read, and where the device allows it written, where they lie: in mapped slabs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvstore_client.block_bytes import checksums_of, copy_blocks
from kvstore_client.blocks import Block, Origin
from kvstore_client.errors import BadReplyError, ServiceError, ServiceUnavailableError
from kvstore_client.transports.base import Receipt, SlotRef, Transport

if TYPE_CHECKING:
    from kvstore_kernels.slab import Slab
    from kvstore_proto.v1 import blocks_pb2 as pb

    from kvstore_client.link import Link
    from kvstore_client.namespace import Namespace


class InPlaceTransport(Transport):
    """`verify` says when a leased block's checksum is compared: "first" time this process sees it, "always", "off"."""

    in_place: ClassVar[bool] = True

    def __init__(self, verify: str) -> None:
        self._verify = verify

    def receive(self, link: Link, namespace: Namespace, lease: pb.Lease) -> Receipt:
        """Maps what isn't mapped yet. The blocks before the first damaged or unmappable one."""
        receipt = Receipt()
        slabs: dict[int, Slab] = {}
        blocks: list[Block] = []
        for slab_id, slot, generation in zip(lease.slab_ids, lease.slots, lease.generations, strict=True):
            slab = slabs.get(slab_id)
            if slab is None:
                try:
                    slab = slabs[slab_id] = open_slab(link, namespace, slab_id, writable=False)
                except ServiceError:
                    if not blocks:
                        raise
                    receipt.reason = "unmapped"
                    break
            check_slot(slab, slab_id, slot)
            blocks.append(Block(slab, slot, Origin.LEASED, slab_id, generation, link.epoch))
        sound = self._sound(link, namespace, blocks, lease.checksums, receipt)
        if sound < len(blocks):
            receipt.reason = "damaged"
            receipt.damaged.append(sound)
        receipt.blocks = blocks[:sound]
        return receipt

    def send(self, link: Link, namespace: Namespace, moves: Sequence[tuple[Block, SlotRef]]) -> int:
        """Copies within this host's memory, to or from a device."""
        targets = []
        for source, ref in moves:
            slab = open_slab(link, namespace, ref.slab_id, writable=True)
            targets.append((source, private_block(slab, ref, link.epoch)))
        copy_blocks(targets, namespace.layout)
        return namespace.layout.block_bytes * len(moves)

    def _sound(
        self, link: Link, namespace: Namespace, blocks: list[Block], checksums: Sequence[int], receipt: Receipt
    ) -> int:
        """How many leading blocks have the bytes they were committed with."""
        if self._verify == "off":
            return len(blocks)
        started = time.perf_counter()
        seen = link.verified if self._verify == "first" else {}
        unseen = [i for i, b in enumerate(blocks) if seen.get((b.slab_id, b.slot)) != b.generation]
        sums = checksums_of([blocks[i] for i in unseen], namespace.layout, namespace.compute_device)
        receipt.verify_s += time.perf_counter() - started
        for index, value in zip(unseen, sums, strict=True):
            block = blocks[index]
            if value != checksums[index]:
                return index
            link.verified[block.slab_id, block.slot] = block.generation
        return len(blocks)


class DescriptorTransport(InPlaceTransport):
    """Slabs mapped from descriptors: memfds, and virtual memory of a GPU."""

    name: ClassVar[str] = "fd"


class HandleTransport(InPlaceTransport):
    """Slabs opened from legacy CUDA handles."""

    name: ClassVar[str] = "cuda-ipc"


def open_slab(link: Link, namespace: Namespace, slab_id: int, *, writable: bool) -> Slab:
    """The mapped slab. Raises a ServiceError."""
    if link.slabs is None:
        raise ServiceUnavailableError(f"slab {slab_id} can't be mapped over the {link.transport.name} transport")
    return link.slabs.open(
        slab_id, namespace.layout.block_bytes, writable=writable, compute_device=namespace.compute_device
    )


def private_block(slab: Slab, ref: SlotRef, epoch: int) -> Block:
    """The block in a slot that the service handed out. Raises BadReplyError when the slab has no such slot."""
    check_slot(slab, ref.slab_id, ref.slot)
    return Block(slab, ref.slot, Origin.PRIVATE, ref.slab_id, ref.generation, epoch)


def check_slot(slab: Slab, slab_id: int, slot: int) -> None:
    """Raises BadReplyError when the slab has no such slot."""
    if not 0 <= slot < slab.slots:
        raise BadReplyError(f"slot {slot} of slab {slab_id}: the slab has {slab.slots}; the reply was not used")
