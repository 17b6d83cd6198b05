"""The control channel between the supervisor and the server it started: messages of one packet each, with descriptors.

Both ends are processes of one installation, so the format is private: JSON in a SOCK_SEQPACKET packet. What clients
send never gets here unchecked.
"""

import array
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MAX_PACKET = 64 * 1024
MAX_BACKLOG = 4096
MAX_FDS = 4
_BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Configure:
    """Supervisor → server, first message: the configuration as JSON."""

    config: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Supervisor → server: the segment of this ticket is held, or why not."""

    ticket: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """Supervisor → server: a client introduced itself. Carries a pidfd when its process can be watched."""

    token: str
    instance_id: str
    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Supervisor → server: the client's descriptor connection is closed. It may live on."""

    token: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Server → supervisor: all sockets are served; `listen` is the TCP address with its real port, or empty.

    `metrics` is the URL of the metrics, or empty.
    """

    listen: str
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Server → supervisor: the server can't start, for a reason the operator can mend."""

    message: str


@dataclass(frozen=True, slots=True)
class KeepSegment:
    """Server → supervisor: hold this segment (carries its descriptor) and answer `Kept`.

    `memory` is a SlabMemory kind; `device_uuid` and `allocation_id` are hexadecimal, as is `nonce`, the first bytes of
    a probe.
    """

    ticket: int
    kind: int
    id: int
    namespace_id: int
    nbytes: int
    slot_bytes: int
    slots: int
    memory: str = "memfd"
    device_uuid: str = ""
    allocation_id: str = ""
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Server → supervisor: let a segment go."""

    kind: int
    id: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Server → supervisor: this client may open segments of the namespace."""

    token: str
    namespace_id: int


@dataclass(frozen=True, slots=True)
class SetWriter:
    """Server → supervisor: the one client that may map the slab for writing; empty = nobody."""

    slab_id: int
    token: str


@dataclass(frozen=True, slots=True)
class EndClient:
    """Server → supervisor: the client's session is over; its grants end and its pidfd is closed."""

    token: str


Message = (
    Configure
    | Kept
    | ClientHello
    | ClientLeft
    | Ready
    | StartFailed
    | KeepSegment
    | DropSegment
    | Grant
    | SetWriter
    | EndClient
)
_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Configure, Kept, ClientHello, ClientLeft, Ready, StartFailed, KeepSegment, DropSegment, Grant, SetWriter,
        EndClient,
    )
}  # fmt: skip


def receive_packet(sock: socket.socket, limit: int, max_fds: int) -> tuple[bytes, list[int], bool]:
    """Receives one packet: its bytes, its descriptors (close-on-exec, the caller's to close), and whether all fitted.

    No bytes = the other end is closed (or sent an empty packet). A packet with more bytes or descriptors than the
    limits reads as not fitting; what the kernel did pass is returned for closing.
    """
    ancillary_bytes = socket.CMSG_SPACE(max_fds * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(limit, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


class ControlChannel:
    """One end of the control channel, non-blocking.

    Invariants: messages arrive in the order of `send`; a message that did not fit into the socket waits in a backlog
    of at most MAX_BACKLOG with duplicates of its descriptors, so a caller may close its own at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self._sock = sock
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    @classmethod
    def pair(cls) -> tuple["ControlChannel", socket.socket]:
        """The supervisor's end, and the socket that the server inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def backlog(self) -> int:
        """Messages that wait for the socket to take them."""
        return len(self._backlog)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends, or queues, a message. BufferError when the backlog is full, OSError when the other end is gone."""
        payload = json.dumps({"type": type(message).__name__, **asdict(message)}).encode()
        if len(payload) > MAX_PACKET:
            raise ValueError(f"control message of {len(payload)} bytes: at most {MAX_PACKET} fit")
        if self._backlog or not self._try_send(payload, fds):
            if len(self._backlog) >= MAX_BACKLOG:
                raise BufferError(f"{MAX_BACKLOG} control messages wait already: the other process does not read")
            self._backlog.append((payload, [os.dup(fd) for fd in fds]))

    def flush(self) -> bool:
        """Sends what waits, as far as the socket takes it. Returns whether nothing waits any more."""
        while self._backlog:
            payload, fds = self._backlog[0]
            if not self._try_send(payload, fds):
                return False
            self._backlog.popleft()
            close_all(fds)
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which become the caller's; None when none is there.

        EOFError when the other end is closed.
        """
        try:
            data, fds, complete = receive_packet(self._sock, MAX_PACKET, MAX_FDS)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError("the control channel is closed") from None
        if not data:
            raise EOFError("the control channel is closed")
        if not complete:
            close_all(fds)
            raise ValueError("a control message was cut off: supervisor and server are of different versions")
        fields = json.loads(data)
        return _TYPES[fields.pop("type")](**fields), fds

    def close(self) -> None:
        for _, fds in self._backlog:
            close_all(fds)
        self._backlog.clear()
        self._sock.close()

    def _try_send(self, payload: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._sock, [payload], list(fds))
        except BlockingIOError:
            return False
        return True


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
