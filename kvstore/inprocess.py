"""A service inside the worker's own process: on a GPU another process would cost a second CUDA context, 540 MiB."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore.config import SOCKET_NAME, ServiceConfig, StartError, check_memory, load_config
from kvstore.control import ControlChannel
from kvstore.device.base import Device
from kvstore.device.opening import open_device
from kvstore.server.process import receive_config, serve
from kvstore.supervisor.process import Supervisor

START_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 20.0
# Calls under way at the end are those of this process, which has stopped making them.
GRACE_S = 2.0
_logger = logging.getLogger("kvstore.inprocess")


class ServerThread:
    """The server on a thread and an event loop of its own; for the supervisor it is a child like any other.

    Invariant: `fileno` is ready once the thread has ended, or was given up by `kill`.
    """

    def __init__(self, control: socket.socket, choose_device: Callable[[ServiceConfig], Device]) -> None:
        self._status = 1
        self._ended_read, self._ended_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._told = False
        self._stop: Callable[[], object] | None = None
        self._control = control
        self._choose_device = choose_device
        self._thread = threading.Thread(target=self._run, name="kvstore-server", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """That of the process it is in."""
        return os.getpid()

    def fileno(self) -> int:
        """Reads as ready at the end."""
        return self._ended_read

    def terminate(self) -> None:
        """Asks the server to stop, now or as soon as it has a loop."""
        with self._lock:
            self._told = True
            if self._stop is not None:
                # The loop may be closed: then it has stopped.
                with contextlib.suppress(RuntimeError):
                    self._stop()

    def kill(self) -> None:
        """Gives it up: a thread can't be killed."""
        self.terminate()
        self._signal_end()

    def reap(self, timeout_s: float) -> int:
        """Its result; 1 when it does not end in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.error("the server's thread did not end within %.0f s; it goes on until the process ends", timeout_s)
            return 1
        return self._status

    def close(self) -> None:
        """Closes the descriptors, unless the thread may still write to them."""
        if not self._thread.is_alive():
            os.close(self._ended_read)
            os.close(self._ended_write)

    def _run(self) -> None:
        try:
            self._status = asyncio.run(self._serve())
        finally:
            self._signal_end()

    def _signal_end(self) -> None:
        # Full or closed: it was said before.
        with contextlib.suppress(OSError):
            os.write(self._ended_write, b"!")

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_handle)
        stop = asyncio.Event()
        with self._lock:
            self._stop = lambda: loop.call_soon_threadsafe(stop.set)
            if self._told:
                stop.set()
        channel = ControlChannel(self._control)
        try:
            return await serve(receive_config(channel), channel, stop, self._choose_device)
        finally:
            channel.close()


class InProcessService:
    """Supervisor and server on threads of this process, in a private folder.

    Several may run at once. Signals, limits and logging of the process stay as they are. Invariants: every wait has a
    deadline; nothing is left in the file system after `close`, which also runs at the exit of the interpreter; in a
    forked child it does nothing.
    """

    def __init__(self, config: ServiceConfig, choose_device: Callable[[ServiceConfig], Device]) -> None:
        """Use `start`. `config.address` lies in a folder of its own, which goes with the service."""
        self._folder = config.address.parent
        self._address = str(config.address)
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._ready = threading.Event()
        self._over = False
        self._error = ""
        self._listen = ""
        self._supervisor = Supervisor(
            config,
            announce=self._announced,
            owns_process=False,
            start_server=lambda control: ServerThread(control, choose_device),
        )
        self._thread = threading.Thread(target=self._run, name="kvstore-supervisor", daemon=True)

    @classmethod
    def start(
        cls,
        options: Mapping[str, Any],
        *,
        deadline_s: float = START_DEADLINE_S,
        choose_device: Callable[[ServiceConfig], Device] = open_device,
    ) -> InProcessService:
        """Starts a service and waits until it serves.

        `options` are those of `kvstore serve` by name, as texts or values ("device", "budget", "slab_kind", ...), but
        for the address; the environment is not read. Raises StartError, whose text names what is wrong and a remedy.
        """
        folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
        try:
            config = load_config({"grace": GRACE_S, **options, "address": str(folder / SOCKET_NAME)}, {})
            if config.device == "cpu":
                check_memory(config.budget_bytes)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        service = cls(config, choose_device)
        atexit.register(service.close)
        service._thread.start()
        service._ready.wait(deadline_s)
        if service._error or not service._ready.is_set():
            text = service._error or f"the service in this process did not start within {deadline_s:g} s"
            service.close()
            raise StartError(text)
        return service

    @property
    def address(self) -> str:
        """The path of its Unix socket."""
        return self._address

    @property
    def listen(self) -> str:
        """Its TCP address "host:port"; empty without one."""
        return self._listen

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Stops it and removes its folder; waits `deadline_s` at most. Idempotent. Does nothing in a forked child.

        Slabs that a client of this process found directly stay where they are until it lets go of them.
        """
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self._over:
                return
            self._over = True
        atexit.unregister(self.close)
        self._supervisor.stop()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _logger.error("the service on %s did not stop within %.0f s", self._address, deadline_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _announced(self, addresses: list[str]) -> None:
        self._listen = addresses[1] if len(addresses) > 1 else ""
        self._ready.set()

    def _run(self) -> None:
        try:
            status = self._supervisor.run()
            self._error = self._supervisor.failure if status else ""
        except StartError as error:
            self._error = str(error)
        finally:
            if not self._ready.is_set():
                self._error = self._error or "the service in this process ended before it served"
            elif self._error:
                _logger.error("the service on %s ended: %s", self._address, self._error)
            self._ready.set()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes all loops of the process with one byte; those that come second find none, and lose nothing.
    if isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in str(context.get("handle")):
        return
    loop.default_exception_handler(context)
