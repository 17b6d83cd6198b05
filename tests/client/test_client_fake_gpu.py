"""The client against the real service, both on drivers that are none: descriptors between processes, direct memory."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from kvstore_client import Store, TransportUnavailableError
from kvstore_client import cuda as cuda_module
from kvstore_client import embedded as embedded_module
from kvstore_client.blocks import Origin
from kvstore_client.testing import LAYOUT, chain_of, content, identity, payload, plan, wait_for
from kvstore_client.testing_cuda import FakeCuda, FakeDriver
from kvstore_kernels.slab import Slab

from kvstore.inprocess import InProcessService
from kvstore.testing_gpu import FakeGpuDriver, gpu_infos

Open = Callable[..., Store]
# The service sees card 3 as its device 0, this process as its device 1.
CARDS = (b"\xa7" * 16, b"\xa3" * 16)
DEVICE = "cuda:1"

SERVER = """
import sys
from kvstore.inprocess import InProcessService
from kvstore.testing_gpu import FakeGpuDriver, gpu_infos

driver = FakeGpuDriver(gpu_infos(3))
options = {"device": "cuda", "slab_kind": "vmm", "budget": "32MiB"}
service = InProcessService.start(options, choose_device=driver.device_for)
print(service.address, flush=True)
sys.stdin.read()
service.close()
"""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeCuda(FakeDriver(CARDS))
    monkeypatch.setattr(cuda_module, "get", lambda: fake)
    monkeypatch.setattr("kvstore_client.local.allocate", lambda slot_bytes, slots, _: Slab.allocate(slot_bytes, slots))
    for place in ("request", "core"):
        monkeypatch.setattr(f"kvstore_client.{place}.default_stream_done", lambda device: None)
    yield fake.fake
    gc.collect()
    assert wait_for(lambda: fake.fake.mappings == 0), "everything was unmapped"


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A service in another process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(20)


def write(store: Store, digests: list[bytes], device: str = DEVICE) -> set[Origin]:
    ns = store.namespace_for(identity(), plan, device=device)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)], 1)
        blocks = [request.take(d) for d in digests]
        for block, name in zip(blocks, digests, strict=True):
            block.slab.slot_buffer(block.slot)[: LAYOUT.block_bytes] = payload(name)
        request.commit([(b, d, p) for b, d, p in zip(blocks, digests, [bytes(32), *digests], strict=False)])
        assert store.flush()
        assert request.report().blocks_committed == len(digests)
        return {b.origin for b in blocks}


def read(store: Store, digests: list[bytes], device: str = DEVICE) -> bool:
    ns = store.namespace_for(identity(), plan, device=device)
    with store.open_request(ns) as request:
        return [content(b) for b in request.match([b"".join(digests)])[0].blocks] == [payload(d) for d in digests]


def test_device_memory_of_another_process(driver: FakeDriver, elsewhere: str, opened: Open) -> None:
    store, other = opened(elsewhere, require_transport="fd"), opened(elsewhere)
    stats = store.stats()
    assert (stats["device"], stats["device_here"], stats["memory"]) == ("cuda:0", DEVICE, "cuda-vmm")
    digests = chain_of("doc", 5)
    assert write(store, digests) == {Origin.PRIVATE}
    assert read(other, digests)
    assert driver.calls["cuMemMap"] >= 4, "two probes, two slabs"
    # Whose model computes elsewhere gets copies.
    assert read(other, digests, "cpu")
    with pytest.raises(TransportUnavailableError, match=r"computes on cpu.*cuda:1"):
        read(store, digests, "cpu")
    third = opened(elsewhere, require_transport="bytes")
    assert read(third, digests)
    assert write(third, chain_of("sent", 3)) == {Origin.LOCAL}
    assert read(store, chain_of("sent", 3))
    for one in (store, other):
        one.close()


def test_a_device_that_is_not_visible_here(elsewhere: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(FakeDriver((b"\x01" * 16,)))
    monkeypatch.setattr(cuda_module, "get", lambda: fake)
    store = opened(elsewhere)
    stats = store.stats()
    assert (stats["transport"], stats["device_here"]) == ("bytes", "")
    assert "GPU-a3a3a3a3" in stats["transport_reason"]
    assert "CUDA_VISIBLE_DEVICES" in stats["transport_reason"]
    digests = chain_of("doc", 2)
    assert write(store, digests, "cpu") == {Origin.LOCAL}
    assert read(store, digests, "cpu")


@pytest.mark.parametrize(("kind", "transport"), [("vmm", "fd"), ("legacy", "cuda-ipc")])
def test_a_service_in_this_process_is_used_where_it_lies(
    driver: FakeDriver, opened: Open, monkeypatch: pytest.MonkeyPatch, kind: str, transport: str
) -> None:
    theirs = FakeGpuDriver(gpu_infos(3))
    start = InProcessService.start
    given: list[dict[str, object]] = []

    def choose(options: dict[str, object]) -> InProcessService:
        given.append(options)
        return start({**options, "slab_kind": kind}, choose_device=theirs.device_for)

    monkeypatch.setattr(InProcessService, "start", choose)
    store = opened("embedded", device="cuda:0", budget=32 * 2**20, require_transport=transport)
    assert given == [{"device": "cuda:0", "budget": str(32 * 2**20)}]
    digests = chain_of("doc", 4)
    assert write(store, digests) == {Origin.PRIVATE}
    ns = store.namespace_for(identity(), plan, device=DEVICE)
    request = store.open_request(ns)
    kept = request.match([b"".join(digests)])[0].blocks
    assert [content(b) for b in kept] == [payload(d) for d in digests]
    assert driver.calls["cuIpcOpenMemHandle"] == driver.calls["cuMemMap"] == 0
    request.close()
    store.close()
    assert content(kept[0]) == payload(digests[0]), "what is looked through outlives the service"
    del kept, request
    gc.collect()
    assert wait_for(lambda: theirs.used == 0)


def test_embedded_settings_that_can_not_be() -> None:
    with pytest.raises(embedded_module.SettingError, match="cuda:N"):
        embedded_module.start_embedded("gpu", None)
    with pytest.raises(embedded_module.SettingError, match="2\\*\\*30"):
        embedded_module.start_embedded("cuda:0", 0)
    with pytest.raises(embedded_module.SettingError, match="cuda:99"):
        embedded_module.start_embedded("cuda:99999", None)
