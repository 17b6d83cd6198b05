"""The descriptor socket: hello, segments and probes for clients, over SOCK_SEQPACKET packets with descriptors."""

import logging
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.control import close_all, receive_packet
from kvstore.log import LimitedLog
from kvstore.supervisor.connection import Connection, Handler, Reply

MAX_PACKET = 64 * 1024
# A client says hello right after it connected.
HELLO_DEADLINE_S = 1.0
_RESOURCE_EXHAUSTED = 8
_INVALID_ARGUMENT = 3
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """One accepted connection: what it is to say hello by, and the one reply that may wait for its reader."""

    sock: socket.socket
    connection: Connection
    hello_by: float
    waiting: Reply | None = None


class DescriptorSocket:
    """Listens and serves, driven by a selector that the supervisor owns.

    Invariants: never blocks; at most `max_connections` are open, and those without a hello close after
    HELLO_DEADLINE_S, or at once where another connection needs the place; a connection has at most one unsent reply,
    and is not read while it has; every descriptor that a client sends is closed unless the handler keeps it; nothing a
    client sends raises out of here.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        handler: Handler,
        *,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
        new_token: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._connections: dict[int, _Open] = {}
        self._paused = False
        self._selector = selector
        self._handler = handler
        self._max_connections = max_connections
        self._clock = clock
        self._new_token = new_token
        self._log = LimitedLog(_logger)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o660)
        self._listener.listen(128)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._connections)

    def expire(self) -> None:
        """Closes connections that did not say hello in time; accepts again after a shortage. Call once in a while."""
        if self._paused:
            self._paused = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        now = self._clock()
        for entry in list(self._connections.values()):
            if not entry.connection.token and now >= entry.hello_by:
                self._close(entry)

    def close(self) -> None:
        for entry in list(self._connections.values()):
            self._close(entry)
        if not self._paused:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # EAGAIN when the client has gone again; else EMFILE and the like, which would come again at once.
            if not isinstance(error, BlockingIOError):
                self._paused = True
                self._selector.unregister(self._listener)
                self._log.log(logging.WARNING, "accept", f"descriptor socket: accept failed: {error}")
            return
        sock.setblocking(False)
        if len(self._connections) >= self._max_connections and not self._drop_silent():
            self._log.log(
                logging.WARNING, "full", f"descriptor socket: {self._max_connections} connections, one more refused"
            )
            text = f"{self._max_connections} connections are open. Expected fewer: close some, or raise --max-sessions"
            self._try_send(sock, Reply.error(_RESOURCE_EXHAUSTED, text))
            sock.close()
            return
        try:
            connection = Connection(sock, self._new_token)
        except OSError as error:
            self._log.log(logging.WARNING, "credentials", f"descriptor socket: no peer credentials: {error}")
            sock.close()
            return
        entry = _Open(sock, connection, self._clock() + HELLO_DEADLINE_S)
        self._connections[sock.fileno()] = entry
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._serve(entry, mask))

    def _drop_silent(self) -> bool:
        """Makes room: closes the oldest connection without a hello, of the user who has the most of them."""
        silent = [entry for entry in self._connections.values() if not entry.connection.token]
        if not silent:
            return False
        users = Counter(entry.connection.credentials.uid for entry in silent)
        # So that a user who floods the socket pushes out no other one's clients.
        busiest = max(users.values())
        self._close(next(entry for entry in silent if users[entry.connection.credentials.uid] == busiest))
        self._log.log(
            logging.WARNING, "silent", f"descriptor socket: {self._max_connections} connections, a silent one closed"
        )
        return True

    def _serve(self, entry: _Open, mask: int) -> None:
        if entry.sock.fileno() < 0:
            # Closed to make room, after the selector had named it.
            return
        if mask & selectors.EVENT_WRITE and entry.waiting is not None:
            self._send(entry, entry.waiting)
            return
        try:
            data, fds, complete = receive_packet(entry.sock, MAX_PACKET, max_fds=4)
        except BlockingIOError:
            return
        except OSError:
            self._close(entry)
            return
        if not data:
            close_all(fds)
            self._close(entry)
            return
        if not complete:
            close_all(fds)
            text = f"a packet over the limits. Expected at most {MAX_PACKET} bytes and one descriptor"
            self._send(entry, Reply.error(_INVALID_ARGUMENT, text))
            return
        try:
            # The handler closes what it does not keep.
            reply = self._handler.answer(entry.connection, data, fds)
        except OSError as error:
            self._log.log(logging.WARNING, "system", f"descriptor socket: {error}")
            text = f"the service is short of descriptors ({error.strerror}). Expected enough: try again later"
            reply = Reply.error(_RESOURCE_EXHAUSTED, text)
        self._send(entry, reply)

    def _send(self, entry: _Open, reply: Reply) -> None:
        sent = self._try_send(entry.sock, reply)
        if sent is None:
            self._close(entry)
            return
        if sent:
            reply.close()
        entry.waiting = None if sent else reply
        events = selectors.EVENT_READ if sent else selectors.EVENT_WRITE
        self._selector.modify(entry.sock, events, self._selector.get_key(entry.sock).data)

    @staticmethod
    def _try_send(sock: socket.socket, reply: Reply) -> bool | None:
        """True: sent. False: the client does not read. None: it is gone."""
        try:
            socket.send_fds(sock, [reply.payload], reply.fds)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _close(self, entry: _Open) -> None:
        self._selector.unregister(entry.sock)
        del self._connections[entry.sock.fileno()]
        entry.sock.close()
        if entry.waiting is not None:
            entry.waiting.close()
        self._handler.left(entry.connection)


def probe_page(nonce: bytes) -> int:
    """A read-only page that begins with `nonce`: a client that maps it and finds the nonce can map slabs too."""
    fd = os.memfd_create("kvstore-probe", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE"))
        os.pwrite(fd, nonce, 0)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
