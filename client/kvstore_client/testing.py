"""For tests: blocks with known bytes, and a service in this process with faults to inject (bytes transport, TCP)."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from kvstore_kernels.layout import BlockLayout
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import blocks_pb2, blocks_pb2_grpc, session_pb2, session_pb2_grpc

from kvstore_client.blocks import NO_PARENT, Block
from kvstore_client.config import ClientConfig
from kvstore_client.core import split_digests
from kvstore_client.device_work import default_stream_done
from kvstore_client.namespace import ModelIdentity, Shard
from kvstore_client.request import Request

if TYPE_CHECKING:
    from kvstore_kernels.codecs.plan import CodecPlan

LAYOUT = BlockLayout.create("passthrough", layers=2, kv_heads=3, k_dim=24, v_dim=40, dtype="float32")
FAST = ClientConfig(
    connect_timeout_s=5.0,
    lookup_timeout_s=0.4,
    reserve_timeout_s=0.4,
    control_timeout_s=0.6,
    retry_interval_s=0.05,
    breaker_cooldown_s=0.2,
    local_budget=64 * 2**20,
)
"""For tests of a service that does not answer."""
PATIENT = replace(FAST, lookup_timeout_s=5.0, reserve_timeout_s=5.0, control_timeout_s=10.0)
"""For tests of one that does, on a machine that is busy."""

_STATUS = {True: blocks_pb2.RESERVE_STATUS_COMMITTED, False: blocks_pb2.RESERVE_STATUS_UNSPECIFIED}


def digest(*parts: object) -> bytes:
    """32 bytes that depend on the parts."""
    return hashlib.sha256(repr(parts).encode()).digest()


def chain_of(seed: object, blocks: int) -> list[bytes]:
    """The digests of a chain."""
    return [digest(seed, i) for i in range(blocks)]


def identity(name: str = "model", layout: BlockLayout = LAYOUT) -> ModelIdentity:
    """A model that isn't there."""
    return ModelIdentity(digest(name), name, layout.codec, layout, Shard("full:0-1", 0, layout.kv_heads))


def plan() -> CodecPlan:
    """An empty codec plan."""
    from kvstore_kernels.codecs.plan import CodecPlan

    return CodecPlan("passthrough")


def payload(seed: object, layout: BlockLayout = LAYOUT) -> bytes:
    """Random bytes of one block, the same for the same seed."""
    generator = np.random.default_rng(int.from_bytes(digest(seed)[:8], "little"))
    return generator.integers(0, 256, layout.block_bytes, dtype=np.uint8).tobytes()


def fill(block: Block, data: bytes) -> None:
    """Writes a block's bytes, on the current stream if it lies on a device."""
    if block.slab.device.type == "cpu":
        block.slab.slot_buffer(block.slot)[: len(data)] = data
        return
    import torch

    block.slab.slot_tensor(block.slot)[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def content(block: Block, layout: BlockLayout = LAYOUT) -> bytes:
    """Reads a block's bytes."""
    data: bytes = block.slab.slot_tensor(block.slot)[: layout.block_bytes].cpu().numpy().tobytes()
    return data


def write_chain(request: Request, digests: list[bytes], first: int = 0, layout: BlockLayout = LAYOUT) -> list[Block]:
    """Takes, fills and commits the blocks of a chain from `first` on; block i holds payload(digest i)."""
    blocks = []
    entries = []
    for index in range(first, len(digests)):
        block = request.take(digests[index])
        fill(block, payload(digests[index], layout))
        blocks.append(block)
        entries.append((block, digests[index], digests[index - 1] if index else NO_PARENT))
    request.commit(entries, after=default_stream_done(request.namespace.compute_device))
    return blocks


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Polls a condition until it holds or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


@dataclass
class FakeService(session_pb2_grpc.SessionServiceServicer, blocks_pb2_grpc.BlockServiceServicer):
    """Keeps blocks in a dict. `faults`: method → function called with the context before anything is done.

    `room` slots in all; `held` are those that a client has and didn't give back.
    """

    room: int = 64
    boot_id: bytes = b"B" * 16
    codec_plan: bytes = b""
    register_error: str = ""
    faults: dict[str, Callable[[grpc.ServicerContext], object]] = field(default_factory=dict)
    committed: dict[bytes, int] = field(default_factory=dict)
    payloads: dict[int, bytearray] = field(default_factory=dict)
    sums: dict[bytes, int] = field(default_factory=dict)
    errors: dict[bytes, float] = field(default_factory=dict)
    not_shared: int = 0
    held: set[int] = field(default_factory=set)
    leases: dict[int, list[bytes]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    damage: list[bytes] = field(default_factory=list)
    protocol_version: int = PROTOCOL_VERSION
    port: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.next_slot = 1
        self.next_lease = 1
        self.streams: list[grpc.ServicerContext] = []
        self.openings: list[session_pb2.OpenSession] = []
        self.server: grpc.Server | None = None

    def start(self) -> FakeService:
        """Serves on a port of the loopback interface."""
        self.server = grpc.server(futures.ThreadPoolExecutor(24))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self.server)
        blocks_pb2_grpc.add_BlockServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()
        return self

    def stop(self) -> None:
        """Ends, and lets go what hangs."""
        self.ended.set()
        if self.server is not None:
            self.server.stop(None).wait(5)

    @property
    def address(self) -> str:
        """What to connect to."""
        return f"127.0.0.1:{self.port}"

    def hang(self, *methods: str) -> None:
        """Has methods not answer until stop() or `ended` is set."""
        for method in methods:
            self.faults[method] = lambda _: self.ended.wait(30)

    def fail(self, method: str, code: grpc.StatusCode) -> None:
        """Has a method fail."""
        self.faults[method] = lambda context: context.abort(code, "injected")

    def _enter(self, method: str, context: grpc.ServicerContext, _request: object = None) -> None:
        with self.lock:
            self.calls.append(method)
        fault = self.faults.get(method)
        if fault is not None:
            fault(context)

    def Session(  # noqa: N802 - the name of the RPC
        self, requests: Iterator[session_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[session_pb2.SessionResponse]:
        self.openings.append(next(requests).open)
        self._enter("Session", context)
        self.streams.append(context)
        yield session_pb2.SessionResponse(welcome=self.welcome())
        for _ in requests:
            pass

    def welcome(self) -> session_pb2.Welcome:
        """What a session begins with."""
        return session_pb2.Welcome(
            session_id=b"S" * 16, boot_id=self.boot_id, protocol_version=self.protocol_version, tenant="t"
        )

    def GetCodecPlan(  # noqa: N802 - the name of the RPC
        self, request: session_pb2.GetCodecPlanRequest, context: grpc.ServicerContext
    ) -> session_pb2.GetCodecPlanResponse:
        self._enter("GetCodecPlan", context, request)
        return session_pb2.GetCodecPlanResponse(found=bool(self.codec_plan), codec_plan=self.codec_plan)

    def RegisterModel(  # noqa: N802 - the name of the RPC
        self, request: session_pb2.RegisterModelRequest, context: grpc.ServicerContext
    ) -> session_pb2.RegisterModelResponse:
        self._enter("RegisterModel", context)
        if self.register_error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.register_error)
        self.codec_plan = self.codec_plan or request.codec_plan
        return session_pb2.RegisterModelResponse(
            namespace_id=7, codec_plan=self.codec_plan, codec_plan_kept=self.codec_plan == request.codec_plan
        )

    def LookupAndLease(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.LookupAndLeaseRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.LookupAndLeaseResponse:
        self._enter("LookupAndLease", context)
        reply = blocks_pb2.LookupAndLeaseResponse(boot_id=self.boot_id)
        with self.lock:
            for query in request.queries:
                digests = split_digests(query.digests)
                held = []
                reason = 0
                for d in digests:
                    if d not in self.committed:
                        reason = 1
                        break
                    if query.HasField("max_block_error") and self.errors[d] > query.max_block_error:
                        reason = 4
                        break
                    held.append(d)
                lease = reply.leases.add(miss_reason=reason)
                if held:
                    lease.lease_id = self.next_lease
                    self.leases[self.next_lease] = held
                    self.next_lease += 1
                    lease.slab_ids.extend([1] * len(held))
                    lease.slots.extend(self.committed[d] for d in held)
                    lease.generations.extend([1] * len(held))
                    lease.checksums.extend(self.sums[d] for d in held)
                    lease.writers.add(writer="somebody", blocks=len(held))
        return reply

    def Reserve(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.ReserveRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.ReserveResponse:
        self._enter("Reserve", context)
        digests = split_digests(request.digests)
        reply = blocks_pb2.ReserveResponse(boot_id=self.boot_id)
        with self.lock:
            for _ in range(len(digests) + request.anonymous):
                if len(self.held) >= self.room:
                    reply.short_reason = "budget"
                    break
                self.held.add(self.next_slot)
                reply.slab_ids.append(1)
                reply.slots.append(self.next_slot)
                reply.generations.append(1)
                self.next_slot += 1
            reply.statuses.extend(_STATUS[d in self.committed] for d in digests)
            reply.in_flight_age_ms.extend(0 for _ in digests)
        return reply

    def WriteBlocks(  # noqa: N802 - the name of the RPC
        self, requests: Iterator[blocks_pb2.WriteBlocksRequest], context: grpc.ServicerContext
    ) -> blocks_pb2.WriteBlocksResponse:
        self._enter("WriteBlocks", context)
        total = 0
        for piece in requests:
            into = self.payloads.setdefault(piece.slot, bytearray())
            assert len(into) == piece.offset
            into.extend(piece.data)
            total += len(piece.data)
        return blocks_pb2.WriteBlocksResponse(bytes=total)

    def Commit(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.CommitResponse:
        self._enter("Commit", context)
        reply = blocks_pb2.CommitResponse(boot_id=self.boot_id)
        digests, parents = split_digests(request.digests), split_digests(request.parents)
        with self.lock:
            self.not_shared += request.not_shared_error
            for i, slot in enumerate(request.slots):
                d, parent = digests[i], parents[i]
                won = d not in self.committed and (parent == NO_PARENT or parent in self.committed)
                if won:
                    self.committed[d] = slot
                    self.sums[d] = request.checksums[i]
                    self.errors[d] = request.errors[i]
                reply.committed.append(won)
        return reply

    def Abort(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.AbortResponse:
        self._enter("Abort", context)
        with self.lock:
            before = len(self.held)
            self.held.difference_update(request.slots)
        return blocks_pb2.AbortResponse(aborted=before - len(self.held))

    def Release(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.ReleaseResponse:
        self._enter("Release", context)
        with self.lock:
            ended = [self.leases.pop(i, None) for i in request.lease_ids]
        return blocks_pb2.ReleaseResponse(released=sum(e is not None for e in ended))

    def ReportDamage(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.ReportDamageRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.ReportDamageResponse:
        self._enter("ReportDamage", context)
        with self.lock:
            self.damage.append(request.digests)
            self.committed.pop(request.digests, None)
        return blocks_pb2.ReportDamageResponse(condemned=1)

    def Pin(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.PinRequest, context: grpc.ServicerContext
    ) -> blocks_pb2.PinResponse:
        self._enter("Pin", context)
        if request.digest not in self.committed:
            context.abort(grpc.StatusCode.NOT_FOUND, "not held")
        return blocks_pb2.PinResponse(blocks=len(self.committed))

    def ReadBlocks(  # noqa: N802 - the name of the RPC
        self, request: blocks_pb2.ReadBlocksRequest, context: grpc.ServicerContext
    ) -> Iterator[blocks_pb2.ReadBlocksResponse]:
        self._enter("ReadBlocks", context)
        for index in range(request.first_block, request.blocks):
            data = bytes(self.payloads[self.committed[self.leases[request.lease_id][index]]])
            for offset in range(0, len(data), 8192):
                yield blocks_pb2.ReadBlocksResponse(block=index, offset=offset, data=data[offset : offset + 8192])
