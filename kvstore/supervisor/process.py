"""The supervisor's loop: signals, the server, its control channel, the descriptor socket."""

import contextlib
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kvstore.config import ConfigurationError, ServiceConfig
from kvstore.control import (
    Configure,
    ControlChannel,
    DropSegment,
    EndClient,
    Grant,
    KeepSegment,
    Kept,
    Message,
    Ready,
    SetWriter,
    StartFailed,
    close_all,
)
from kvstore.supervisor.child import Child, ServerChild, describe_exit
from kvstore.supervisor.connection import Handler
from kvstore.supervisor.descriptor_socket import DescriptorSocket, probe_page
from kvstore.supervisor.lock import ServiceLock, remove_stale_socket
from kvstore.supervisor.segments import SegmentTable

START_DEADLINE_S = 60.0
# What a stop may take beyond the grace period before the server is killed.
STOP_MARGIN_S = 5.0
_TICK_S = 1.0
_logger = logging.getLogger("kvstore.supervisor")


class Supervisor:
    """One service from start to exit.

    Invariants: holds the lock of the address from before the first socket until after the last; the descriptor socket
    is served before the server is; when the server is gone, so is the service. `run` may be called once.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        announce: Callable[[list[str]], None],
        watch_parent: bool = False,
        owns_process: bool = True,
        start_server: Callable[[socket.socket], Child] = ServerChild.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owns_process` False: run in a thread of somebody else's process; its signals and limits stay as they are."""
        self._config = config
        self._announce = announce
        self._watch_parent = watch_parent
        self._owns_process = owns_process
        self._start_server = start_server
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._table = SegmentTable()
        self._control, self._server_end = ControlChannel.pair()
        self._wake_read, self._wake_write = socket.socketpair()
        self._deadline = clock() + START_DEADLINE_S
        self._ready = False
        self._stopping = False
        self._failure = ""
        self._exit_status: int | None = None

    @property
    def failure(self) -> str:
        """Why it ended, once `run` has returned; empty when it was told to."""
        return self._failure

    def stop(self) -> None:
        """Tells `run` to return. From any thread; idempotent."""
        self._stopping = True
        # Full: it is awake already. Closed: it has ended.
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def run(self) -> int:
        """Serves until told to stop; returns the exit code. StartError when it can't."""
        address = self._config.address
        try:
            address.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            lock = ServiceLock.acquire(address)
        except OSError as error:
            raise ConfigurationError(
                f"can't use {address.parent}: {error.strerror}. Expected a folder this user may write to: "
                "give another path with --address"
            ) from None
        try:
            for path in self._sockets():
                if remove_stale_socket(path):
                    _logger.info("removed the stale socket %s of a dead service", path)
            return self._serve_and_remove_sockets()
        finally:
            lock.release()

    def _serve_and_remove_sockets(self) -> int:
        try:
            return self._serve()
        finally:
            for path in self._sockets():
                path.unlink(missing_ok=True)

    def _sockets(self) -> list[Path]:
        return [self._config.address, self._config.descriptor_address, self._config.admin_address]

    def _serve(self) -> int:
        parent = self._open_parent()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        if self._owns_process:
            self._take_process()
        child = self._start_server(self._server_end)
        handler = Handler(
            self._table,
            tell_server=self._control.send,
            hear_server=self._hear_server,
            max_clients=2 * self._config.max_sessions,
            probe_page=probe_page,
            host_memory=self._config.device == "cpu",
            descriptors=self._config.slab_kind != "legacy",
        )
        sockets = DescriptorSocket(
            self._config.descriptor_address, self._selector, handler, max_connections=2 * self._config.max_sessions + 16
        )
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda _mask: self._wake_read.recv(64))
        self._selector.register(self._control, selectors.EVENT_READ, lambda _mask: self._hear_server())
        self._selector.register(child, selectors.EVENT_READ, lambda _mask: self._child_died(child))
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ, lambda _mask: self._parent_died(parent))
        self._tell_server(Configure(self._config.to_json()))
        try:
            self._loop(child, sockets)
        finally:
            if self._owns_process:
                signal.set_wakeup_fd(-1)
            if self._exit_status is None:
                child.kill()
                self._exit_status = child.reap(STOP_MARGIN_S)
            sockets.close()
            handler.close()
            child.close()
            self._selector.close()
            self._control.close()
            self._table.close()
            self._wake_read.close()
            self._wake_write.close()
            if parent is not None:
                os.close(parent)
        return self._exit_code(child.pid)

    def _take_process(self) -> None:
        # Two descriptors a segment, one a client: more than the usual soft limit of 1024. The server inherits it.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        signal.set_wakeup_fd(self._wake_write.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _loop(self, child: Child, sockets: DescriptorSocket) -> None:
        told_to_stop = False
        tick = self._clock()
        while self._exit_status is None:
            for key, mask in self._selector.select(_TICK_S):
                key.data(mask)
            # The server may be dead already; its pidfd tells.
            with contextlib.suppress(OSError):
                self._control.flush()
            if self._clock() >= tick:
                tick = self._clock() + _TICK_S
                sockets.expire()
            if self._stopping and not told_to_stop:
                told_to_stop = True
                self._deadline = self._clock() + self._config.grace_s + STOP_MARGIN_S
                child.terminate()
            if (told_to_stop or not self._ready) and self._clock() >= self._deadline:
                self._failure = self._failure or (
                    "the server did not stop in time" if told_to_stop else f"no server after {START_DEADLINE_S:.0f} s"
                )
                child.kill()

    def _open_parent(self) -> int | None:
        if not self._watch_parent:
            return None
        return os.pidfd_open(os.getppid())

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            # Asked twice: now.
            self._deadline = self._clock()
        self._stopping = True

    def _parent_died(self, parent: int) -> None:
        _logger.info("the process that started this service is gone: stopping")
        self._selector.unregister(parent)
        self._stopping = True

    def _child_died(self, child: Child) -> None:
        self._hear_server()
        self._exit_status = child.reap(STOP_MARGIN_S)

    def _hear_server(self) -> None:
        """Reads and applies all that the server has said."""
        try:
            while (received := self._control.receive()) is not None:
                self._apply(*received)
        except EOFError:
            # The server is exiting; its pidfd tells when and how.
            if self._control in self._selector.get_map():
                self._selector.unregister(self._control)

    def _tell_server(self, message: Message) -> None:
        # The server may be dead already; its pidfd tells.
        with contextlib.suppress(OSError):
            self._control.send(message)

    def _apply(self, message: Message, fds: list[int]) -> None:
        match message:
            case KeepSegment():
                error = self._table.keep(message, fds.pop())
                self._tell_server(Kept(message.ticket, error))
            case DropSegment():
                self._table.drop(message)
            case Grant():
                self._table.grant(message)
            case SetWriter():
                self._table.set_writer(message)
            case EndClient():
                self._table.end_client(message)
            case Ready():
                self._ready = True
                listen = [address for address in (message.listen, message.metrics) if address]
                try:
                    self._announce([f"unix:{self._config.address}", *listen])
                except BrokenPipeError:
                    # Whoever started this died before its pidfd could be opened.
                    self._stopping = self._stopping or self._watch_parent
            case StartFailed():
                self._failure = message.message
            case _:
                raise ValueError(f"the server sent {type(message).__name__}, a message that only servers get")
        close_all(fds)

    def _exit_code(self, pid: int) -> int:
        status = self._exit_status
        # A server that is told to stop before it listens to signals dies of this one.
        if self._stopping and status in (0, -signal.SIGTERM) and not self._failure:
            return 0
        if not self._failure:
            self._failure = f"the server process {pid} {describe_exit(status or 0)}"
            self._failure += ". Expected it to run until told to stop: see its log lines above, then start it again"
        if self._owns_process:
            sys.stderr.write(f"error: {self._failure}\n")
        return 1
