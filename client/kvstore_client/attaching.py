"""How a link comes about: hello, probe, session stream, welcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import blocks_pb2, blocks_pb2_grpc, session_pb2_grpc
from kvstore_proto.v1 import session_pb2 as pb

from kvstore_client.address import Address
from kvstore_client.breaker import CircuitBreaker
from kvstore_client.choosing import Choice, final_choice, first_choice
from kvstore_client.config import ClientConfig
from kvstore_client.descriptors import DescriptorSocket
from kvstore_client.errors import (
    AccessDeniedError,
    BadReplyError,
    ConflictError,
    KVStoreError,
    ProtocolMismatchError,
    SessionLostError,
    UsageError,
    from_rpc,
)
from kvstore_client.link import CHANNEL_OPTIONS, TCP_OPTIONS, Link, Metadata, Outbox, SessionStream
from kvstore_client.mapping import Later, SlabMap
from kvstore_client.offers import KINDS, LEGACY, MEMFD, DescriptorSource, HandleSource, ServiceMemory
from kvstore_client.probing import device_memory
from kvstore_client.transports.base import TransportSet

_SESSION_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who we are and what we insist on; the same for every attachment of a store."""

    address: Address
    instance_id: bytes
    name: str
    client_version: str
    require_transport: str | None
    config: ClientConfig


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom an attachment tells. All but `silent` are called from finalizers too, and take no lock."""

    unmapped: Callable[[int, int], None]
    """(epoch, slab id)"""
    silent: Callable[[str], None]
    later: Later
    """Runs an action soon in a thread that may wait for a device."""


def attach(who: Introduction, previous: Link | None, transports: TransportSet, callbacks: Callbacks) -> Link:
    """Attaches once. Raises a KVStoreError within a few times `connect_timeout_s`; nothing is left open then.

    If it is still the server process of `previous`, the session takes over what that one held: mappings, leases, slots.
    The session names its transport before the welcome tells what the slabs are: where the first guess was wrong, a
    second session of this instance takes the first one's place.
    """
    attempt = _first_attempt(who, previous)
    try:
        choice = attempt.final_choice()
        if choice != attempt.choice:
            attempt.close()
            attempt = _Attempt.make(who, choice)
        return attempt.link(previous, transports, callbacks)
    except KVStoreError:
        attempt.close()
        raise


def _first_attempt(who: Introduction, previous: Link | None) -> _Attempt:
    """Only a session can tell whether legacy handles work, so what worked before is tried first."""
    if previous is None or previous.memory.kind != LEGACY or not previous.transport.in_place:
        return _Attempt.make(who, None)
    try:
        attempt = _Attempt.make(who, Choice(previous.transport.name, ""))
    except (UsageError, ConflictError):
        # Refused, because the service has another kind of slabs now.
        return _Attempt.make(who, None)
    if attempt.memory.kind == LEGACY:
        return attempt
    attempt.close()
    return _Attempt.make(who, None)


class _Attempt:
    """One hello and one session stream with its welcome.

    Invariant: what it opened is closed by close(), or belongs to the link that it became.
    """

    def __init__(self, who: Introduction) -> None:
        self._who = who
        self._timeout_s = who.config.connect_timeout_s
        self._descriptors: DescriptorSocket | None = None
        self._channel: grpc.Channel | None = None
        self._outbox = Outbox()
        self._watched = False
        self._stream: SessionStream | None = None
        self._welcome = pb.Welcome()
        self.memory = ServiceMemory()
        self.choice = Choice("bytes", "")

    @classmethod
    def make(cls, who: Introduction, choice: Choice | None) -> _Attempt:
        """Opens a session with the transport chosen, or with the one that seems right. Raises a KVStoreError."""
        attempt = cls(who)
        try:
            attempt._open(choice)
        except KVStoreError:
            attempt.close()
            raise
        return attempt

    def final_choice(self) -> Choice:
        """The transport to use, now that the kind of the slabs is known. Raises TransportUnavailableError."""
        return final_choice(self._who.require_transport, self.choice, self.memory, self._probe_handle)

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._stream is not None:
            # Before our half of the stream ends: that in order would be a goodbye, which gives up what is still read.
            self._stream.cancel()
        self._outbox.close()
        if self._channel is not None:
            self._channel.close()
        if self._descriptors is not None:
            self._descriptors.close()

    def link(self, previous: Link | None, transports: TransportSet, callbacks: Callbacks) -> Link:
        """What it became."""
        who, welcome, memory = self._who, self._welcome, self.memory
        assert self._channel is not None
        assert self._stream is not None
        same = previous is not None and previous.boot_id == welcome.boot_id
        epoch = 1 if previous is None else previous.epoch + (not same)
        transport = {"fd": transports.fd, "cuda-ipc": transports.cuda_ipc}.get(self.choice.name, transports.bytes)
        slabs = previous.slabs if previous is not None and same else None
        source: DescriptorSource | HandleSource | None = None
        if transport is transports.cuda_ipc:
            source = HandleSource(who.config.reserve_timeout_s)
        elif transport is transports.fd and self._descriptors is not None:
            source = DescriptorSource(self._descriptors, who.config.reserve_timeout_s)
        if source is not None:
            if slabs is None:
                slabs = SlabMap(source, lambda slab: callbacks.unmapped(epoch, slab), callbacks.later, memory)
            else:
                slabs.rebind(source)
        link = Link(
            epoch=epoch,
            channel=self._channel,
            stream=self._stream,
            outbox=self._outbox,
            breaker=CircuitBreaker(who.config.breaker_failures, who.config.breaker_cooldown_s),
            session_id=welcome.session_id,
            boot_id=welcome.boot_id,
            tenant=welcome.tenant,
            server_version=welcome.server_version,
            process_watched=self._watched,
            memory=memory,
            transport=transport,
            transport_reason=self.choice.reason,
            bytes_transport=transports.bytes,
            descriptors=self._descriptors,
            slabs=slabs,
            on_silent=callbacks.silent,
            verified=previous.verified if previous is not None and same else {},
        )
        if isinstance(source, HandleSource):
            source.bind(link)
        return link

    def _open(self, choice: Choice | None) -> None:
        who = self._who
        metadata: Metadata = ()
        if who.address.descriptor_path is not None:
            self._descriptors = DescriptorSocket.connect(who.address.descriptor_path, self._timeout_s)
            greeting = self._descriptors.hello(who.instance_id, self._timeout_s)
            metadata = (("kvstore-token", greeting.token),)
            self._watched = greeting.process_watched
        elif who.config.token:
            metadata = (("authorization", f"Bearer {who.config.token}"),)
        if choice is None:
            choice = first_choice(who.require_transport, who.address, self._descriptors, self._timeout_s)
        self.choice = choice
        self._channel = open_channel(who.address)
        opening = pb.OpenSession(
            instance_id=who.instance_id,
            client_version=who.client_version,
            protocol_version=PROTOCOL_VERSION,
            name=who.name,
            transport=choice.name,
            transport_reason=choice.reason[:_MOST_REASON],
        )
        self._outbox.send(pb.SessionRequest(open=opening))
        self._stream, self._welcome = _open_stream(self._channel, self._outbox, metadata, self._timeout_s)
        welcome = self._welcome
        kind = welcome.memory or MEMFD
        if kind not in KINDS:
            raise BadReplyError(
                f"the service's slabs are of kind {kind!r}; this client knows {', '.join(KINDS)}: install the same "
                "version of gpu-kvstore on both sides"
            )
        self.memory = device_memory(kind, welcome.device_uuid, welcome.device or "cpu", welcome.boot_id)

    def _probe_handle(self) -> blocks_pb2.ProbeHandleResponse:
        assert self._channel is not None
        metadata = (("kvstore-session", self._welcome.session_id.hex()),)
        stub = blocks_pb2_grpc.BlockServiceStub(self._channel)
        try:
            return stub.ProbeHandle(blocks_pb2.ProbeHandleRequest(), timeout=self._timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, "ProbeHandle") from error


# What the service takes; it is for people.
_MOST_REASON = 900


def open_channel(address: Address) -> grpc.Channel:
    """A channel that never uses a proxy and reconnects within 0.2 s."""
    options = CHANNEL_OPTIONS if address.path is not None else CHANNEL_OPTIONS + TCP_OPTIONS
    return grpc.insecure_channel(address.grpc_target, options=options)


def _open_stream(
    channel: grpc.Channel, outbox: Outbox, metadata: Metadata, timeout_s: float
) -> tuple[SessionStream, pb.Welcome]:
    # The stream lives as long as the worker, so it can't have a deadline; its first message has one.
    stream = session_pb2_grpc.SessionServiceStub(channel).Session(iter(outbox), metadata=metadata)
    timer = threading.Timer(timeout_s, stream.cancel)
    timer.daemon = True
    timer.start()
    try:
        first = next(stream)
    except StopIteration:
        raise BadReplyError("the service ended the session before it began") from None
    except grpc.RpcError as error:
        raise _opening_error(from_rpc(error, "opening a session")) from error
    finally:
        timer.cancel()
    if first.WhichOneof("message") != "welcome" or len(first.welcome.session_id) != _SESSION_ID_BYTES:
        stream.cancel()
        raise BadReplyError("the service did not begin the session with a welcome; is another program listening there?")
    if first.welcome.protocol_version != PROTOCOL_VERSION:
        stream.cancel()
        raise ProtocolMismatchError(
            f"the service speaks protocol {first.welcome.protocol_version}, this client {PROTOCOL_VERSION}; install "
            "the same version of gpu-kvstore on both sides"
        )
    return stream, first.welcome


def _opening_error(error: KVStoreError) -> KVStoreError:
    if isinstance(error, ConflictError):
        return ProtocolMismatchError(str(error))
    if isinstance(error, SessionLostError):
        return AccessDeniedError(f"{error}; use the service's Unix socket, or set ClientConfig.token")
    return error
