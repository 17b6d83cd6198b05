"""Device memory through a driver that isn't one: mapping, rights, handles, pinning, transports, late devices."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from kvstore_client import BadReplyError, CudaError, ServiceUnavailableError, Store, TransportUnavailableError
from kvstore_client import cuda as cuda_module
from kvstore_client import local as local_module
from kvstore_client.blocks import Origin
from kvstore_client.cuda import GRANULE, HANDLES, Cuda
from kvstore_client.descriptors import Received
from kvstore_client.device_work import Pending
from kvstore_client.mapping import SlabMap
from kvstore_client.offers import LEGACY, VMM, Offer, ServiceMemory
from kvstore_client.testing import LAYOUT, FakeService, chain_of, content, digest, identity, payload, plan, wait_for
from kvstore_client.testing_cuda import UUIDS, FakeCuda, FakeDriver, LegacyService, Status, device_memfd
from kvstore_kernels import direct
from kvstore_kernels.slab import Slab

SLOT = 4096
HOME = ServiceMemory(VMM, UUIDS[1], "cuda:3", "cuda:1", b"boot")
Open = Callable[..., Store]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_module, "get", lambda: fake)
    yield fake.fake
    gc.collect()
    assert fake.fake.mappings == 0, "everything was unmapped"
    assert len(HANDLES) == 0


class Supply:
    """Stands for the service: one slab of device memory by descriptor."""

    def __init__(self, nbytes: int = GRANULE) -> None:
        self.fd = device_memfd(nbytes)
        self.asked: list[bool] = []
        self.changes: dict[str, object] = {}
        self.nbytes = nbytes

    def fetch(self, slab_id: int, *, writable: bool) -> Offer:
        self.asked.append(writable)
        offer = Offer(
            VMM, self.nbytes, SLOT, 3, UUIDS[1], b"a" * 16, received=Received(os.dup(self.fd)), slab_id=slab_id
        )
        for name, value in self.changes.items():
            setattr(offer, name, value)
        return offer


def slab_map(source: object, home: ServiceMemory = HOME) -> tuple[SlabMap, list[int], list[Callable[[], None]]]:
    """A map, the slabs it said are unmapped, and what it wants done later."""
    unmapped: list[int] = []
    later: list[Callable[[], None]] = []
    return SlabMap(source, unmapped.append, later.append, home), unmapped, later  # type: ignore[arg-type]


def test_a_missing_driver_or_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(CudaError, match=r"dlopen.*NVIDIA driver"):
        Cuda(Absent())
    fake = FakeDriver()
    fake.fail["cuInit"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Cuda(fake)
    with pytest.raises(CudaError, match=r"GPU-.* is not visible.*CUDA_VISIBLE_DEVICES"):
        FakeCuda().ordinal_of(b"x" * 16)


def test_descriptor_is_mapped_upgraded_and_downgraded_in_place(driver: FakeDriver) -> None:
    supply = Supply()
    slabs, unmapped, later = slab_map(supply)
    slab = slabs.open(7, SLOT, writable=False)
    address = slab.base_address
    os.pwrite(supply.fd, b"hello", SLOT)
    assert bytes(slab.slot_buffer(1)[:5]) == b"hello"
    assert not slab.writable
    assert slabs.open(7, SLOT, writable=True) is slab
    assert slab.writable
    slab.slot_tensor(2)[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert os.pread(supply.fd, 3, 2 * SLOT) == bytes([1, 2, 3])
    assert slabs.downgrade([7]) == [7]
    assert (slab.writable, slab.base_address) == (False, address)
    assert supply.asked == [False, True], "fewer rights need no descriptor"
    assert driver.calls["cuMemAddressReserve"] == 1, "no second alias"
    assert driver.calls["cuMemRelease"] == 1
    view = slab.data[3:9]
    del slab
    slabs.retire([7])
    gc.collect()
    assert not later, "a view is still there"
    del view
    gc.collect()
    assert unmapped == []
    assert driver.mappings == 1, "a finalizer waits for no device"
    before = driver.calls["cuCtxSynchronize"]
    later.pop()()
    assert unmapped == [7]
    assert slabs.alive == 0
    assert driver.calls["cuCtxSynchronize"] == before + 1
    os.close(supply.fd)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nbytes": GRANULE + 4096}, "expected a multiple of"),
        ({"nbytes": 0}, "claims 0 bytes"),
        ({"device_uuid": UUIDS[0]}, "lies on GPU-"),
        ({"device_uuid": b""}, "lies on"),
        ({"allocation_id": b"short"}, "allocation id of 5"),
        ({"kind": "memfd"}, "of kind 'memfd'"),
        ({"kind": LEGACY}, "of kind 'cuda-legacy'"),
        ({"slots": 600}, "claims 600 slots"),
        ({"slot_bytes": 8192}, "slots of 8192"),
    ],
)
def test_an_offer_that_can_not_be_is_not_mapped(driver: FakeDriver, changes: dict[str, object], text: str) -> None:
    supply = Supply()
    supply.changes = changes
    slabs, _, _ = slab_map(supply)
    with pytest.raises(BadReplyError, match=text):
        slabs.open(7, SLOT, writable=False)
    assert driver.calls["cuMemImportFromShareableHandle"] == 0


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_refusal_of_the_driver_leaves_nothing_mapped(driver: FakeDriver, call: str) -> None:
    slabs, unmapped, _ = slab_map(Supply())
    driver.fail[call] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ServiceUnavailableError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        slabs.open(7, SLOT, writable=False)
    assert (driver.mappings, slabs.alive, unmapped) == (0, 0, [])


def test_what_can_not_be_unmapped_is_not_said_to_be(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    slabs, unmapped, later = slab_map(Supply())
    slabs.open(7, SLOT, writable=False)
    slabs.retire([7])
    gc.collect()
    driver.fail["cuCtxSynchronize"] = Status.CUDA_ERROR_INVALID_CONTEXT
    end = later.pop()
    end()
    assert unmapped == []
    assert "can't be unmapped" in caplog.text
    driver.fail.clear()
    end()
    assert unmapped == [7]


def test_memory_of_this_process_is_used_where_it_lies(driver: FakeDriver) -> None:
    class Owner:
        pass

    owner = Owner()
    memory = Slab.allocate(SLOT, GRANULE // SLOT)
    direct.publish(b"a" * 16, memory.base_address, GRANULE, owner)
    try:
        slabs, unmapped, later = slab_map(Supply())
        slab = slabs.open(7, SLOT, writable=True)
        assert slab.base_address == memory.base_address
        assert driver.calls["cuMemImportFromShareableHandle"] == 0
        del slab
        slabs.retire([7])
        gc.collect()
        later.pop()()
        assert unmapped == [7]
    finally:
        direct.withdraw(b"a" * 16)


def test_host_slabs_are_pinned_for_a_device(driver: FakeDriver, supply_of_memfd: Supply) -> None:
    slabs, unmapped, later = slab_map(supply_of_memfd, ServiceMemory())
    slab = slabs.open(7, SLOT, writable=False, compute_device="cpu")
    assert not driver.registered
    assert slabs.open(7, SLOT, writable=False, compute_device="cuda:0") is slab
    address = slab.base_address
    assert (slab.pinned, driver.registered) == (True, {address: 9}), "portable, read-only"
    slabs.open(7, SLOT, writable=True, compute_device="cuda:0")
    assert (slab.pinned, driver.registered) == (True, {address: 1})
    slabs.downgrade([7])
    assert driver.registered == {address: 9}
    del slab
    slabs.close()
    gc.collect()
    later.pop()()
    assert not driver.registered
    assert unmapped == [7]


def test_memory_that_can_not_be_pinned_is_written_but_never_read_in_place(
    driver: FakeDriver, supply_of_memfd: Supply, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fail["cuMemHostRegister"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    slabs, _, _ = slab_map(supply_of_memfd, ServiceMemory())
    for _ in range(3):
        with pytest.raises(ServiceUnavailableError, match=r"slab 7 can't be read by cuda:0.*could not be pinned"):
            slabs.open(7, SLOT, writable=False, compute_device="cuda:0")
        assert not slabs.open(7, SLOT, writable=True, compute_device="cuda:0").pinned
    assert caplog.text.count("can't be pinned") == 1
    assert not slabs.open(7, SLOT, writable=False, compute_device="cpu").pinned


@pytest.fixture
def supply_of_memfd() -> Iterator[Supply]:
    supply = Supply()
    supply.changes = {"kind": "memfd"}
    yield supply
    os.close(supply.fd)


# ---- a whole service with legacy handles


@pytest.fixture
def legacy(driver: FakeDriver) -> Iterator[LegacyService]:
    service = LegacyService(driver)
    service.start()
    yield service
    service.stop()


def reserving(service: LegacyService) -> None:
    """What the fake keeps by itself lies in its slab."""
    for chain_digest, slot in service.committed.items():
        where = slot * LAYOUT.block_bytes
        service.payloads[slot] = bytearray(
            os.pread(service.driver.exported[service.slab][0], LAYOUT.block_bytes, where)
        )
        assert service.payloads[slot] == payload(chain_digest)


def test_legacy_slabs_are_read_and_written_in_place(legacy: LegacyService, opened: Open) -> None:
    store = opened(legacy.address)
    stats = store.stats()
    assert (stats["transport"], stats["transport_reason"]) == ("cuda-ipc", "")
    assert (stats["memory"], stats["device"]) == ("cuda-legacy", "cuda:5")
    assert [o.transport for o in legacy.openings] == ["bytes", "cuda-ipc"], "a second session names the transport"
    assert legacy.openings[0].instance_id == legacy.openings[1].instance_id
    ns = store.namespace_for(identity(), plan, device="cuda:1")
    digests = chain_of("doc", 4)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)], 1)
        assert {b.origin for b in write_chain_now(request, digests)} == {Origin.PRIVATE}
        assert store.flush()
    reserving(legacy)
    other = opened(legacy.address, require_transport="cuda-ipc")
    theirs = other.namespace_for(identity(), plan, device="cuda:1")
    with other.open_request(theirs) as request:
        match = request.match([b"".join(digests)])[0]
        assert [content(b) for b in match.blocks] == [payload(d) for d in digests]
        assert match.reason == ""
    assert len(HANDLES) == 1, "opened once in this process"


def write_chain_now(request, digests):
    """write_chain() without a device event: the fake's devices are done at once."""
    blocks = [request.take(d) for d in digests]
    entries = []
    for index, block in enumerate(blocks):
        block.slab.slot_buffer(block.slot)[: LAYOUT.block_bytes] = payload(digests[index])
        entries.append((block, digests[index], digests[index - 1] if index else bytes(32)))
    request.commit(entries)
    return blocks


@pytest.fixture(autouse=True)
def _host_slabs_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "allocate", lambda slot_bytes, slots, device: Slab.allocate(slot_bytes, slots))
    monkeypatch.setattr("kvstore_client.request.default_stream_done", lambda device: None)
    monkeypatch.setattr("kvstore_client.core.default_stream_done", lambda device: None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_device_that_does_not_compute_is_reached_by_bytes(legacy: LegacyService, opened: Open, device: str) -> None:
    store = opened(legacy.address)
    assert store.stats()["transport"] == "cuda-ipc"
    ns = store.namespace_for(identity(), plan, device=device)
    digests = chain_of("doc", 3)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)], 1)
        assert {b.origin for b in write_chain_now(request, digests)} == {Origin.LOCAL}
        assert store.flush()
        assert request.report().bytes_sent == 3 * LAYOUT.block_bytes
    with store.open_request(ns) as request:
        blocks = request.match([b"".join(digests)])[0].blocks
        assert [content(b) for b in blocks] == [payload(d) for d in digests]
        assert {b.origin for b in blocks} == {Origin.LOCAL}
    assert "OpenSlab" not in legacy.calls


def test_equal_pids_are_diagnosed_by_name(legacy: LegacyService, opened: Open, driver: FakeDriver) -> None:
    legacy.pid = os.getpid()
    with pytest.raises(TransportUnavailableError, match=rf"both have pid {os.getpid()}.*Unix socket"):
        opened(legacy.address, require_transport="cuda-ipc")
    assert driver.calls["cuIpcOpenMemHandle"] == 0, "found out before CUDA does"
    store = opened(legacy.address)
    assert store.stats()["transport"] == "bytes"
    assert "pid namespace" in store.stats()["transport_reason"]
    assert "pid namespace" in legacy.openings[-1].transport_reason, "the service can report it"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("handle", b"x" * 63, "63 bytes"),
        ("device_uuid", b"z" * 16, "lies on"),
        ("boot_id", b"C" * 16, "of boot 4343"),
        ("bytes", 4096, "multiple of"),
        ("allocation_id", b"", "allocation id of 0"),
    ],
)
def test_a_handle_that_can_not_be_is_not_opened(
    legacy: LegacyService, opened: Open, driver: FakeDriver, field: str, value: object, text: str
) -> None:
    legacy.change = lambda handle: setattr(handle, field, value)
    store = opened(legacy.address)
    assert store.stats()["transport"] == "bytes"
    assert text in store.stats()["transport_reason"]
    assert driver.calls["cuIpcOpenMemHandle"] == 0


def test_a_slab_of_another_boot_is_a_miss(legacy: LegacyService, opened: Open) -> None:
    store = opened(legacy.address)
    ns = store.namespace_for(identity(), plan, device="cuda:1")
    digests = chain_of("doc", 2)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)])
        write_chain_now(request, digests)
        assert store.flush()
    legacy.change = lambda handle: setattr(handle, "boot_id", b"C" * 16)
    second = opened(legacy.address, require_transport="bytes")
    assert second.stats()["transport_reason"] == "required by the caller"
    # The first store has the slab mapped; one that opens it now must not.
    legacy.change = lambda handle: handle.slab_id and setattr(handle, "boot_id", b"C" * 16)
    third = opened(legacy.address)
    theirs = third.namespace_for(identity(), plan, device="cuda:1")
    with third.open_request(theirs) as request:
        match = request.match([b"".join(digests)])[0]
        assert (match.blocks, match.reason) == ([], "unmapped")


def test_wrong_transports_are_refused_with_the_reason(legacy: LegacyService, fake: FakeService, opened: Open) -> None:
    with pytest.raises(TransportUnavailableError, match="not a Unix socket"):
        opened(legacy.address, require_transport="fd")
    with pytest.raises(TransportUnavailableError, match=r"slabs are memfd.*--slab-kind legacy"):
        opened(fake.address, require_transport="cuda-ipc")


# ---- devices that are not done


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()


def test_nobody_sees_a_block_before_the_device_is_done(fake: FakeService, opened: Open) -> None:
    store = opened(fake.address)
    ns = store.namespace_for(identity(), plan)
    event = Event()
    late = threading.Event()
    with store.open_request(ns) as request:
        block = request.take()
        request.commit([(block, digest("slow"), bytes(32))], after=event)
        store._core.worker.poke(late.set)
        assert late.wait(5), "actions go on meanwhile"
        assert not store.flush(0.2)
        assert not fake.committed
        assert "Commit" not in fake.calls
        block.slab.slot_buffer(block.slot)[: LAYOUT.block_bytes] = payload("late")
        event.done.set()
        assert wait_for(lambda: fake.committed)
        assert fake.payloads[fake.committed[digest("slow")]] == payload("late"), "summed and sent after the event"


@pytest.mark.parametrize("broken", [False, True])
def test_a_device_that_never_ends_loses_its_commit(
    fake: FakeService, opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    store = opened(fake.address)
    ns = store.namespace_for(identity(), plan)
    monkeypatch.setattr("kvstore_client.committing.Pending", lambda done: Pending(done, 0.1))
    event = Event()

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    if broken:
        monkeypatch.setattr(event, "query", fail)
    with store.open_request(ns) as request, caplog.at_level(logging.WARNING):
        request.commit([(request.take(), digest("never"), bytes(32))], after=event)
        assert store.flush(5)
        report = request.report()
        assert report.commits_dropped == 1
        assert report.short_reasons == ["device-failed" if broken else "device-late"]
    assert caplog.text.count("were not committed") == 1
    assert not fake.committed


def test_slots_go_back_behind_the_device(fake: FakeService, opened: Open) -> None:
    store = opened(fake.address)
    ns = store.namespace_for(identity(), plan)
    request = store.open_request(ns)
    request.reserve([b"".join(chain_of("back", 2))])
    event = Event()
    request.close(after=event)
    assert not store.flush(0.2)
    assert len(fake.held) == 2
    event.done.set()
    assert wait_for(lambda: not fake.held)


def test_urgent_work_does_not_wait_for_a_device(fake: FakeService, opened: Open) -> None:
    store = opened(fake.address)
    ns = store.namespace_for(identity(), plan)
    event = Event()
    ran = threading.Event()

    class Urgent:
        def ready(self) -> bool:
            return True

        def run(self) -> None:
            ran.set()

        def drop(self) -> None:
            pass

    with store.open_request(ns) as request:
        request.commit([(request.take(), digest("slow"), bytes(32))], after=event)
        time.sleep(0.05)
        store._core.worker.put(Urgent(), urgent=True)
        assert ran.wait(2)
        event.done.set()


def test_bytes_into_slots_of_a_device_budget(legacy: LegacyService, opened: Open) -> None:
    store = opened(legacy.address, local_budget=3 * LAYOUT.block_bytes)
    local = store._core.local
    local.settle_budget("cuda:1")
    blocks = [local.take(LAYOUT, "cuda:1") for _ in range(3)]
    host = local.take(LAYOUT)
    assert local.allocated_bytes == 6 * LAYOUT.block_bytes, "each device has a budget of its own"
    with pytest.raises(local_module.LocalBudgetExceeded, match="on cuda:1"):
        local.take(LAYOUT, "cuda:1")
    for block in [*blocks, host]:
        local.free(block)
    assert local.taken_blocks == 0


def test_a_local_slot_is_reused_behind_the_device() -> None:
    local = local_module.LocalSlabs(2 * LAYOUT.block_bytes, 2 * LAYOUT.block_bytes)
    first, second = local.take(LAYOUT), local.take(LAYOUT)
    event = Event()
    local.free(first, event)
    assert local.taken_blocks == 2
    local.free(second)
    assert local.take(LAYOUT).slot == second.slot, "what is free comes first"
    timer = threading.Timer(0.1, event.done.set)
    timer.start()
    assert local.take(LAYOUT).slot == first.slot, "with nothing else left it waits for the device"
    assert event.query()
    timer.join()
    with pytest.raises(local_module.LocalBudgetExceeded):
        local.take(LAYOUT)
