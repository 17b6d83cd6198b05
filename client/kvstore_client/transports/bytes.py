"""Payloads in gRPC streams: works on any host. Blocks live in worker-local slots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client.block_bytes import HostFiller, checksums_of, host_copies
from kvstore_client.blocks import Block
from kvstore_client.errors import BadReplyError, LocalBudgetExceeded
from kvstore_client.local import LocalSlabs
from kvstore_client.transports.base import Receipt, SlotRef, Transport

if TYPE_CHECKING:
    from kvstore_kernels.layout import BlockLayout

    from kvstore_client.link import Link
    from kvstore_client.namespace import Namespace

CHUNK_BYTES = 512 * 1024


class BytesTransport(Transport):
    """Downloads into and uploads from the slots of `local`. Every payload's checksum is compared, always.

    A transfer's deadline is `base_s` plus its bytes at `bytes_per_s`.
    """

    name: ClassVar[str] = "bytes"
    in_place: ClassVar[bool] = False

    def __init__(self, local: LocalSlabs, base_s: float, bytes_per_s: float) -> None:
        self._local = local
        self._base_s = base_s
        self._bytes_per_s = bytes_per_s

    def receive(self, link: Link, namespace: Namespace, lease: pb.Lease) -> Receipt:
        """The blocks before the first that is damaged or finds no room. They belong to the caller, who frees them."""
        receipt = Receipt()
        layout = namespace.layout
        targets: list[Block] = []
        for _ in lease.slots:
            try:
                targets.append(self._local.take(layout, namespace.compute_device))
            except LocalBudgetExceeded:
                receipt.reason = "local-budget"
                break
        good = 0
        try:
            if targets:
                self._download(link, layout, lease.lease_id, targets)
                receipt.nbytes = len(targets) * layout.block_bytes
            started = time.perf_counter()
            sums = checksums_of(targets, layout)
            receipt.verify_s += time.perf_counter() - started
            pairs = zip(sums, lease.checksums, strict=False)
            good = next((i for i, (found, expected) in enumerate(pairs) if found != expected), len(targets))
            if good < len(targets):
                receipt.reason = "damaged"
                receipt.damaged.append(good)
        finally:
            for block in targets[good:]:
                self._local.free(block)
        receipt.blocks = targets[:good]
        return receipt

    def send(self, link: Link, namespace: Namespace, moves: Sequence[tuple[Block, SlotRef]]) -> int:
        """One stream for all blocks."""
        layout = namespace.layout
        nbytes = layout.block_bytes * len(moves)
        reply = link.call(
            "WriteBlocks", link.blocks.WriteBlocks, lambda: _chunks(layout, moves), self._deadline_s(nbytes)
        )
        if reply.bytes != nbytes:
            raise BadReplyError(f"the service wrote {reply.bytes} of {nbytes} bytes; the blocks were not committed")
        return nbytes

    def _download(self, link: Link, layout: BlockLayout, lease_id: int, targets: list[Block]) -> None:
        request = pb.ReadBlocksRequest(lease_id=lease_id, first_block=0, blocks=len(targets))

        def exchange() -> None:
            timeout_s = self._deadline_s(layout.block_bytes * len(targets))
            pieces = link.blocks.ReadBlocks(request, timeout=timeout_s, metadata=link.metadata)
            try:
                _fill(pieces, layout, targets)
            finally:
                pieces.cancel()

        link.guarded("ReadBlocks", exchange)

    def _deadline_s(self, nbytes: int) -> float:
        return self._base_s + nbytes / self._bytes_per_s


def _fill(pieces: Iterator[pb.ReadBlocksResponse], layout: BlockLayout, targets: list[Block]) -> None:
    """Writes pieces to where they belong; they must come in order and without gaps."""
    block_bytes = layout.block_bytes
    filler = HostFiller(layout)
    position = 0
    for piece in pieces:
        index, offset = divmod(position, block_bytes)
        if piece.block != index or piece.offset != offset or not 0 < len(piece.data) <= block_bytes - offset:
            raise BadReplyError(
                f"a piece of {len(piece.data)} bytes at {piece.offset} of block {piece.block}; expected block {index} "
                f"from {offset} on; nothing of it was used"
            )
        if offset == 0:
            into = filler.begin(targets[index])
        into[offset : offset + len(piece.data)] = piece.data
        position += len(piece.data)
        if offset + len(piece.data) == block_bytes:
            filler.end(targets[index])
        if position == block_bytes * len(targets):
            filler.finish()
            return
    raise BadReplyError(f"the service sent {position} of {block_bytes * len(targets)} bytes; nothing of it was used")


def _chunks(layout: BlockLayout, moves: Sequence[tuple[Block, SlotRef]]) -> Iterator[pb.WriteBlocksRequest]:
    payloads = host_copies([source for source, _ in moves], layout)
    for payload, (_, ref) in zip(payloads, moves, strict=True):
        for offset in range(0, layout.block_bytes, CHUNK_BYTES):
            yield pb.WriteBlocksRequest(
                slab_id=ref.slab_id,
                slot=ref.slot,
                generation=ref.generation,
                offset=offset,
                data=bytes(payload[offset : min(offset + CHUNK_BYTES, layout.block_bytes)]),
            )
