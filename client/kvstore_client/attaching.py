"""How a link comes about: hello, probe, session stream, welcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import session_pb2 as pb
from kvstore_proto.v1 import session_pb2_grpc

from kvstore_client.address import Address
from kvstore_client.breaker import CircuitBreaker
from kvstore_client.config import ClientConfig
from kvstore_client.descriptors import DescriptorSocket
from kvstore_client.errors import (
    AccessDeniedError,
    BadReplyError,
    ConflictError,
    KVStoreError,
    ProtocolMismatchError,
    SessionLostError,
    TransportUnavailableError,
    from_rpc,
)
from kvstore_client.link import CHANNEL_OPTIONS, TCP_OPTIONS, Link, Metadata, Outbox, SessionStream
from kvstore_client.mapping import SlabMap
from kvstore_client.transports.base import Transport, TransportSet
from kvstore_client.transports.fd import probe_descriptors

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


def attach(
    who: Introduction,
    previous: Link | None,
    transports: TransportSet,
    tell_unmapped: Callable[[int, int], None],
    on_silent: Callable[[str], None],
) -> Link:
    """Attaches once. Raises a KVStoreError within a few times `connect_timeout_s`; nothing is left open then.

    If it is still the server process of `previous`, the session takes over what that one held: mappings, leases, slots.
    """
    descriptors: DescriptorSocket | None = None
    channel: grpc.Channel | None = None
    outbox = Outbox()
    try:
        metadata: Metadata = ()
        watched = False
        timeout_s = who.config.connect_timeout_s
        if who.address.descriptor_path is not None:
            descriptors = DescriptorSocket.connect(who.address.descriptor_path, timeout_s)
            greeting = descriptors.hello(who.instance_id, timeout_s)
            metadata = (("kvstore-token", greeting.token),)
            watched = greeting.process_watched
        elif who.config.token:
            metadata = (("authorization", f"Bearer {who.config.token}"),)
        transport, reason = choose_transport(who, descriptors, transports)
        channel = open_channel(who.address)
        opening = pb.OpenSession(
            instance_id=who.instance_id,
            client_version=who.client_version,
            protocol_version=PROTOCOL_VERSION,
            name=who.name,
            transport=transport.name,
            transport_reason=reason,
        )
        outbox.send(pb.SessionRequest(open=opening))
        stream, welcome = _open_stream(channel, outbox, metadata, timeout_s)
        same = previous is not None and previous.boot_id == welcome.boot_id
        epoch = 1 if previous is None else previous.epoch + (not same)
        slabs = previous.slabs if previous is not None and same else None
        if descriptors is not None and transport.in_place:
            if slabs is None:
                slabs = SlabMap(descriptors, who.config.reserve_timeout_s, lambda slab: tell_unmapped(epoch, slab))
            else:
                slabs.rebind(descriptors)
        return Link(
            epoch=epoch,
            channel=channel,
            stream=stream,
            outbox=outbox,
            breaker=CircuitBreaker(who.config.breaker_failures, who.config.breaker_cooldown_s),
            session_id=welcome.session_id,
            boot_id=welcome.boot_id,
            tenant=welcome.tenant,
            server_version=welcome.server_version,
            process_watched=watched,
            transport=transport,
            transport_reason=reason,
            descriptors=descriptors,
            slabs=slabs,
            on_silent=on_silent,
            verified=previous.verified if previous is not None and same else {},
        )
    except KVStoreError:
        outbox.close()
        if channel is not None:
            channel.close()
        if descriptors is not None:
            descriptors.close()
        raise


def open_channel(address: Address) -> grpc.Channel:
    """A channel that never uses a proxy and reconnects within 0.2 s."""
    options = CHANNEL_OPTIONS if address.path is not None else CHANNEL_OPTIONS + TCP_OPTIONS
    return grpc.insecure_channel(address.grpc_target, options=options)


def choose_transport(
    who: Introduction, descriptors: DescriptorSocket | None, transports: TransportSet
) -> tuple[Transport, str]:
    """The best transport that works, and why not a better one. TransportUnavailableError if another is required."""
    wanted = who.require_transport
    if wanted == "bytes":
        return transports.bytes, "required by the caller"
    if descriptors is None:
        problem = f"{who.address} is not a Unix socket, so descriptors can't be passed"
    else:
        problem = probe_descriptors(descriptors, who.config.connect_timeout_s)
    if not problem:
        return transports.fd, ""
    if wanted == "fd":
        raise TransportUnavailableError(
            f"transport fd is required but doesn't work: {problem}; use the service's Unix socket on the same host, or "
            "leave require_transport out"
        )
    return transports.bytes, problem


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
