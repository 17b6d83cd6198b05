"""AdminService: what operators see and steer."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

from kvstore import version
from kvstore.service.core import Core
from kvstore.service.guard import guarded
from kvstore.service.requests import DIGEST_BYTES, check_length

Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Reads the store's numbers and calls its operator methods; only served on the admin socket."""

    def __init__(self, core: Core, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._started = clock()

    @guarded
    async def GetStats(self, _request: admin_pb2.GetStatsRequest, _context: Context) -> admin_pb2.GetStatsResponse:  # noqa: N802
        stats = self._core.store.stats()
        sums = stats.counters
        return admin_pb2.GetStatsResponse(
            boot_id=self._core.boot_id,
            server_version=version(),
            uptime_s=self._clock() - self._started,
            devices=[
                admin_pb2.DeviceStats(
                    device=device.device,
                    budget_bytes=device.budget_bytes,
                    used_bytes=device.used_bytes,
                    slots_free=device.slots_free,
                    slots_private=device.slots_private,
                    slots_committed=device.slots_committed,
                    slots_condemned=device.slots_condemned,
                    slabs_live=device.slabs_live,
                    slabs_draining=device.slabs_draining,
                    memory=self._core.device.kind,
                    device_uuid=self._core.device.uuid,
                    blocks_pinned=device.blocks_pinned,
                )
                for device in stats.devices
            ],
            lookups=sums.lookups,
            lookup_tokens=sums.lookup_tokens,
            hit_tokens=sums.hit_tokens,
            commits=sums.commits,
            commit_losses=sums.commit_losses,
            evictions=sums.evictions,
            damaged=sums.damaged,
            reserve_short=sums.reserve_short,
            leases=stats.leases,
            sessions=stats.sessions,
            bytes_sent=self._core.bytes_sent,
            bytes_received=self._core.bytes_received,
            blocks_not_shared_error=sums.blocks_not_shared_error,
        )

    @guarded
    async def ListNamespaces(  # noqa: N802
        self, _request: admin_pb2.ListNamespacesRequest, _context: Context
    ) -> admin_pb2.ListNamespacesResponse:
        return admin_pb2.ListNamespacesResponse(
            namespaces=[
                admin_pb2.NamespaceStats(
                    namespace_id=namespace.namespace_id,
                    tenant=namespace.tenant,
                    model_name=namespace.model_name,
                    model_fingerprint=namespace.fingerprint,
                    codec=namespace.codec,
                    block_bytes=namespace.block_bytes,
                    block_tokens=namespace.block_tokens,
                    committed=namespace.committed,
                    private=namespace.private,
                    condemned=namespace.condemned,
                    free=namespace.free,
                    pinned_chains=namespace.pinned_chains,
                    slabs=namespace.slabs,
                    slab_bytes=namespace.slab_bytes,
                    max_bytes=namespace.max_bytes,
                    guaranteed_bytes=namespace.guaranteed_bytes,
                    sessions=namespace.sessions,
                    largest_error=namespace.largest_error,
                    mean_error=namespace.mean_error,
                    plan_name=namespace.plan_name,
                )
                for namespace in self._core.store.namespaces()
            ]
        )

    @guarded
    async def ListSessions(  # noqa: N802
        self, _request: admin_pb2.ListSessionsRequest, _context: Context
    ) -> admin_pb2.ListSessionsResponse:
        return admin_pb2.ListSessionsResponse(
            sessions=[
                admin_pb2.SessionStats(
                    session_id=session.session_id,
                    name=session.name,
                    tenant=session.tenant,
                    transport=session.transport,
                    transport_reason=session.transport_reason,
                    process_watched=session.process_watched,
                    leases=session.leases,
                    private_slots=session.private_slots,
                    age_s=session.age_s,
                    oldest_lease_s=session.oldest_lease_s,
                    client_version=session.client_version,
                )
                for session in self._core.store.sessions()
            ]
        )

    @guarded
    async def Evict(self, request: admin_pb2.EvictRequest, _context: Context) -> admin_pb2.EvictResponse:  # noqa: N802
        result = self._core.store.evict(request.namespace_id, include_pinned=request.include_pinned)
        await self._core.settled()
        return admin_pb2.EvictResponse(freed=result.freed, condemned=result.condemned, pinned=result.pinned)

    @guarded
    async def PinChain(self, request: admin_pb2.PinChainRequest, _context: Context) -> admin_pb2.PinChainResponse:  # noqa: N802
        check_length("digest", request.digest, DIGEST_BYTES)
        blocks = self._core.store.pin_chain(request.namespace_id, request.digest, request.pinned)
        await self._core.settled()
        return admin_pb2.PinChainResponse(blocks=blocks)

    @guarded
    async def CheckIntegrity(  # noqa: N802
        self, request: admin_pb2.CheckIntegrityRequest, _context: Context
    ) -> admin_pb2.CheckIntegrityResponse:
        store = self._core.store
        verified = damaged = 0
        if request.payloads:
            for check in store.payloads.checks():
                sound = await self._core.on_memory("checking a block", check.is_sound)
                store.payloads.checked(check, sound)
                verified += 1
                damaged += not sound
                # One block a step: other calls, health above all, run in between.
                await asyncio.sleep(0)
            if damaged:
                self._core.log_damage(damaged, "found by a check")
            await self._core.settled()
        return admin_pb2.CheckIntegrityResponse(
            problems=store.check_integrity(), blocks_verified=verified, damaged=damaged
        )
