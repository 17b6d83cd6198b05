"""The `bytes` transport: payloads in chunks, as fast as the other side takes them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from kvstore_proto.v1 import blocks_pb2

from kvstore.errors import InvalidRequestError
from kvstore.service.core import Core
from kvstore.service.guard import parsed
from kvstore.store.payloads import Span
from kvstore.store.types import SlotRef

# Between 256 KiB and 1 MiB gRPC moves the most bytes a second; larger messages halve it.
CHUNK_BYTES = 512 * 1024
MAX_CHUNK_BYTES = 1024 * 1024


async def read_blocks(
    core: Core, session_id: bytes, request: blocks_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    """Sends blocks of a lease. Each chunk is read under the lease, so its end stops the stream (NotHeldError)."""
    held, block_bytes = core.store.payloads.blocks(session_id, request.lease_id)
    first = request.first_block
    last = first + request.blocks if request.blocks else held
    if first > held or last > held:
        raise InvalidRequestError(f"blocks {first} to {last} of a lease of {held} blocks. Expected a part of the lease")
    for block in range(first, last):
        for offset in range(0, block_bytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, block_bytes - offset)
            place = (session_id, request.lease_id, block, offset, nbytes)
            span = core.store.payloads.leased_span(*place)
            data = await core.on_memory("reading a block", span.read)
            # The lease may have ended during the copy, and the slot be another block's.
            core.store.payloads.leased_span(*place)
            core.bytes_sent += nbytes
            await context.write(blocks_pb2.ReadBlocksResponse(block=block, offset=offset, data=data))


async def write_blocks(core: Core, session_id: bytes, requests: AsyncIterator[blocks_pb2.WriteBlocksRequest]) -> int:
    """Takes payloads for private slots of the session; returns the bytes written."""
    written = 0
    async for received in requests:
        request = parsed(received)
        size = len(request.data)
        if not 0 < size <= MAX_CHUNK_BYTES:
            raise InvalidRequestError(f"a chunk of {size} bytes. Expected 1 to {MAX_CHUNK_BYTES}: split the block")
        slot = SlotRef(request.slab_id, request.slot, request.generation)
        span = core.store.payloads.begin_write(session_id, slot, request.offset, size)
        await _write(core, span, slot, request.data)
        core.bytes_received += size
        written += size
    return written


async def _write(core: Core, span: Span, slot: SlotRef, data: bytes) -> None:
    async def whole() -> None:
        try:
            await core.on_memory("writing a block", lambda: span.write(data))
        finally:
            core.store.payloads.end_write(slot)

    # Its thread writes on when the call is cancelled: until then the slot is nobody else's.
    await asyncio.shield(core.spawn(whole()))
