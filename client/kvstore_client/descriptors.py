"""The client's end of the descriptor socket: says who we are, and receives descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import descriptor_pb2 as pb

from kvstore_client.errors import (
    AccessDeniedError,
    BadReplyError,
    ProtocolMismatchError,
    ServiceError,
    ServiceUnavailableError,
    from_code,
)

if TYPE_CHECKING:
    from types import TracebackType

_PACKET_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 8
_FAILED_PRECONDITION = 9


class Received:
    """A descriptor that came with a packet. Closed at the end of the with block."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def size(self) -> int:
        """Bytes of the file behind it."""
        return os.fstat(self.fd).st_size

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        os.close(self.fd)


class DescriptorSocket:
    """One connection; one exchange at a time. Every exchange has a deadline.

    Invariant: answers come in order, so `_owed` answers to exchanges that timed out are thrown away first.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._path = path
        self._lock = threading.Lock()
        self._owed = 0

    @classmethod
    def connect(cls, path: str, timeout_s: float) -> DescriptorSocket:
        """Raises ServiceUnavailableError when nobody listens, AccessDeniedError when file permissions forbid it."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise ServiceUnavailableError(f"no socket to connect to {path}: {error}") from None
        sock.settimeout(timeout_s)
        try:
            sock.connect(path)
        except PermissionError:
            sock.close()
            raise AccessDeniedError(
                f"no permission to connect to {path}; join the group of the socket's folder, or run as its owner"
            ) from None
        except OSError as error:
            sock.close()
            raise ServiceUnavailableError(
                f"nobody answers at {path}: {error}; start the service with `kvstore serve --address "
                f"{path.removesuffix('.fd')}`"
            ) from None
        return cls(sock, path)

    def hello(self, instance_id: bytes, timeout_s: float) -> pb.HelloReply:
        """Introduces this process by its own pidfd."""
        try:
            own: int | None = os.pidfd_open(os.getpid())
        except (AttributeError, OSError):
            own = None
        request = pb.DescriptorRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, instance_id=instance_id))
        try:
            reply, fds = self._exchange(request, timeout_s, [] if own is None else [own])
        finally:
            if own is not None:
                os.close(own)
        _close(fds)
        self._expect(reply, "hello")
        return reply.hello

    def probe(self, timeout_s: float) -> tuple[pb.ProbeReply, Received]:
        """Memory with a nonce at its beginning."""
        reply, fds = self._exchange(pb.DescriptorRequest(probe=pb.Probe()), timeout_s)
        return self._one(reply, fds, "probe").probe, Received(fds[0])

    def open_slab(self, slab_id: int, *, writable: bool, timeout_s: float) -> tuple[pb.Segment, Received]:
        """A slab's descriptor and what the service says about it, unchecked."""
        asked = pb.OpenSegment(kind=pb.SEGMENT_KIND_SLAB, id=slab_id, writable=writable)
        reply, fds = self._exchange(pb.DescriptorRequest(open_segment=asked), timeout_s)
        return self._one(reply, fds, "segment").segment, Received(fds[0])

    def close(self) -> None:
        """Ends the connection; an exchange under way fails."""
        # Fails when it isn't connected any more, which is what is wanted.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _one(self, reply: pb.DescriptorResponse, fds: list[int], kind: str) -> pb.DescriptorResponse:
        try:
            self._expect(reply, kind)
            if len(fds) != 1:
                raise BadReplyError(f"{self._path}: {kind} came with {len(fds)} descriptors; expected 1")
        except ServiceError:
            _close(fds)
            raise
        return reply

    def _expect(self, reply: pb.DescriptorResponse, kind: str) -> None:
        got = reply.WhichOneof("response")
        if got == "error":
            message = f"{self._path}: {reply.error.message}"
            if kind == "hello" and reply.error.code == _FAILED_PRECONDITION:
                raise ProtocolMismatchError(message)
            raise from_code(reply.error.code, message)
        if got != kind:
            raise BadReplyError(f"{self._path}: answered {got} to {kind}; is another program listening there?")

    def _exchange(
        self, request: pb.DescriptorRequest, timeout_s: float, fds: list[int] | None = None
    ) -> tuple[pb.DescriptorResponse, list[int]]:
        deadline = time.monotonic() + timeout_s
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        with self._lock:
            try:
                self._sock.settimeout(timeout_s)
                self._sock.sendmsg([request.SerializeToString()], ancillary)
                self._owed += 1
                while self._owed > 1:
                    _close(self._receive(deadline)[1])
                data, received = self._receive(deadline)
            except OSError as error:
                reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
                raise ServiceUnavailableError(f"{self._path}: {reason}") from None
        try:
            return pb.DescriptorResponse.FromString(data), received
        except DecodeError:
            _close(received)
            raise BadReplyError(f"{self._path}: no descriptor response; is another program there?") from None

    def _receive(self, deadline: float) -> tuple[bytes, list[int]]:
        self._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        data, ancillary, flags, _ = self._sock.recvmsg(_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close(fds)
            raise ConnectionResetError("the connection was closed" if not data else "an answer was cut off")
        self._owed -= 1
        return data, fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
