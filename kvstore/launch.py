"""Starts a service as a child process: for the demo, benchmarks and tests."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from kvstore.config import StartError


class ServiceProcess:
    """A `kvstore serve` that this process started, ready to be used.

    Invariants: every wait has a deadline; the service ends when this process does, however it does; leaving the `with`
    block stops it.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: Path, listen: str, metrics: str = "") -> None:
        self._process = process
        self.address = address
        self.listen = listen
        self.metrics = metrics

    @classmethod
    def start(
        cls,
        address: Path,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stderr: IO[bytes] | None = None,
        deadline_s: float = 30.0,
    ) -> "ServiceProcess":
        """Starts a service on the socket `address` and waits until it serves.

        `options` are further options of `kvstore serve`; `stderr` gets its log (default: this process's stderr).
        StartError when it exits or is not ready within `deadline_s`.
        """
        ready_read, ready_write = os.pipe()
        command = [sys.executable, "-m", "kvstore", "serve", "--address", str(address), "--exit-with-parent"]
        command += ["--ready-fd", str(ready_write), *options]
        try:
            process = subprocess.Popen(
                command,
                env=None if env is None else dict(env),
                pass_fds=[ready_write],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        except BaseException:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
        with os.fdopen(ready_read, "rb", buffering=0) as ready:
            lines = _read_ready(ready, time.monotonic() + deadline_s)
        if not lines:
            process.kill()
            code = process.wait(deadline_s)
            raise StartError(
                f"the service on {address} did not start (exit code {code}). Expected it to serve within "
                f"{deadline_s:.0f} s: see its error output"
            )
        metrics = next((line for line in lines[1:] if line.startswith("http://")), "")
        listen = next((line for line in lines[1:] if line != metrics), "")
        return cls(process, address, listen, metrics)

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Waits for the exit code. subprocess.TimeoutExpired when it runs on."""
        return self._process.wait(timeout_s)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then its exit code; killed when it takes longer than `timeout_s`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL; its server dies with it."""
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _read_ready(ready: IO[bytes], deadline: float) -> list[str]:
    """The addresses that the service announces; empty when it exits or the deadline passes first."""
    text = b""
    while True:
        readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return []
        piece = ready.read(4096)
        if not piece:
            return text.decode().splitlines()
        text += piece
