"""A service whose device is a GPU, on a driver that is none: transports, probes, handles, deaths, exact numbers."""

import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_kernels import direct
from kvstore_kernels.checksum import block_checksum
from kvstore_proto.v1 import admin_pb2, blocks_pb2, descriptor_pb2, session_pb2

from kvstore.config import ConfigurationError, StartError
from kvstore.device.gpu import GRANULE
from kvstore.inprocess import InProcessService
from kvstore.testing_client import (
    DEADLINE_S,
    SLAB,
    DescriptorRefusedError,
    ModelShape,
    RawClient,
    admin_channel,
    admin_stub,
    chain,
)
from kvstore.testing_gpu import FakeGpuDriver, gpu_infos

UUID = b"\xa3" * 16
FAILED_PRECONDITION = 9


class Place:
    """One service on one fake driver, and its clients."""

    def __init__(self, kind: str, driver: FakeGpuDriver, **options: Any) -> None:
        self.driver = driver
        self.service = InProcessService.start(
            {"device": "cuda", "slab_kind": kind, "budget": "32MiB", "listen": "127.0.0.1:0", "session_grace": 0.3}
            | options,
            choose_device=driver.device_for,
        )
        self.address = Path(self.service.address)
        self.clients: list[RawClient] = []

    def client(self, *, tcp: bool = False, **options: Any) -> RawClient:
        target = self.service.listen if tcp else self.address
        self.clients.append(RawClient(target, **options))
        return self.clients[-1]

    def stats(self) -> admin_pb2.DeviceStats:
        with admin_channel(self.address) as channel:
            reply = admin_stub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S)
        return reply.devices[0]

    def close(self) -> None:
        for client in self.clients:
            client.close(orderly=True)
        self.service.close()


@pytest.fixture
def place() -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(kind: str, driver: FakeGpuDriver | None = None, **options: Any) -> Place:
        places.append(Place(kind, driver or FakeGpuDriver(gpu_infos(3)), **options))
        return places[-1]

    yield make
    for one in places:
        one.close()
        assert one.driver.used == 0, "memory is left after the end"


def wait_until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def code_of(call: Any, *args: Any, **kwargs: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value.code(), caught.value.details()


def write(client: RawClient, reserved: blocks_pb2.ReserveResponse, payloads: list[bytes]) -> int:
    chunks = [
        blocks_pb2.WriteBlocksRequest(slab_id=slab_id, slot=slot, generation=generation, offset=0, data=payload)
        for slab_id, slot, generation, payload in zip(
            reserved.slab_ids, reserved.slots, reserved.generations, payloads, strict=False
        )
    ]
    return client.blocks.WriteBlocks(iter(chunks), metadata=client.metadata, timeout=DEADLINE_S).bytes


def read(client: RawClient, lease_id: int) -> list[bytes]:
    found: dict[int, bytes] = {}
    request = blocks_pb2.ReadBlocksRequest(lease_id=lease_id)
    for piece in client.blocks.ReadBlocks(request, metadata=client.metadata, timeout=DEADLINE_S):
        found[piece.block] = found.get(piece.block, b"") + piece.data
    return [found[block] for block in sorted(found)]


def publish(client: RawClient, namespace: int, name: str, blocks: int) -> tuple[list[bytes], list[bytes], Any]:
    digests = chain(name, blocks)
    payloads = [secrets.token_bytes(4096) for _ in digests]
    reserved = client.reserve(namespace, digests)
    write(client, reserved, payloads)
    client.commit(namespace, reserved, digests, [block_checksum(payload) for payload in payloads])
    return digests, payloads, reserved


@pytest.mark.parametrize(("kind", "memory"), [("vmm", "cuda-vmm"), ("auto", "cuda-vmm"), ("legacy", "cuda-legacy")])
def test_welcome_and_stats_name_the_device(place, kind, memory):
    here = place(kind)
    client = here.client(transport="bytes")
    assert (client.welcome.device, client.welcome.device_uuid, client.welcome.memory) == ("cuda:0", UUID, memory)
    stats = here.stats()
    assert (stats.device, stats.device_uuid, stats.memory) == ("cuda:0", UUID, memory)
    # The probe is in the budget from the start.
    assert (stats.budget_bytes, stats.used_bytes) == (32 << 20, GRANULE)


@pytest.mark.parametrize("kind", ["vmm", "legacy"])
def test_blocks_go_through_the_bytes_transport(place, kind):
    here = place(kind)
    one, two = here.client(transport="bytes"), here.client(tcp=True)
    namespace = one.register().namespace_id
    digests, payloads, _ = publish(one, namespace, "bytes", 5)
    two.register()
    lease = two.lookup_and_lease(namespace, digests)
    assert len(lease.slots) == 5
    assert read(two, lease.lease_id) == payloads
    with admin_channel(here.address) as channel:
        check = admin_stub(channel).CheckIntegrity(admin_pb2.CheckIntegrityRequest(payloads=True), timeout=DEADLINE_S)
    assert (check.blocks_verified, check.damaged, list(check.problems)) == (5, 0, [])


def test_damage_on_the_device_is_found(place):
    here = place("vmm")
    one = here.client(transport="bytes")
    namespace = one.register().namespace_id
    digests, _, reserved = publish(one, namespace, "damage", 4)
    segment, fd = one.descriptors.open_segment(SLAB, reserved.slab_ids[1], writable=False)
    with mmap.mmap(fd, segment.bytes) as memory:
        memory[reserved.slots[1] * segment.slot_bytes + 9] ^= 1
    os.close(fd)
    report = blocks_pb2.ReportDamageRequest(namespace_id=namespace, digests=b"".join(digests))
    assert one.call(one.blocks.ReportDamage, report).condemned == 3


def test_a_vmm_slab_travels_as_a_descriptor_that_says_what_it_is(place):
    here = place("vmm")
    one = here.client()
    namespace = one.register().namespace_id
    _, payloads, reserved = publish(one, namespace, "vmm", 2)
    slab_id, slot = reserved.slab_ids[1], reserved.slots[1]
    for writable in (False, True):
        segment, fd = one.descriptors.open_segment(SLAB, slab_id, writable=writable)
        assert (segment.memory, segment.device_uuid) == (descriptor_pb2.MEMORY_KIND_CUDA_VMM, UUID)
        found = direct.find(segment.allocation_id)
        assert found is not None
        assert found.nbytes == segment.bytes
        with mmap.mmap(fd, segment.bytes, prot=mmap.PROT_READ) as memory:
            assert memory[slot * 4096 : slot * 4096 + 4096] == payloads[1]
        os.close(fd)
    ledger, fd = one.descriptors.open_segment(2, namespace, writable=False)
    os.close(fd)
    # The ledger is host memory wherever the blocks lie.
    assert (ledger.memory, ledger.device_uuid) == (descriptor_pb2.MEMORY_KIND_MEMFD, b"")


def test_the_probe_is_memory_of_the_slabs_own_kind(place):
    here = place("vmm")
    one = here.client()
    reply, (fd,) = one.descriptors.ask(descriptor_pb2.DescriptorRequest(probe=descriptor_pb2.Probe()))
    segment = reply.probe.segment
    assert (segment.memory, segment.bytes, segment.device_uuid) == (
        descriptor_pb2.MEMORY_KIND_CUDA_VMM, GRANULE, UUID,
    )  # fmt: skip
    with mmap.mmap(fd, GRANULE, prot=mmap.PROT_READ) as memory:
        assert memory[: len(reply.probe.nonce)] == reply.probe.nonce
    os.close(fd)
    assert len(reply.probe.nonce) == 32
    assert code_of(one.call, one.blocks.ProbeHandle, blocks_pb2.ProbeHandleRequest())[0] is (
        grpc.StatusCode.FAILED_PRECONDITION
    )
    # The probe is no segment to be opened.
    with pytest.raises(DescriptorRefusedError):
        one.descriptors.open_segment(3, 0, writable=False)


def test_legacy_slabs_have_no_descriptors(place):
    here = place("legacy")
    one = here.client(transport="cuda-ipc")
    with pytest.raises(DescriptorRefusedError, match="cuda-ipc") as caught:
        one.descriptors.ask(descriptor_pb2.DescriptorRequest(probe=descriptor_pb2.Probe()))
    assert caught.value.code == FAILED_PRECONDITION
    reserved = one.reserve(one.register().namespace_id, chain("x", 1))
    with pytest.raises(DescriptorRefusedError):
        one.descriptors.open_segment(SLAB, reserved.slab_ids[0], writable=True)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_legacy_slabs_travel_as_handles_to_whom_they_belong(place, tcp):
    here = place("legacy")
    one = here.client(tcp=tcp, transport="cuda-ipc")
    probe = one.call(one.blocks.ProbeHandle, blocks_pb2.ProbeHandleRequest())
    assert bytes(here.driver.open_handle(probe.handle.handle)[:32]) == probe.nonce
    assert (probe.handle.slab_id, probe.handle.bytes) == (0, GRANULE)
    namespace = one.register().namespace_id
    _, payloads, reserved = publish(one, namespace, "legacy", 3)
    slab_id, slot = reserved.slab_ids[2], reserved.slots[2]
    request = blocks_pb2.OpenSlabRequest(slab_id=slab_id, writable=True)
    handle = one.call(one.blocks.OpenSlab, request).handle
    assert (handle.device_uuid, handle.slab_id, handle.slot_bytes) == (UUID, slab_id, 4096)
    assert (handle.boot_id, handle.exporter_pid) == (one.welcome.boot_id, os.getpid())
    assert handle.bytes == handle.slots * 4096
    assert direct.find(handle.allocation_id).nbytes == handle.bytes
    start = slot * 4096
    assert bytes(here.driver.open_handle(handle.handle)[start : start + 4096]) == payloads[2]

    reader = here.client(tcp=tcp, transport="cuda-ipc")
    readable = blocks_pb2.OpenSlabRequest(slab_id=slab_id)
    assert code_of(reader.call, reader.blocks.OpenSlab, readable)[0] is grpc.StatusCode.NOT_FOUND
    reader.register(ModelShape("another"))
    foreign = code_of(reader.call, reader.blocks.OpenSlab, readable)
    missing = code_of(reader.call, reader.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=999))
    assert foreign[0] is missing[0] is grpc.StatusCode.NOT_FOUND
    assert foreign[1].replace(str(slab_id), "N") == missing[1].replace("999", "N")
    reader.register()
    assert reader.call(reader.blocks.OpenSlab, readable).handle.handle == handle.handle
    assert code_of(reader.call, reader.blocks.OpenSlab, request)[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("kind", "tcp", "transport", "code"),
    [
        ("vmm", False, "cuda-ipc", grpc.StatusCode.FAILED_PRECONDITION),
        ("legacy", False, "fd", grpc.StatusCode.FAILED_PRECONDITION),
        ("vmm", True, "cuda-ipc", grpc.StatusCode.FAILED_PRECONDITION),
        ("vmm", True, "fd", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_transport_that_does_not_lead_to_the_memory_is_refused(place, kind, tcp, transport, code):
    here = place(kind)
    found, text = code_of(here.client, tcp=tcp, transport=transport)
    assert found is code
    assert transport in text
    assert "Expected" in text


def test_a_handle_session_that_nobody_watches_drains_what_it_mapped_for_good(place):
    here = place("legacy")
    one = here.client(tcp=True, transport="cuda-ipc")
    namespace = one.register().namespace_id
    _, payloads, reserved = publish(one, namespace, "tcp", 2)
    handle = one.call(one.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=reserved.slab_ids[0])).handle
    one.close()
    here.clients.remove(one)
    wait_until(lambda: here.stats().slabs_draining == 1)
    # Its process may still read: the memory is neither freed nor used again, and stays in the budget.
    time.sleep(0.2)
    stats = here.stats()
    assert (stats.slabs_draining, stats.slots_private, stats.slots_committed) == (1, 0, 0)
    start = reserved.slots[0] * 4096
    assert bytes(here.driver.open_handle(handle.handle)[start : start + 4096]) == payloads[0]
    two = here.client(transport="cuda-ipc")
    again = two.reserve(two.register().namespace_id, chain("new", 3))
    assert len(again.slots) == 3
    assert set(again.slab_ids).isdisjoint(reserved.slab_ids)
    # Also of what was made ahead meanwhile.
    wait_until(lambda: here.stats().used_bytes == here.driver.used + ledgers(here))


def ledgers(here: Place) -> int:
    """Bytes of the ledgers: in the budget, but not on the device."""
    with admin_channel(here.address) as channel:
        reply = admin_stub(channel).ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=DEADLINE_S)
    slabs = sum(namespace.slab_bytes for namespace in reply.namespaces)
    return here.stats().used_bytes - GRANULE - slabs


def test_an_orderly_handle_session_leaves_nothing_draining(place):
    here = place("legacy")
    one = here.client(tcp=True, transport="cuda-ipc")
    _, _, reserved = publish(one, one.register().namespace_id, "tcp", 2)
    one.call(one.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=reserved.slab_ids[0]))
    one.close(orderly=True)
    here.clients.remove(one)
    with admin_channel(here.address) as channel:
        wait_until(
            lambda: not admin_stub(channel).ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S).sessions
        )
    time.sleep(0.4)
    assert here.stats().slabs_draining == 0


def test_a_draining_slab_is_freed_when_its_last_importer_has_closed_it(place):
    # Small enough that a second model takes its share from the first: seven slabs and no eighth.
    here = place("legacy", budget="17MiB", max_sessions="4")
    one, two = here.client(transport="cuda-ipc"), here.client(transport="cuda-ipc")
    namespace = one.register(ModelShape("first", 512 << 10)).namespace_id
    reserved = one.reserve(namespace, [], anonymous=28)
    opened = {slab_id: open_slab(one, slab_id) for slab_id in set(reserved.slab_ids)}
    assert len(opened) == 7
    one.abort(reserved)
    other = two.register(ModelShape("second", 512 << 10)).namespace_id
    two.reserve(other, [], anonymous=4)
    wait_until(lambda: not one.events.empty())
    asked = list(one.events.get(timeout=5).unmap.slab_ids)
    assert asked
    for slab_id in asked:
        here.driver.open_handle(opened[slab_id].handle)
    assert here.stats().slabs_draining >= len(asked)
    one.say(session_pb2.SessionRequest(slabs_unmapped=session_pb2.SlabsUnmapped(slab_ids=asked)))

    def freed() -> bool:
        return not any(direct.find(opened[slab_id].allocation_id) for slab_id in asked)

    wait_until(freed)


def open_slab(client: RawClient, slab_id: int) -> blocks_pb2.CudaIpcHandle:
    return client.call(client.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=slab_id)).handle


def test_budgets_are_hard_and_numbers_exact(place):
    here = place("vmm", budget="16MiB", max_sessions="4")
    one = here.client()
    namespace = one.register(ModelShape("big", 512 << 10)).namespace_id
    reserved = one.reserve(namespace, chain("big", 40))
    assert "budget" in reserved.short_reason
    stats = here.stats()
    assert stats.used_bytes <= stats.budget_bytes == 16 << 20
    assert stats.slots_private == len(reserved.slots)
    total = stats.slots_free + stats.slots_private + stats.slots_committed + stats.slots_condemned
    assert total == stats.slabs_live * 4
    assert here.driver.used == stats.slabs_live * GRANULE + GRANULE
    pinned = chain("big", 40)[:3]
    payload = bytes(512 << 10)
    write(one, reserved, [payload] * 3)
    one.commit(namespace, reserved, pinned, [block_checksum(payload)] * 3)
    one.call(one.blocks.Pin, blocks_pb2.PinRequest(namespace_id=namespace, digest=pinned[1], pinned=True))
    stats = here.stats()
    assert (stats.slots_committed, stats.blocks_pinned) == (3, 2)


def test_a_device_without_memory_makes_reservations_short_with_the_reason(place):
    here = place("vmm", driver=FakeGpuDriver(gpu_infos(3), capacity=64 << 20))
    for _ in range(4):
        here.driver.fail_next("create")
    one = here.client()
    reserved = one.reserve(one.register().namespace_id, chain("x", 2))
    assert "CUDA_ERROR_OUT_OF_MEMORY" in reserved.short_reason
    assert "cuda:0" in reserved.short_reason


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"device": "cuda:7"}, ["cuda:7", "cuda:0 = GPU-a3a3a3a3", "CUDA_VISIBLE_DEVICES"]),
        ({"device": "GPU-00"}, ["GPU-00", "GPU-a3a3a3a3"]),
        ({"device": "cuda", "budget": "2GiB"}, ["--budget 2147483648", "1073741824", "smaller"]),
    ],
)
def test_what_the_device_cannot_do_is_said_at_the_start(options, parts):
    with pytest.raises(StartError) as caught:
        InProcessService.start(options, choose_device=FakeGpuDriver(gpu_infos(3)).device_for)
    assert all(part in str(caught.value) for part in parts)


def test_a_probe_that_can_not_be_made_is_said_at_the_start():
    driver = FakeGpuDriver(gpu_infos(3))
    driver.fail_next("write", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(StartError, match="CUDA_ERROR_UNKNOWN"):
        InProcessService.start({"device": "cuda", "budget": "8MiB"}, choose_device=driver.device_for)
    assert driver.used == 0


def test_settings_are_checked_before_anything_starts():
    with pytest.raises(ConfigurationError, match="--slab-kind"):
        InProcessService.start({"device": "cpu", "slab_kind": "legacy"})


class HeldDriver(FakeGpuDriver):
    """Copies wait while `hold` is set."""

    def __init__(self) -> None:
        super().__init__(gpu_infos(3))
        self.hold = threading.Event()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def _wait(self) -> None:
        if self.hold.is_set():
            self.entered.set()
            assert self.go_on.wait(10)

    def read(self, address: int, nbytes: int) -> memoryview:
        self._wait()
        return super().read(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        self._wait()
        super().write(address, data)


def test_a_slot_that_is_still_being_written_is_nobody_elses(place):
    driver = HeldDriver()
    here = place("vmm", driver=driver)
    one = here.client(transport="bytes")
    namespace = one.register().namespace_id
    digests = chain("held", 1)
    reserved = one.reserve(namespace, digests)
    driver.hold.set()
    failures: list[Exception] = []

    def slow() -> None:
        try:
            write(one, reserved, [b"\x07" * 4096])
        except grpc.RpcError as error:
            failures.append(error)

    writer = threading.Thread(target=slow)
    writer.start()
    assert driver.entered.wait(5)
    # The event loop is free meanwhile, and the block can't become visible half written.
    code, text = code_of(one.commit, namespace, reserved, digests, [1])
    assert (code, "being written" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert one.abort(reserved) == 1
    assert here.stats().slots_private == 1
    two = here.client(transport="bytes")
    two.register()
    taken = two.reserve(namespace, [], anonymous=400)
    held = set(zip(reserved.slab_ids, reserved.slots, strict=True))
    assert held.isdisjoint(zip(taken.slab_ids, taken.slots, strict=True))
    driver.go_on.set()
    writer.join(10)
    assert not failures
    two.abort(taken)
    wait_until(lambda: here.stats().slots_private == 0)
    with admin_channel(here.address) as channel:
        check = admin_stub(channel).CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=DEADLINE_S)
    assert list(check.problems) == []


def test_what_is_read_past_the_end_of_a_lease_is_not_sent(place):
    driver = HeldDriver()
    here = place("vmm", driver=driver)
    one = here.client(transport="bytes")
    namespace = one.register().namespace_id
    digests, _, _ = publish(one, namespace, "lease", 1)
    lease = one.lookup_and_lease(namespace, digests)
    driver.hold.set()
    answers: list[Any] = []
    reader = threading.Thread(target=lambda: answers.append(code_of(read, one, lease.lease_id)))
    reader.start()
    assert driver.entered.wait(5)
    one.release(lease.lease_id)
    driver.go_on.set()
    reader.join(10)
    assert answers[0][0] is grpc.StatusCode.NOT_FOUND
