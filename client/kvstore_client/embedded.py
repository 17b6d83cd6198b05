"""A service of one's own, without configuration: the same server, in a child process or in this one."""

from __future__ import annotations

import importlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvstore_client.errors import ServiceUnavailableError, SettingError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 2000


class Embedded(Protocol):
    """A service that this process started."""

    @property
    def address(self) -> str:
        """Where it is served."""

    def close(self) -> None:
        """Ends it. Idempotent."""


def start_embedded(device: str, budget: int | None) -> Embedded:
    """Starts a service that holds its blocks on `device`. Raises SettingError for a device or budget that can't be, and
    ServiceUnavailableError when it does not start.
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise SettingError(f"budget={budget!r}: expected a whole number of bytes, such as 2**30 for a GiB, or None")
    if device == "cpu":
        return EmbeddedService.start(budget)
    if not device.startswith(("cuda", "GPU-")):
        raise SettingError(f'device={device!r}: expected "cpu", "cuda", "cuda:N" or a UUID "GPU-..."')
    return InProcess.start(device, budget)


class InProcess:
    """The server in this process: its slabs are used where they lie, over the same CUDA context.

    Invariants: as for EmbeddedService; memory that tensors still look through outlives it.
    """

    def __init__(self, service: Any) -> None:
        self._service = service
        self._owner = os.getpid()

    @classmethod
    def start(cls, device: str, budget: int | None) -> InProcess:
        """Starts it and waits until it serves. Raises SettingError or ServiceUnavailableError."""
        given = {"device": device} | ({} if budget is None else {"budget": str(budget)})
        try:
            # By name: the client never depends on the server part, which may not be installed.
            configuration = importlib.import_module("kvstore.config")
            inprocess = importlib.import_module("kvstore.inprocess")
        except ImportError as error:
            raise ServiceUnavailableError(
                f"the embedded service can't be started: {error}; install the server part: "
                "pip install 'gpu-kvstore[server]'"
            ) from None
        try:
            return cls(inprocess.InProcessService.start(given))
        except configuration.ConfigurationError as error:
            raise SettingError(f"the embedded service: {error}") from None
        except (configuration.StartError, OSError) as error:
            raise ServiceUnavailableError(f"the embedded service did not start: {error}") from None

    @property
    def address(self) -> str:
        """Where it is served."""
        return str(self._service.address)

    def close(self) -> None:
        """Stops it. Idempotent. Does nothing in a forked child."""
        if os.getpid() == self._owner:
            self._service.close()


class EmbeddedService:
    """A `kvstore serve` of this process, in a private folder.

    Invariants: it ends when this process does, however that happens; the folder goes with close(); every wait has a
    deadline.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._owner = os.getpid()

    @classmethod
    def start(cls, budget: int | None = None, options: Sequence[str] = ()) -> EmbeddedService:
        """Starts a service on the CPU and waits until it serves. `budget` in bytes; None = the service's default.

        Raises ServiceUnavailableError, with the end of its log, when it does not.
        """
        folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
        command = [sys.executable, "-m", "kvstore", "serve", "--address", str(folder / "kvstore.sock")]
        command += ["--device", "cpu", "--exit-with-parent", *options]
        if budget is not None:
            command += ["--budget", str(budget)]
        ready_read, ready_write = os.pipe()
        try:
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--ready-fd", str(ready_write)],
                    env=_environment(),
                    pass_fds=[ready_write],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C is for the worker: the service goes when the worker has finished.
                    start_new_session=True,
                )
        except OSError as error:
            os.close(ready_read)
            shutil.rmtree(folder, ignore_errors=True)
            raise ServiceUnavailableError(f"the embedded service can't be started: {error}") from None
        finally:
            os.close(ready_write)
        service = cls(process, folder)
        if not _announced(ready_read, time.monotonic() + START_TIMEOUT_S):
            code, text = process.poll(), service.log_tail()
            service.close()
            what = f"did not start within {START_TIMEOUT_S:.0f} s" if code is None else f"exited with code {code}"
            raise ServiceUnavailableError(
                f"the embedded service {what}; is the server part installed (pip install 'gpu-kvstore[server]')? "
                f"Its log ends with: {text}"
            )
        return service

    @property
    def address(self) -> str:
        """Where it is served."""
        return str(self._folder / "kvstore.sock")

    @property
    def pid(self) -> int:
        """Its supervisor's process."""
        return self._process.pid

    def log_tail(self) -> str:
        """The end of what it wrote."""
        try:
            return (self._folder / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Stops it and removes its folder. Idempotent. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Ours, without the settings of other services, and with the import path this interpreter really has."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_") or k.startswith("KVSTORE_CLIENT_")}
    kept["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return kept


def _announced(ready: int, deadline: float) -> bool:
    """Whether the service wrote its addresses before it exited or the deadline passed."""
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        return bool(readable and pipe.read(4096))
