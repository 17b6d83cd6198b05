"""Services as real processes: started in a folder of their own, stopped at the end, their log kept for the test."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_proto.v1 import admin_pb2_grpc

from kvstore.launch import ServiceProcess
from kvstore.testing_client import RawClient, admin_channel, admin_stub


class Launcher:
    """Starts services; `log` is what the last one wrote to stderr so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = folder / "kv.sock"
        self.log_path = folder / "log"
        self._running: list[ServiceProcess] = []

    def __call__(self, *options: str, env: dict[str, str] | None = None, address: Path | None = None) -> ServiceProcess:
        with self.log_path.open("ab") as log:
            service = ServiceProcess.start(
                address or self.address, options=("--budget", "64MiB", *options), env=env, stderr=log
            )
        self._running.append(service)
        return service

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def stop_all(self) -> None:
        for service in self._running:
            if service.poll() is None:
                service.stop()


def _launcher() -> Iterator[Launcher]:
    # Short: the path of a Unix socket holds 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        launcher.stop_all()
        shutil.rmtree(folder)


@pytest.fixture
def launch() -> Iterator[Launcher]:
    """Starts services for one test."""
    yield from _launcher()


@pytest.fixture(scope="module")
def shared_launch() -> Iterator[Launcher]:
    """Starts services for one module."""
    yield from _launcher()


@pytest.fixture(scope="module")
def shared_service(shared_launch: Launcher) -> ServiceProcess:
    """One running service for the tests of a module that leave no trace."""
    return shared_launch("--listen", "127.0.0.1:0", "--session-grace", "0.3")


@pytest.fixture
def worker(shared_service: ServiceProcess) -> Iterator[Callable[..., RawClient]]:
    """Opens sessions on the shared service, which end with the test."""
    workers: list[RawClient] = []

    def make(**options: Any) -> RawClient:
        workers.append(RawClient(shared_service.address, **options))
        return workers[-1]

    yield make
    for one in workers:
        one.close(orderly=True)


@pytest.fixture
def admin(shared_service: ServiceProcess) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """The AdminService of the shared service."""
    with admin_channel(shared_service.address) as channel:
        yield admin_stub(channel)
