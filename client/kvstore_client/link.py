"""One attachment to one server process: from its welcome until it is lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from kvstore_proto.v1 import blocks_pb2_grpc, session_pb2_grpc
from kvstore_proto.v1 import session_pb2 as pb

from kvstore_client.breaker import CircuitBreaker
from kvstore_client.device_work import is_cuda
from kvstore_client.errors import ServiceUnavailableError, SessionLostError, from_rpc

if TYPE_CHECKING:
    from kvstore_client.descriptors import DescriptorSocket
    from kvstore_client.mapping import SlabMap
    from kvstore_client.namespace import Namespace
    from kvstore_client.offers import ServiceMemory
    from kvstore_client.transports.base import Transport

Metadata = tuple[tuple[str, str], ...]

# gRPC would send even local calls to a proxy named in the environment. Sub-channels of its own: a stopped service must
# not hold back another store of this process.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", 4 * 2**20),
]
# Only over TCP: on a Unix socket the kernel tells when the other end dies, and a ping that a stopped process does not
# answer would end a session that goes on as soon as it is continued.
TCP_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Outbox:
    """Messages for the session stream: an iterator that gRPC drains in a thread of its own, until close()."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()

    def send(self, message: pb.SessionRequest) -> None:
        """Queues a message. Never waits."""
        self._messages.put(message)

    def close(self) -> None:
        """Ends our half of the stream: the service takes it as a goodbye."""
        self._messages.put(None)

    def __iter__(self) -> Iterator[pb.SessionRequest]:
        while (message := self._messages.get()) is not None:
            yield message


class SessionStream(Protocol):
    """The responding half of the session stream."""

    def __iter__(self) -> Iterator[pb.SessionResponse]: ...
    def __next__(self) -> pb.SessionResponse: ...
    def cancel(self) -> object: ...


@dataclass(eq=False)
class Link:
    """Everything that is valid during one attachment.

    Invariants: `lost` is set once and never cleared; after that no call is made. What was mapped through `slabs` stays
    readable while somebody refers to it. `verified` holds (slab, slot) → generation whose bytes this process checked.
    """

    epoch: int
    channel: grpc.Channel
    stream: SessionStream
    outbox: Outbox
    breaker: CircuitBreaker
    session_id: bytes
    boot_id: bytes
    tenant: str
    server_version: str
    process_watched: bool
    memory: ServiceMemory
    transport: Transport
    transport_reason: str
    bytes_transport: Transport
    descriptors: DescriptorSocket | None
    slabs: SlabMap | None
    on_silent: Callable[[str], None]
    """Called when the breaker opens."""
    lost: threading.Event = field(default_factory=threading.Event)
    lost_reason: str = ""
    verified: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata: Metadata = (("kvstore-session", self.session_id.hex()),)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.blocks = blocks_pb2_grpc.BlockServiceStub(self.channel)

    def transport_for(self, namespace: Namespace) -> Transport:
        """How a namespace's blocks are read and sent. Slabs of a device that another one computes for can't be read in
        place: their payloads come as bytes.
        """
        elsewhere = is_cuda(self.memory.device) and namespace.compute_device != self.memory.device
        return self.bytes_transport if elsewhere and self.transport.in_place else self.transport

    def writes_in_place(self, namespace: Namespace) -> bool:
        """Whether a namespace's blocks are written where they will lie. If not, they are sent when they are full."""
        return self.transport.in_place and namespace.compute_device == self.memory.device

    def call(
        self, what: str, method: Callable[..., Any], request: Any, timeout_s: float, *, probe: bool = False
    ) -> Any:
        """Calls the service. Raises a ServiceError or UsageError; a changed boot id loses the link.

        `request` is a message, or a callable that makes a fresh iterator of messages. With `probe` the call may be the
        one that finds out whether a silent service answers again: only for threads that nobody waits for.
        """
        return self.guarded(what, lambda: self._call(method, request, timeout_s), probe=probe)

    def guarded(self, what: str, exchange: Callable[[], Any], *, probe: bool = False) -> Any:
        """Runs one exchange with the service under breaker and error table."""
        if self.lost.is_set():
            raise ServiceUnavailableError(f"{what}: the service is gone ({self.lost_reason})")
        if self.breaker.open and not (probe and self.breaker.allow()):
            raise ServiceUnavailableError(f"{what}: not asked; the service did not answer the last calls")
        try:
            reply = exchange()
        except grpc.RpcError as error:
            typed = from_rpc(error, what)
            if isinstance(typed, ServiceUnavailableError):
                # Whoever waited has paid a deadline; the next call must not pay another to learn the same.
                late = not probe and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if self.breaker.failure(decisive=late) and not self.lost.is_set():
                    self.on_silent(str(typed))
            else:
                self.breaker.success()
            if isinstance(typed, SessionLostError):
                self.lose(str(typed))
            raise typed from error
        except ValueError:
            # What gRPC raises for a channel that another thread has just closed.
            if not self.lost.is_set():
                raise
            raise ServiceUnavailableError(f"{what}: the service is gone ({self.lost_reason})") from None
        self.breaker.success()
        boot_id: bytes = getattr(reply, "boot_id", b"")
        if boot_id and boot_id != self.boot_id:
            self.lose("another server process answers")
            raise ServiceUnavailableError(f"{what}: another server process answers")
        return reply

    def lose(self, reason: str) -> None:
        """Ends the attachment. Idempotent; from any thread."""
        if self.lost.is_set():
            return
        self.lost_reason = reason
        self.lost.set()
        # Before our half of the stream ends: that in order would be a goodbye, which gives up what is still read.
        self.stream.cancel()
        self.outbox.close()
        if self.descriptors is not None:
            self.descriptors.close()
        self.channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        message = request() if callable(request) else request
        return method(message, timeout=timeout_s, metadata=self.metadata)
