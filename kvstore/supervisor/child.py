"""The server process as its parent sees it."""

import os
import signal
import socket
import subprocess
import sys
from typing import Protocol


class Child(Protocol):
    """A server that was started. `fileno` reads as ready when it has ended."""

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int: ...

    def terminate(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Makes `fileno` ready soon, whatever it does."""

    def reap(self, timeout_s: float) -> int:
        """Its exit status, waiting `timeout_s` at most."""

    def close(self) -> None: ...


class ServerChild:
    """A running server. Owns the process and its pidfd, which reads as ready when the process is dead."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    @classmethod
    def start(cls, control: socket.socket) -> "ServerChild":
        """Starts a server that talks over `control`, which is closed here."""
        with control:
            fd = control.fileno()
            command = [
                sys.executable,
                "-m",
                "kvstore.server",
                "--control-fd",
                str(fd),
                "--parent-pid",
                str(os.getpid()),
            ]
            # gRPC logs in its own format, several lines a failure; the server's error says the same in one.
            env = {"GRPC_VERBOSITY": "NONE", **os.environ}
            return cls(subprocess.Popen(command, env=env, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=sys.stderr))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._pidfd

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def reap(self, timeout_s: float) -> int:
        """Waits for the exit status: negative = the signal that killed it. Kills it after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(timeout_s + 5)

    def close(self) -> None:
        os.close(self._pidfd)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"
