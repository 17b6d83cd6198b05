"""SessionService: opens and keeps sessions, registers models."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import grpc
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import session_pb2, session_pb2_grpc

from kvstore import version
from kvstore.device.base import CUDA_LEGACY
from kvstore.errors import (
    AccessDeniedError,
    ConflictError,
    InvalidRequestError,
    ProtocolMismatchError,
    UnknownSessionError,
)
from kvstore.service.clients import Client
from kvstore.service.core import Core
from kvstore.service.guard import guarded, parsed
from kvstore.service.requests import (
    MAX_CODEC,
    MAX_NAME,
    MAX_TEXT,
    check_count,
    check_length,
    check_range,
    check_text,
    metadata_value,
    session_id_of,
)
from kvstore.service.sessions import LiveSession
from kvstore.store.types import ModelSpec

OPEN_DEADLINE_S = 10.0
TENANT = "default"
_TRANSPORTS = ("fd", "cuda-ipc", "bytes")
_logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """The session stream and the models.

    Invariants: however a stream ends, a session of a watched process that holds anything ends only when that dies: an
    orderly end looks like a broken one for a moment, and the process may be reading in place. A worker that leaves
    gives back and unmaps all first; a session that holds nothing ends with its stream. One that nobody watches ends a
    grace period after its stream.
    """

    def __init__(
        self, core: Core, *, session_grace_s: float, new_id: Callable[[], bytes] = lambda: secrets.token_bytes(16)
    ) -> None:
        self._core = core
        self._session_grace_s = session_grace_s
        self._new_id = new_id

    @guarded
    async def Session(  # type: ignore[override]  # noqa: N802  # gRPC also takes a coroutine that reads and writes itself
        self, _requests: object, context: Context
    ) -> None:
        session = await self._open(context)
        core = self._core
        welcome = session_pb2.Welcome(
            session_id=session.session_id,
            boot_id=core.boot_id,
            server_version=version(),
            protocol_version=PROTOCOL_VERSION,
            tenant=TENANT,
            device=core.device.name,
            device_uuid=core.device.uuid,
            memory=core.device.kind,
        )
        try:
            await core.settled()
            await context.write(session_pb2.SessionResponse(welcome=welcome))
            await self._converse(session, context)
        finally:
            # Also when the stream broke, which cancels this call.
            self._stream_ended(session)

    @guarded
    async def GetCodecPlan(  # noqa: N802
        self, request: session_pb2.GetCodecPlanRequest, context: Context
    ) -> session_pb2.GetCodecPlanResponse:
        session_id = session_id_of(context)
        check_length("model_fingerprint", request.model_fingerprint, 32)
        check_text("codec", request.codec, MAX_CODEC)
        plan = self._core.store.codec_plan(session_id, request.model_fingerprint, request.codec)
        return session_pb2.GetCodecPlanResponse(found=plan is not None, codec_plan=plan or b"")

    @guarded
    async def RegisterModel(  # noqa: N802
        self, request: session_pb2.RegisterModelRequest, context: Context
    ) -> session_pb2.RegisterModelResponse:
        session_id = session_id_of(context)
        store = self._core.store
        registration = store.register_model(session_id, _model_spec(request))
        ahead = store.prepare_slab(session_id, registration.namespace_id)
        if ahead is not None:
            self._core.spawn(self._core.provide(ahead))
        else:
            self._core.provide_ahead(session_id, registration.namespace_id)
        await self._core.settled()
        return session_pb2.RegisterModelResponse(
            namespace_id=registration.namespace_id,
            codec_plan=registration.codec_plan,
            codec_plan_kept=registration.codec_plan_kept,
            max_bytes=registration.max_bytes,
        )

    async def _open(self, context: Context) -> LiveSession:
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                first = parsed(await context.read())
        except TimeoutError:
            raise InvalidRequestError(
                f"no open within {OPEN_DEADLINE_S:.0f} s. Expected it as the first message"
            ) from None
        if first is grpc.aio.EOF or first.WhichOneof("message") != "open":
            raise InvalidRequestError("the stream does not begin with open. Expected it as the first message")
        request: session_pb2.OpenSession = first.open
        _check_open(request)
        client = self._client(request, context)
        _check_transport(request.transport, self._core.device.kind)
        core = self._core
        old = core.sessions.of_instance(request.instance_id)
        _check_same_process(old, client)
        session_id = self._new_id()
        name = core.store.open_session(
            session_id=session_id,
            instance_id=request.instance_id,
            tenant=TENANT,
            name=request.name,
            transport=request.transport,
            transport_reason=request.transport_reason,
            watched=client is not None and client.watched,
            client_version=request.client_version,
        )
        session = LiveSession(session_id, request.instance_id, name, client)
        if client is not None:
            client.session_id = session_id
        core.sessions.add(session)
        _logger.info(
            "session %s of %s opened: transport %s%s, %s", session_id.hex()[:8], name, request.transport,
            f" ({request.transport_reason})" if request.transport_reason else "",
            f"process {client.pid} is watched" if client is not None and client.watched else "no process is watched",
        )  # fmt: skip
        return session

    def _client(self, request: session_pb2.OpenSession, context: Context) -> Client | None:
        token = metadata_value(context, "kvstore-token")
        if token is None:
            if context.peer().startswith("unix"):
                raise UnknownSessionError(
                    "no kvstore-token metadata on the Unix socket. Expected the token of a hello: say hello on the "
                    "descriptor socket (the address + .fd) first"
                )
            if request.transport == "fd":
                raise InvalidRequestError(
                    "transport 'fd' over TCP. Expected bytes, or cuda-ipc: use the Unix socket for descriptors"
                )
            return None
        # The supervisor announced the client before the client got its token; the message may still wait here.
        self._core.link.hear()
        return self._core.clients.use(token, request.instance_id)

    async def _converse(self, session: LiveSession, context: Context) -> None:
        """Speaks and listens until either side has said its last."""
        speaking = asyncio.create_task(self._speak(session, context))
        listening = asyncio.create_task(self._listen(session, context))
        try:
            done, _ = await asyncio.wait((speaking, listening), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            speaking.cancel()
            listening.cancel()
            await asyncio.gather(speaking, listening, return_exceptions=True)

    async def _speak(self, session: LiveSession, context: Context) -> None:
        while True:
            unmap, downgrade, goodbye = await session.outbox.take()
            if unmap:
                await context.write(session_pb2.SessionResponse(unmap=session_pb2.Unmap(slab_ids=unmap)))
            if downgrade:
                await context.write(session_pb2.SessionResponse(downgrade=session_pb2.Downgrade(slab_ids=downgrade)))
            if goodbye is not None:
                await context.write(session_pb2.SessionResponse(goodbye=session_pb2.Goodbye(reason=goodbye)))
                return

    async def _listen(self, session: LiveSession, context: Context) -> None:
        store = self._core.store
        while (message := parsed(await context.read())) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "slabs_unmapped":
                    check_count("slabs_unmapped", len(message.slabs_unmapped.slab_ids))
                    store.unmapped(session.session_id, list(message.slabs_unmapped.slab_ids))
                case "slabs_downgraded":
                    check_count("slabs_downgraded", len(message.slabs_downgraded.slab_ids))
                    store.downgraded(session.session_id, list(message.slabs_downgraded.slab_ids))
                case other:
                    raise InvalidRequestError(f"{other} on an open stream. Expected slabs_unmapped or slabs_downgraded")
            await self._core.settled()

    def _stream_ended(self, session: LiveSession) -> None:
        core = self._core
        # Superseded, or ended otherwise; or a stop, during which the calls under way still need their sessions.
        if core.stopping or core.sessions.get(session.session_id) is None:
            return
        if core.store.stream_ended(session.session_id):
            core.settle_soon()
            return
        if session.client is not None and session.client.watched:
            _logger.info("the stream of %s ended; what it holds stays until its process ends", session.name)
        else:
            reason = f"its stream ended more than {self._session_grace_s:g} s ago and nothing watches its process"
            session.grace = asyncio.get_running_loop().call_later(
                self._session_grace_s, self._end_grace, session.session_id, reason
            )

    def _end_grace(self, session_id: bytes, reason: str) -> None:
        self._core.store.end_lease_grace(session_id, reason)
        self._core.settle_soon()


def _check_open(request: session_pb2.OpenSession) -> None:
    if request.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the client speaks protocol version {request.protocol_version}, the service {PROTOCOL_VERSION}. "
            "Expected the same: install the same version of gpu-kvstore on both sides"
        )
    check_length("instance_id", request.instance_id, 16)
    check_text("client_version", request.client_version, MAX_NAME)
    check_text("name", request.name, MAX_NAME)
    check_text("transport_reason", request.transport_reason, MAX_TEXT)
    if request.transport not in _TRANSPORTS:
        raise InvalidRequestError(f"transport {request.transport[:40]!r}. Expected one of {', '.join(_TRANSPORTS)}")


def _check_transport(transport: str, memory: str) -> None:
    """Descriptors and handles lead to memory of one kind each."""
    if transport == "bytes" or (transport == "cuda-ipc") == (memory == CUDA_LEGACY):
        return
    fit = "cuda-ipc" if memory == CUDA_LEGACY else "fd"
    raise ConflictError(
        f"transport {transport!r} to a service whose slabs are {memory}. Expected {fit} or bytes: connect with one of "
        "them, or start the service with another --slab-kind"
    )


def _check_same_process(old: LiveSession | None, client: Client | None) -> None:
    """The process that holds leases must be the one that takes them over."""
    if old is None or old.client is None:
        return
    if client is None or client.process != old.client.process:
        raise AccessDeniedError(
            f"instance {old.instance_id.hex()} belongs to another process. Expected an instance_id drawn by this "
            "connect(): connect again, and not from a forked child with its parent's connection"
        )


def _model_spec(request: session_pb2.RegisterModelRequest) -> ModelSpec:
    layout = request.layout
    check_length("model_fingerprint", request.model_fingerprint, 32)
    check_length("layout.digest", layout.digest, 32)
    for field, text in (("model_name", request.model_name), ("shard.layer_group", request.shard.layer_group)):
        check_text(field, text, MAX_TEXT)
    check_text("layout.dtype", layout.dtype, MAX_NAME)
    check_text("layout.codec", layout.codec, MAX_CODEC)
    check_text("plan_name", request.plan_name, MAX_CODEC)
    for field in ("block_tokens", "layers", "kv_heads", "k_dim", "v_dim"):
        check_range(f"layout.{field}", getattr(layout, field), 1, 65536)
    check_range("layout.block_bytes", layout.block_bytes, 1, 2**40)
    check_range("shard.total_kv_heads", request.shard.total_kv_heads, layout.kv_heads, 65536)
    check_range("shard.first_kv_head", request.shard.first_kv_head, 0, request.shard.total_kv_heads - layout.kv_heads)
    return ModelSpec(
        fingerprint=request.model_fingerprint,
        model_name=request.model_name,
        codec=layout.codec,
        codec_plan=request.codec_plan,
        layer_group=request.shard.layer_group,
        first_kv_head=request.shard.first_kv_head,
        total_kv_heads=request.shard.total_kv_heads,
        kv_heads=layout.kv_heads,
        layers=layout.layers,
        k_dim=layout.k_dim,
        v_dim=layout.v_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        layout_digest=layout.digest,
        plan_name=request.plan_name,
    )
