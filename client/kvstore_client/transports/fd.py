"""Blocks are read and written where they lie, through mapped descriptors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore_client.blocks import Block, Origin
from kvstore_client.descriptors import DescriptorSocket
from kvstore_client.errors import BadReplyError, ServiceError, ServiceUnavailableError
from kvstore_client.memory import buffer_at, map_shared, unmap
from kvstore_client.transports.base import Receipt, SlotRef, Transport, matches_checksum

if TYPE_CHECKING:
    from kvstore_kernels.layout import BlockLayout
    from kvstore_kernels.slab import Slab
    from kvstore_proto.v1 import blocks_pb2 as pb

    from kvstore_client.link import Link


class DescriptorTransport(Transport):
    """`verify` says when a leased block's checksum is compared: "first" time this process sees it, "always", "off"."""

    name: ClassVar[str] = "fd"
    in_place: ClassVar[bool] = True

    def __init__(self, verify: str) -> None:
        self._verify = verify

    def receive(self, link: Link, layout: BlockLayout, lease: pb.Lease) -> Receipt:
        """Maps what isn't mapped yet. The blocks before the first damaged or unmappable one."""
        receipt = Receipt()
        slabs: dict[int, Slab] = {}
        # Plain tuples: indexing protobuf's fields costs more than all the rest.
        places = zip(lease.slab_ids, lease.slots, lease.generations, lease.checksums, strict=True)
        for index, (slab_id, slot, generation, checksum) in enumerate(places):
            slab = slabs.get(slab_id)
            if slab is None:
                try:
                    slab = slabs[slab_id] = open_slab(link, layout, slab_id, writable=False)
                except ServiceError:
                    if not receipt.blocks:
                        raise
                    receipt.reason = "unmapped"
                    break
            check_slot(slab, slab_id, slot)
            block = Block(slab, slot, Origin.LEASED, slab_id, generation, link.epoch)
            if self._verify != "off" and not self._verified(link, block, layout, checksum, receipt):
                receipt.reason = "damaged"
                receipt.damaged.append(index)
                break
            receipt.blocks.append(block)
        return receipt

    def _verified(self, link: Link, block: Block, layout: BlockLayout, checksum: int, receipt: Receipt) -> bool:
        key = (block.slab_id, block.slot)
        if self._verify == "first" and link.verified.get(key) == block.generation:
            return True
        if not matches_checksum(block, layout, checksum, receipt):
            return False
        link.verified[key] = block.generation
        return True

    def send(self, link: Link, layout: BlockLayout, moves: Sequence[tuple[Block, SlotRef]]) -> int:
        """Copies within this host's memory."""
        for source, ref in moves:
            target = private_block(open_slab(link, layout, ref.slab_id, writable=True), ref, link.epoch)
            into = np.frombuffer(target.slab.slot_buffer(target.slot), dtype=np.uint8)
            np.copyto(into, np.frombuffer(source.slab.slot_buffer(source.slot), dtype=np.uint8))
        return layout.block_bytes * len(moves)


def open_slab(link: Link, layout: BlockLayout, slab_id: int, *, writable: bool) -> Slab:
    """The mapped slab. Raises a ServiceError."""
    if link.slabs is None:
        raise ServiceUnavailableError(f"slab {slab_id} can't be mapped over the {link.transport.name} transport")
    return link.slabs.open(slab_id, layout.block_bytes, writable=writable)


def private_block(slab: Slab, ref: SlotRef, epoch: int) -> Block:
    """The block in a slot that the service handed out. Raises BadReplyError when the slab has no such slot."""
    check_slot(slab, ref.slab_id, ref.slot)
    return Block(slab, ref.slot, Origin.PRIVATE, ref.slab_id, ref.generation, epoch)


def check_slot(slab: Slab, slab_id: int, slot: int) -> None:
    """Raises BadReplyError when the slab has no such slot."""
    if not 0 <= slot < slab.slots:
        raise BadReplyError(f"slot {slot} of slab {slab_id}: the slab has {slab.slots}; the reply was not used")


def probe_descriptors(descriptors: DescriptorSocket, timeout_s: float) -> str:
    """Maps a page with a nonce and compares it: empty if that works, else what does not."""
    try:
        nonce, received = descriptors.probe(timeout_s)
    except ServiceError as error:
        return f"the probe page did not arrive: {error}"
    with received as fd:
        size = os.fstat(fd).st_size
        if not 0 < len(nonce) <= size:
            return f"the probe page has {size} bytes and its nonce {len(nonce)}"
        try:
            address = map_shared(fd, size, writable=False)
        except OSError as error:
            return f"the probe page can't be mapped: {error}"
        try:
            found = bytes(memoryview(buffer_at(address, size))[: len(nonce)])
        finally:
            unmap(address, size)
    return "" if found == nonce else "the probe page does not hold its nonce"
