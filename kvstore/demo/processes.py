"""The demo's child processes: started in sessions of their own, asked over pipes with deadlines, always cleaned up."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.demo.errors import DemoError

MAX_LINE = 64 * 2**20
_TAIL_LINES = 15


class Child:
    """One process and its log file.

    `process` leads a session and process group of its own: a Ctrl-C in the terminal reaches only the demo, and signals
    of the demo reach everything the child started.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        pass_fds: Sequence[int] = (),
        piped: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self.process.poll() is None

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and everything it started. A process that is gone is no error."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """SIGKILL to the group, stopped or not, and waits for the process's end."""
        self.signal_group(signal.SIGKILL)
        self.process.wait(timeout=10)

    def stop(self, timeout: float = 5.0) -> None:
        """Asks it to end, then kills it."""
        if self.alive:
            self.signal_group(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        # What it started may outlive it.
        self.signal_group(signal.SIGKILL)

    def tail(self) -> str:
        """The end of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])

    def failed(self, what: str) -> DemoError:
        """The error that says what this process did not do, with the end of its log."""
        code = self.process.poll()
        state = "still running" if code is None else f"ended with {code}"
        return DemoError(f"{self.name} {what} ({state}). End of its log:\n{self.tail()}")


class Worker(Child):
    """A model worker: takes one JSON command a line on stdin, answers one JSON line on a pipe of its own. `module` is
    its program.

    At most one command is in the air. `pending` says which, so that two workers can compute at the same moment.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        module: str = "kvstore.demo.worker",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._buffer = bytearray()
        self.pending: str | None = None
        self._answers, write_end = os.pipe()
        os.set_blocking(self._answers, False)
        try:
            super().__init__(
                name,
                ["-m", module, str(write_end)],
                folder,
                pass_fds=(write_end,),
                piped=True,
                env=env,
            )
        finally:
            os.close(write_end)

    def send(self, do: str, **fields: Any) -> None:
        """Starts a command."""
        if self.pending is not None:
            raise RuntimeError(f"{self.name} is still busy with {self.pending}")
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failed(f"is gone, it could not be asked to {do}") from None
        self.pending = do

    def receive(self, timeout: float) -> Any:
        """The result of the command that was sent. DemoError when it fails, the process ends or `timeout` s pass."""
        do, self.pending = self.pending, None
        answer = json.loads(self._read_line(time.monotonic() + timeout, do or "nothing"))
        while "event" in answer:
            answer = json.loads(self._read_line(time.monotonic() + timeout, do or "nothing"))
        if "error" in answer:
            raise DemoError(f"{self.name} could not {do}: {answer['error']}")
        return answer["result"]

    def wait_event(self, timeout: float) -> None:
        """Waits until the running command announces its first token. DemoError when it fails or ends before."""
        answer = json.loads(self._read_line(time.monotonic() + timeout, self.pending or "nothing"))
        if "event" not in answer:
            self.pending = None
            raise DemoError(f"{self.name}: {answer.get('error', 'the command ended before its first token')}")

    def ask(self, do: str, within_s: float = 120.0, **fields: Any) -> Any:
        """`send` and `receive`."""
        self.send(do, **fields)
        return self.receive(within_s)

    def stop(self, timeout: float = 5.0) -> None:
        """Ends it. Its pipe is closed too."""
        super().stop(timeout)
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                # Bytes of a command that nobody will read.
                return

    def _read_line(self, deadline: float, do: str) -> bytes:
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.failed(f"did not finish '{do}' in time")
            if len(self._buffer) > MAX_LINE:
                raise self.failed(f"answered '{do}' with more than {MAX_LINE} bytes")
            if not select.select([self._answers], [], [], min(left, 1.0))[0]:
                continue
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise self.failed(f"ended during '{do}'")
            self._buffer += piece
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line


class Service(Child):
    """`kvstore serve` on a socket in a private folder, and its admin API.

    `address` is what workers connect to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget: int,
        namespace_budget: int = 0,
        name: str = "service",
        device: str = "cpu",
        options: Sequence[str] = (),
    ) -> None:
        self.address = folder / f"{name}.sock"
        self.namespace_budget = namespace_budget
        arguments = ["-m", "kvstore", "serve", "--address", str(self.address), "--budget", str(budget)]
        arguments += ["--device", device, "--exit-with-parent", *options]
        if namespace_budget:
            arguments += ["--namespace-budget", str(namespace_budget)]
        super().__init__(name, arguments, folder)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Returns when the service answers. DemoError, with its log, when it ends or `timeout` seconds pass."""
        from kvstore.demo.admin import Admin

        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.alive:
                raise self.failed("did not start")
            if self.address.with_name(self.address.name + ".admin").exists():
                with Admin(self.address) as admin:
                    if admin.answers(timeout=1.0):
                        return
            time.sleep(0.05)
        raise self.failed(f"was not ready within {timeout:.0f} s")
