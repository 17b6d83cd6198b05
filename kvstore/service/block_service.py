"""BlockService: from protobuf to the store's values and back."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from kvstore_proto.v1 import blocks_pb2, blocks_pb2_grpc

from kvstore.service.core import Core
from kvstore.service.guard import guarded
from kvstore.service.handles import cuda_handle, probe_handle
from kvstore.service.payloads import read_blocks, write_blocks
from kvstore.service.requests import (
    DIGEST_BYTES,
    MAX_BLOCKS,
    MAX_WAIT_MS,
    check_count,
    check_digests,
    check_length,
    check_parallel,
    check_range,
    session_id_of,
)
from kvstore.service.rest import check_rest, reserve_rest, slot_refs
from kvstore.store.types import CommitEntry, LeaseResult, Query, Reservation

# The part of a caller's deadline that a reservation may spend on new slabs, and its bound without a deadline.
_RESERVE_SHARE = 0.5
_RESERVE_SECONDS = 5.0
Context = grpc.aio.ServicerContext[Any, Any]


class BlockService(blocks_pb2_grpc.BlockServiceServicer):
    """The life of blocks. Every call checks its fields, asks the store, and answers when its events are done."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @guarded
    async def Lookup(self, request: blocks_pb2.LookupRequest, context: Context) -> blocks_pb2.LookupResponse:  # noqa: N802
        session_id = session_id_of(context)
        matches = self._core.store.lookup(session_id, _queries(request.queries))
        return blocks_pb2.LookupResponse(
            matches=[blocks_pb2.Match(blocks=match.blocks, miss_reason=int(match.miss_reason)) for match in matches]  # type: ignore[arg-type]
        )

    @guarded
    async def LookupAndLease(  # noqa: N802
        self, request: blocks_pb2.LookupAndLeaseRequest, context: Context
    ) -> blocks_pb2.LookupAndLeaseResponse:
        session_id = session_id_of(context)
        queries = _queries(request.queries)
        check_range("wait_ms", request.wait_ms, 0, MAX_WAIT_MS)
        if request.wait_ms:
            await self._wait_for_writers(session_id, queries, request.wait_ms / 1000)
        if request.HasField("reserve"):
            check_rest(request)
        leases = self._core.store.lookup_and_lease(session_id, queries)
        reservation: Reservation | None = None
        try:
            if request.HasField("reserve"):
                reservation = reserve_rest(self._core.store, session_id, request, leases)
            await self._core.settled()
        except BaseException:
            # The caller will never hear of them.
            self._core.store.release(session_id, [lease.lease_id for lease in leases if lease.lease_id])
            if reservation is not None:
                self._core.store.abort(session_id, slot_refs(reservation))
            raise
        response = blocks_pb2.LookupAndLeaseResponse(boot_id=self._core.boot_id)
        for lease in leases:
            _add_lease(response, lease)
        if reservation is not None and reservation.needs_slab is not None:
            # Begun here, waited for in Reserve: what is held is not held up.
            self._core.spawn(self._core.provide(reservation.needs_slab))
        elif reservation is not None:
            self._core.provide_ahead(session_id, request.queries[0].namespace_id)
            response.reservation.CopyFrom(self._reserve_response(reservation))
        return response

    @guarded
    async def Reserve(self, request: blocks_pb2.ReserveRequest, context: Context) -> blocks_pb2.ReserveResponse:  # noqa: N802
        session_id = session_id_of(context)
        count = check_digests("digests", request.digests)
        check_range("anonymous", request.anonymous, 0, MAX_BLOCKS - count)
        remaining = context.time_remaining()
        seconds = _RESERVE_SECONDS if remaining is None else min(_RESERVE_SECONDS, _RESERVE_SHARE * remaining)
        reservation = await self._reserve(session_id, request, seconds)
        try:
            await self._core.settled()
        except asyncio.CancelledError:
            self._core.store.abort(session_id, slot_refs(reservation))
            raise
        self._core.provide_ahead(session_id, request.namespace_id)
        return self._reserve_response(reservation)

    @guarded
    async def Commit(self, request: blocks_pb2.CommitRequest, context: Context) -> blocks_pb2.CommitResponse:  # noqa: N802
        session_id = session_id_of(context)
        digests, parents = request.digests, request.parents
        count = check_parallel(
            slab_ids=request.slab_ids, slots=request.slots, generations=request.generations,
            checksums=request.checksums, errors=request.errors,
        )  # fmt: skip
        check_length("digests", digests, count * DIGEST_BYTES)
        check_length("parents", parents, count * DIGEST_BYTES)
        entries = [
            CommitEntry(slab_id, slot, generation, digests[at : at + 32], parents[at : at + 32], checksum, error)
            for slab_id, slot, generation, checksum, error, at in zip(
                request.slab_ids, request.slots, request.generations, request.checksums, request.errors,
                range(0, count * DIGEST_BYTES, DIGEST_BYTES), strict=True,
            )
        ]  # fmt: skip
        committed = self._core.store.commit(session_id, request.namespace_id, entries)
        self._core.store.note_not_shared(request.not_shared_error)
        await self._core.settled()
        return blocks_pb2.CommitResponse(committed=committed, boot_id=self._core.boot_id)

    @guarded
    async def Abort(self, request: blocks_pb2.AbortRequest, context: Context) -> blocks_pb2.AbortResponse:  # noqa: N802
        session_id = session_id_of(context)
        check_parallel(slab_ids=request.slab_ids, slots=request.slots, generations=request.generations)
        refs = slot_refs(request)
        aborted = self._core.store.abort(session_id, refs)
        await self._core.settled()
        return blocks_pb2.AbortResponse(aborted=aborted)

    @guarded
    async def Release(self, request: blocks_pb2.ReleaseRequest, context: Context) -> blocks_pb2.ReleaseResponse:  # noqa: N802
        session_id = session_id_of(context)
        check_count("lease_ids", len(request.lease_ids))
        released = self._core.store.release(session_id, list(request.lease_ids))
        await self._core.settled()
        return blocks_pb2.ReleaseResponse(released=released)

    @guarded
    async def Pin(self, request: blocks_pb2.PinRequest, context: Context) -> blocks_pb2.PinResponse:  # noqa: N802
        session_id = session_id_of(context)
        check_length("digest", request.digest, DIGEST_BYTES)
        blocks = self._core.store.pin(session_id, request.namespace_id, request.digest, request.pinned)
        await self._core.settled()
        return blocks_pb2.PinResponse(blocks=blocks)

    @guarded
    async def ReportDamage(  # noqa: N802
        self, request: blocks_pb2.ReportDamageRequest, context: Context
    ) -> blocks_pb2.ReportDamageResponse:
        session_id = session_id_of(context)
        check_digests("digests", request.digests)
        condemned = 0
        for at in range(0, len(request.digests), DIGEST_BYTES):
            # One block's checksum at a time: other calls run between them.
            digest = request.digests[at : at + DIGEST_BYTES]
            for check in self._core.store.payloads.damage_checks(session_id, request.namespace_id, digest):
                sound = await self._core.on_memory("checking a block", check.is_sound)
                condemned += self._core.store.payloads.checked(check, sound)
            await asyncio.sleep(0)
        if condemned:
            self._core.log_damage(condemned, f"reported by session {session_id.hex()[:8]}")
        await self._core.settled()
        return blocks_pb2.ReportDamageResponse(condemned=condemned)

    @guarded
    async def ReadBlocks(  # type: ignore[override]  # noqa: N802  # gRPC also takes a coroutine that writes itself
        self, request: blocks_pb2.ReadBlocksRequest, context: Context
    ) -> None:
        await read_blocks(self._core, session_id_of(context), request, context)

    @guarded
    async def WriteBlocks(  # noqa: N802
        self, requests: AsyncIterator[blocks_pb2.WriteBlocksRequest], context: Context
    ) -> blocks_pb2.WriteBlocksResponse:
        written = await write_blocks(self._core, session_id_of(context), requests)
        return blocks_pb2.WriteBlocksResponse(bytes=written)

    @guarded
    async def OpenSlab(  # noqa: N802
        self, request: blocks_pb2.OpenSlabRequest, context: Context
    ) -> blocks_pb2.OpenSlabResponse:
        slab = self._core.store.open_slab(session_id_of(context), request.slab_id, writable=request.writable)
        await self._core.settled()
        handle = cuda_handle(
            self._core, slab.memory, slab_id=slab.slab_id, slots=slab.slots, slot_bytes=slab.slot_bytes
        )
        return blocks_pb2.OpenSlabResponse(handle=handle)

    @guarded
    async def ProbeHandle(  # noqa: N802
        self, _request: blocks_pb2.ProbeHandleRequest, context: Context
    ) -> blocks_pb2.ProbeHandleResponse:
        self._core.store.check_session(session_id_of(context))
        return probe_handle(self._core)

    def _reserve_response(self, reservation: Reservation) -> blocks_pb2.ReserveResponse:
        return blocks_pb2.ReserveResponse(
            slab_ids=reservation.slab_ids,
            slots=reservation.slots,
            generations=reservation.generations,
            statuses=[int(status) for status in reservation.statuses],  # type: ignore[misc]
            in_flight_age_ms=reservation.in_flight_age_ms,
            short_reason=reservation.short_reason,
            boot_id=self._core.boot_id,
        )

    async def _wait_for_writers(self, session_id: bytes, queries: Sequence[Query], wait_s: float) -> None:
        """Waits until no query's next block is being written by another session, `wait_s` at most."""
        store = self._core.store
        deadline = time.monotonic() + wait_s
        for namespace_id, digests, bound in queries:
            while (digest := store.in_flight_digest(session_id, namespace_id, digests, bound)) is not None:
                over = asyncio.Event()
                cancel = store.watch_digest(namespace_id, digest, lambda _committed, over=over: over.set())  # type: ignore[misc]
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await over.wait()
                except TimeoutError:
                    return
                finally:
                    cancel()

    async def _reserve(self, session_id: bytes, request: blocks_pb2.ReserveRequest, seconds: float) -> Reservation:
        """Grants what is asked, slab by slab; what there is when `seconds` are over.

        Ends without a count of its own: each round allocates a slab, and the budget holds so many of them.
        """
        store = self._core.store
        stop = time.monotonic() + seconds
        while True:
            reservation = store.reserve(session_id, request.namespace_id, request.digests, request.anonymous)
            if reservation.needs_slab is None:
                return reservation
            if time.monotonic() >= stop:
                break
            await self._core.provide(reservation.needs_slab)
        reservation = store.reserve(session_id, request.namespace_id, request.digests, request.anonymous, grow=False)
        if reservation.short_reason:
            reservation.short_reason = "more slabs are being allocated: try again"
        return reservation


def _queries(queries: Sequence[blocks_pb2.Query]) -> list[Query]:
    for query in queries:
        check_digests("digests", query.digests)
    return [
        Query(
            query.namespace_id,
            query.digests,
            query.max_block_error if query.HasField("max_block_error") else math.inf,
        )
        for query in queries
    ]


def _add_lease(response: blocks_pb2.LookupAndLeaseResponse, lease: LeaseResult) -> None:
    target = response.leases.add()
    prefix = lease.prefix
    if prefix is not None:
        if not prefix.wire:
            # Lists of numbers become a message slowly and bytes fast: once for all leases of this prefix.
            prefix.wire = blocks_pb2.Lease(
                slab_ids=lease.slab_ids,
                slots=lease.slots,
                generations=lease.generations,
                checksums=lease.checksums,
                writers=[blocks_pb2.WriterRun(writer=writer, blocks=blocks) for writer, blocks in lease.writers],
            ).SerializeToString()
        target.ParseFromString(prefix.wire)
    target.lease_id = lease.lease_id
    target.miss_reason = int(lease.miss_reason)  # type: ignore[assignment]
    target.in_flight_age_ms = lease.in_flight_age_ms
