"""A service on threads of this process: it leaves the process as it is, and nothing behind."""

import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from kvstore_kernels import direct
from kvstore_kernels.checksum import block_checksum

from kvstore.config import ConfigurationError, ServiceConfig, StartError
from kvstore.device import CpuDevice
from kvstore.inprocess import InProcessService
from kvstore.testing_client import SLAB, RawClient, chain

SMALL = {"device": "cpu", "budget": "32MiB"}


def leftovers() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("kvstore-*")}


def settings() -> tuple[object, ...]:
    umask = os.umask(0o077)
    os.umask(umask)
    return (
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        resource.getrlimit(resource.RLIMIT_NOFILE),
        list(logging.getLogger().handlers),
        logging.getLogger("kvstore").level,
        umask,
    )


def test_two_services_serve_at_once_and_leave_nothing_behind():
    files, before, threads = leftovers(), settings(), threading.active_count()
    services = [InProcessService.start(SMALL) for _ in range(2)]
    assert settings() == before
    for service in services:
        folder = Path(service.address).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        with RawClient(Path(service.address)) as client:
            assert client.welcome.device == "cpu"
            namespace = client.register().namespace_id
            digests = chain("x", 3)
            client.publish(namespace, digests, [b"\x05" * 4096] * 3)
            lease = client.lookup_and_lease(namespace, digests)
            assert [block_checksum(block) for block in client.read(lease)] == list(lease.checksums)
    for service in services:
        service.close()
        service.close()
    assert leftovers() == files
    assert settings() == before
    # gRPC keeps one of its own.
    assert threading.active_count() <= threads + 1


def test_its_slabs_are_found_where_they_lie():
    service = InProcessService.start(SMALL)
    with RawClient(Path(service.address)) as client:
        namespace = client.register().namespace_id
        reserved = client.publish(namespace, chain("direct", 1), [b"\x2a" * 4096])
        segment, fd = client.descriptors.open_segment(SLAB, reserved.slab_ids[0], writable=False)
        os.close(fd)
        found = direct.find(segment.allocation_id)
        address = found.address + reserved.slots[0] * segment.slot_bytes
        assert ctypes.string_at(address, 4096) == b"\x2a" * 4096
    service.close()
    assert direct.find(segment.allocation_id) is None
    # Whoever holds it reads on after the end of the service.
    assert ctypes.string_at(address, 4096) == b"\x2a" * 4096


def test_it_starts_on_any_thread():
    services = []
    thread = threading.Thread(target=lambda: services.append(InProcessService.start(SMALL)))
    thread.start()
    thread.join(20)
    RawClient(Path(services[0].address)).close()
    services[0].close()


def test_a_close_does_not_wait_for_clients():
    service = InProcessService.start(SMALL)
    client = RawClient(Path(service.address))
    client.reserve(client.register().namespace_id, chain("kept", 2))
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < 5
    client.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [({"budget": "lots"}, ConfigurationError), ({"device": "tpu"}, ConfigurationError),
     ({"budget": "900TiB"}, ConfigurationError), ({"device": "cuda"}, StartError)],
)  # fmt: skip
def test_what_it_cannot_do_is_said_and_leaves_nothing(options, error):
    files, threads = leftovers(), threading.active_count()

    def no_device(_config: ServiceConfig) -> CpuDevice:
        raise StartError("no such device (as the test ordered)")

    with pytest.raises(error, match=r"Expected|expected|as the test ordered"):
        InProcessService.start(options, choose_device=no_device)
    assert leftovers() == files
    # Threads of tests before may end meanwhile.
    assert threading.active_count() <= threads


def test_a_failure_inside_is_said(caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def broken(_config: ServiceConfig) -> CpuDevice:
        raise OSError("broken")

    with pytest.raises(StartError, match="server process"):
        InProcessService.start(SMALL, choose_device=broken)


def script(text: str) -> subprocess.CompletedProcess[str]:
    # The folder of its own: the services of other tests come and go beside it.
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert list(Path(folder).iterdir()) == []
    return done


def test_the_end_of_the_interpreter_ends_it():
    done = script(
        "from kvstore.inprocess import InProcessService\n"
        "from kvstore.testing_client import RawClient\n"
        "from pathlib import Path\n"
        f"service = InProcessService.start({SMALL!r})\n"
        "client = RawClient(Path(service.address))\n"
        "client.register()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_leaves_it_alone():
    done = script(
        "import os\n"
        "from pathlib import Path\n"
        "from kvstore.inprocess import InProcessService\n"
        f"service = InProcessService.start({SMALL!r})\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    service.close()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert Path(service.address).exists()\n"
        "service.close()\n"
    )
    assert done.returncode == 0, done.stderr
