"""The shared memory that the service holds, and who may open it."""

import os
from dataclasses import dataclass, field

from kvstore.control import DropSegment, EndClient, Grant, KeepSegment, SetWriter

SLAB = 1
LEDGER = 2
# What a client tries to map before it trusts descriptors; not a segment that it can ask for.
PROBE = 3
MEMFD = "memfd"


@dataclass(slots=True)
class Segment:
    """One slab, ledger or probe: its dimensions, the owner's descriptor, and one for readers.

    That is read-only for a memfd; device memory has no such thing, and `readonly_fd` is `fd`.
    """

    kind: int
    id: int
    namespace_id: int
    nbytes: int
    slot_bytes: int
    slots: int
    fd: int
    readonly_fd: int
    memory: str = MEMFD
    device_uuid: bytes = b""
    allocation_id: bytes = b""
    nonce: bytes = b""
    writer: str = ""

    def close(self) -> None:
        os.close(self.fd)
        if self.readonly_fd != self.fd:
            os.close(self.readonly_fd)


@dataclass(slots=True)
class Client:
    """A client that said hello: the namespaces it was granted, and its pidfd, held for a server that restarts."""

    token: str
    pidfd: int | None
    namespaces: set[int] = field(default_factory=set)


class AccessError(Exception):
    """A client may not have the segment. `missing` tells "no such segment for you" from "not for writing"."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing


class SegmentTable:
    """All segments and grants; applies what the server says.

    Invariants: a segment is here from before the server names it to a client until the server drops it; at most one
    client may open a slab for writing; a grant ends with its client. Owns every descriptor in it.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], Segment] = {}
        self._clients: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def clients(self) -> int:
        return len(self._clients)

    def keep(self, message: KeepSegment, fd: int) -> str:
        """Takes over a segment and its descriptor. Returns why it can't, empty when it can."""
        readonly = fd
        if message.memory == MEMFD:
            try:
                # Whoever holds a read-only descriptor could open it again for writing if the mode allowed it.
                os.fchmod(fd, 0o600)
                readonly = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                os.close(fd)
                return f"no read-only descriptor of segment {message.id}: {error.strerror}"
        old = self._segments.pop((message.kind, message.id), None)
        if old is not None:
            old.close()
        self._segments[message.kind, message.id] = Segment(
            message.kind, message.id, message.namespace_id, message.nbytes, message.slot_bytes, message.slots,
            fd, readonly, message.memory, bytes.fromhex(message.device_uuid), bytes.fromhex(message.allocation_id),
            bytes.fromhex(message.nonce),
        )  # fmt: skip
        return ""

    @property
    def probe(self) -> Segment | None:
        """Device memory for clients to try, if the server gave some."""
        return self._segments.get((PROBE, 0))

    def drop(self, message: DropSegment) -> None:
        segment = self._segments.pop((message.kind, message.id), None)
        if segment is not None:
            segment.close()

    def add_client(self, token: str, pidfd: int | None) -> None:
        self._clients[token] = Client(token, pidfd)

    def end_client(self, message: EndClient) -> None:
        client = self._clients.pop(message.token, None)
        if client is not None and client.pidfd is not None:
            os.close(client.pidfd)

    def grant(self, message: Grant) -> None:
        client = self._clients.get(message.token)
        if client is not None:
            client.namespaces.add(message.namespace_id)

    def set_writer(self, message: SetWriter) -> None:
        segment = self._segments.get((SLAB, message.slab_id))
        if segment is not None:
            segment.writer = message.token

    def open(self, token: str, kind: int, segment_id: int, *, writable: bool) -> tuple[Segment, int]:
        """The segment and the descriptor to send (still the table's own). AccessError when the client may not."""
        client = self._clients.get(token)
        segment = self._segments.get((kind, segment_id))
        name = {SLAB: "slab", LEDGER: "ledger"}.get(kind, "segment")
        # A segment of a foreign namespace looks like one that does not exist.
        if client is None or segment is None or kind == PROBE or segment.namespace_id not in client.namespaces:
            raise AccessError(
                f"no {name} {segment_id} in the namespaces of this session. Expected one that LookupAndLease or "
                "Reserve named: register the model first",
                missing=True,
            )
        if not writable:
            return segment, segment.readonly_fd
        if kind != SLAB or segment.writer != token:
            raise AccessError(
                f"{name} {segment_id} is not this session's to write. Expected a slab that Reserve named to it: "
                "open it with writable=false, or reserve slots",
                missing=False,
            )
        return segment, segment.fd

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        for client in self._clients.values():
            if client.pidfd is not None:
                os.close(client.pidfd)
        self._segments.clear()
        self._clients.clear()
