"""What the supervisor answers to a client's packets on the descriptor socket."""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import descriptor_pb2

from kvstore.control import ClientHello, ClientLeft, Message, close_all
from kvstore.supervisor.peer import PeerError, peer_credentials, verified_pidfd
from kvstore.supervisor.segments import AccessError, Segment, SegmentTable

_INVALID_ARGUMENT = 3
_NOT_FOUND = 5
_PERMISSION_DENIED = 7
_RESOURCE_EXHAUSTED = 8
_FAILED_PRECONDITION = 9
_UNAVAILABLE = 14
INSTANCE_ID_BYTES = 16
_MEMORY_KINDS = {
    "memfd": descriptor_pb2.MEMORY_KIND_MEMFD,
    "cuda-vmm": descriptor_pb2.MEMORY_KIND_CUDA_VMM,
}


@dataclass(slots=True)
class Reply:
    """One packet to a client. `owned` descriptors are closed once it is sent; the others belong to the table."""

    payload: bytes
    fds: list[int]
    owned: bool = False

    @classmethod
    def error(cls, code: int, text: str) -> "Reply":
        error = descriptor_pb2.DescriptorError(code=code, message=text)
        return cls(descriptor_pb2.DescriptorResponse(error=error).SerializeToString(), [])

    def close(self) -> None:
        if self.owned:
            close_all(self.fds)
            self.fds = []


class Connection:
    """One client connection: who it is by the kernel, and its token once it said hello."""

    def __init__(self, sock: socket.socket, new_token: Callable[[], str]) -> None:
        self.token = ""
        self.sock = sock
        self.credentials = peer_credentials(sock)
        self.new_token = new_token


class Handler:
    """Parses requests and answers them.

    Invariants: the server is told of a client before the client learns its token; the server's word is read to the
    end before a segment is refused, because its grant may be under way.
    """

    def __init__(
        self,
        table: SegmentTable,
        *,
        tell_server: Callable[[Message, list[int]], None],
        hear_server: Callable[[], None],
        max_clients: int,
        probe_page: Callable[[bytes], int],
        host_memory: bool = True,
        descriptors: bool = True,
    ) -> None:
        """`host_memory`: slabs are memfds, so a page will do as a probe; `descriptors`: slabs have descriptors."""
        self._table = table
        self._tell_server = tell_server
        self._hear_server = hear_server
        self._max_clients = max_clients
        self._host_memory = host_memory
        self._descriptors = descriptors
        self._nonce = secrets.token_bytes(32)
        self._probe_fd = probe_page(self._nonce)

    def answer(self, connection: Connection, data: bytes, fds: list[int]) -> Reply:
        """Answers one packet; takes over `fds`."""
        try:
            request = descriptor_pb2.DescriptorRequest.FromString(data)
        except DecodeError:
            close_all(fds)
            return Reply.error(_INVALID_ARGUMENT, "the packet is no DescriptorRequest. Expected one message a packet")
        kind = request.WhichOneof("request")
        if kind == "hello":
            return self._hello(connection, request.hello, fds)
        close_all(fds)
        if kind is None:
            return Reply.error(_INVALID_ARGUMENT, "an empty request. Expected hello, open_segment or probe")
        if not connection.token:
            return Reply.error(_FAILED_PRECONDITION, f"{kind} before hello. Expected hello as the first packet")
        if kind == "probe":
            return self._probe()
        return self._open_segment(connection.token, request.open_segment)

    def left(self, connection: Connection) -> None:
        """The connection is closed."""
        if connection.token:
            try:
                self._tell_server(ClientLeft(connection.token), [])
            except (BufferError, OSError):
                # The server is stuck or gone; either way it won't use the token.
                return

    def close(self) -> None:
        os.close(self._probe_fd)

    def _hello(self, connection: Connection, hello: descriptor_pb2.Hello, fds: list[int]) -> Reply:
        problem = self._refusal(connection, hello, fds)
        if problem is not None:
            close_all(fds)
            return Reply.error(*problem)
        try:
            pidfd = verified_pidfd(connection.sock, fds[0] if fds else None, connection.credentials)
        except PeerError as error:
            return Reply.error(_PERMISSION_DENIED, str(error))
        who = connection.credentials
        token = connection.new_token()
        message = ClientHello(token, hello.instance_id.hex(), who.uid, who.gid, who.pid)
        try:
            self._tell_server(message, [] if pidfd is None else [pidfd])
        except (BufferError, OSError):
            if pidfd is not None:
                os.close(pidfd)
            return Reply.error(
                _UNAVAILABLE, "the server does not take new clients now. Expected it to: try again later"
            )
        connection.token = token
        self._table.add_client(token, pidfd)
        reply = descriptor_pb2.HelloReply(token=token, process_watched=pidfd is not None)
        return Reply(descriptor_pb2.DescriptorResponse(hello=reply).SerializeToString(), [])

    def _refusal(self, connection: Connection, hello: descriptor_pb2.Hello, fds: list[int]) -> tuple[int, str] | None:
        if connection.token:
            return _FAILED_PRECONDITION, "a second hello. Expected one a connection: open another one"
        if hello.protocol_version != PROTOCOL_VERSION:
            return _FAILED_PRECONDITION, (
                f"the client speaks protocol version {hello.protocol_version}, the service {PROTOCOL_VERSION}. "
                "Expected the same: install the same version of gpu-kvstore on both sides"
            )
        if len(hello.instance_id) != INSTANCE_ID_BYTES:
            return _INVALID_ARGUMENT, (
                f"instance_id of {len(hello.instance_id)} bytes. Expected {INSTANCE_ID_BYTES} random bytes"
            )
        if len(fds) > 1:
            return _INVALID_ARGUMENT, f"{len(fds)} descriptors with hello. Expected the client's own pidfd or none"
        if self._table.clients >= self._max_clients:
            self._hear_server()
        if self._table.clients >= self._max_clients:
            return _RESOURCE_EXHAUSTED, (
                f"{self._max_clients} clients are connected. Expected fewer: close some, or raise --max-sessions"
            )
        return None

    def _probe(self) -> Reply:
        if self._host_memory:
            reply = descriptor_pb2.ProbeReply(nonce=self._nonce)
            return Reply(descriptor_pb2.DescriptorResponse(probe=reply).SerializeToString(), [self._probe_fd])
        if not self._descriptors:
            return Reply.error(
                _FAILED_PRECONDITION,
                "the service's slabs have no descriptors (--slab-kind legacy). Expected a client that opens CUDA IPC "
                "handles: use ProbeHandle and the cuda-ipc transport",
            )
        if self._table.probe is None:
            self._hear_server()
        probe = self._table.probe
        if probe is None:
            return Reply.error(_UNAVAILABLE, "the server has not started yet. Expected it to have: try again later")
        reply = descriptor_pb2.ProbeReply(nonce=probe.nonce, segment=_described(probe))
        return Reply(
            descriptor_pb2.DescriptorResponse(probe=reply).SerializeToString(), [os.dup(probe.readonly_fd)], owned=True
        )

    def _open_segment(self, token: str, request: descriptor_pb2.OpenSegment) -> Reply:
        try:
            try:
                segment, fd = self._table.open(token, request.kind, request.id, writable=request.writable)
            except AccessError:
                self._hear_server()
                segment, fd = self._table.open(token, request.kind, request.id, writable=request.writable)
        except AccessError as error:
            return Reply.error(_NOT_FOUND if error.missing else _PERMISSION_DENIED, str(error))
        reply = _described(segment)
        # Duplicated: the server may drop the segment while the reply waits for its reader.
        return Reply(descriptor_pb2.DescriptorResponse(segment=reply).SerializeToString(), [os.dup(fd)], owned=True)


def _described(segment: Segment) -> descriptor_pb2.Segment:
    return descriptor_pb2.Segment(
        bytes=segment.nbytes,
        slot_bytes=segment.slot_bytes,
        slots=segment.slots,
        memory=_MEMORY_KINDS[segment.memory],
        device_uuid=segment.device_uuid,
        allocation_id=segment.allocation_id,
    )
