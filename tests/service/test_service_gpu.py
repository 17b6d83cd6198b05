"""A real `kvstore serve` on a real GPU, and other processes on its memory."""

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_kernels.checksum import block_checksum
from kvstore_proto.v1 import admin_pb2, blocks_pb2, descriptor_pb2

from kvstore.device.cuda import CudaDriver
from kvstore.device.gpu import GRANULE, GpuDevice
from kvstore.errors import OutOfMemoryError
from kvstore.testing_client import DEADLINE_S, SLAB, ModelShape, RawClient, admin_channel, admin_stub, chain

pytestmark = pytest.mark.gpu
BLOCK = 64 << 10
KINDS = ["vmm", "legacy"]


class Child:
    """A gpu_child process. `ask` sends one request; RuntimeError when the driver refused it there."""

    def __init__(self, fds: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
        )
        assert self._answer() == "ready"

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _answer(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], 90)[0], "the child does not answer"
        answer = json.loads(stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(*fds: int) -> Child:
        children.append(Child(fds))
        return children[-1]

    yield make
    for one in children:
        one.close()


@pytest.fixture(scope="module")
def gpu() -> CudaDriver:
    driver = CudaDriver()
    driver.open(0)
    return driver


def free_bytes(gpu: CudaDriver) -> int:
    return gpu.memory_info()[0]


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)


def stats(address: Path) -> admin_pb2.DeviceStats:
    with admin_channel(address) as channel:
        return admin_stub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S).devices[0]


def publish(client: RawClient, blocks: int, name: str = "x") -> tuple[int, list[bytes], list[bytes], Any]:
    """Commits blocks of random bytes through the bytes transport."""
    namespace = client.register(ModelShape("gpu", BLOCK)).namespace_id
    digests = chain(name, blocks)
    payloads = [secrets.token_bytes(BLOCK) for _ in digests]
    reserved = client.reserve(namespace, digests)
    chunks = [
        blocks_pb2.WriteBlocksRequest(slab_id=slab_id, slot=slot, generation=generation, offset=0, data=payload)
        for slab_id, slot, generation, payload in zip(
            reserved.slab_ids, reserved.slots, reserved.generations, payloads, strict=True
        )
    ]
    client.blocks.WriteBlocks(iter(chunks), metadata=client.metadata, timeout=DEADLINE_S)
    client.commit(namespace, reserved, digests, [block_checksum(payload) for payload in payloads])
    return namespace, digests, payloads, reserved


def read_back(client: RawClient, namespace: int, digests: list[bytes]) -> list[bytes]:
    """Leases a chain and reads it through the bytes transport."""
    lease = client.lookup_and_lease(namespace, digests)
    found: dict[int, bytes] = {}
    request = blocks_pb2.ReadBlocksRequest(lease_id=lease.lease_id)
    for piece in client.blocks.ReadBlocks(request, metadata=client.metadata, timeout=DEADLINE_S):
        found[piece.block] = found.get(piece.block, b"") + piece.data
    return [found[block] for block in sorted(found)]


def opened(
    client: RawClient, other: Callable[..., Child], slab_id: int, *, writable: bool = False
) -> tuple[Child, int]:
    """Another process that has the slab mapped, and its address there."""
    if client.welcome.memory == "cuda-legacy":
        handle = client.call(client.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=slab_id)).handle
        process = other()
        return process, process.ask("open_handle", handle=handle.handle.hex())
    segment, fd = client.descriptors.open_segment(SLAB, slab_id, writable=writable)
    process = other(fd)
    address = process.ask("map_fd", fd=fd, nbytes=segment.bytes, writable=writable)
    os.close(fd)
    return process, address


def transport(kind: str) -> str:
    return "fd" if kind == "vmm" else "cuda-ipc"


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_reads_and_writes_the_same_bytes(launch, child, kind):
    service = launch("--device", "cuda:0", "--slab-kind", kind)
    with RawClient(service.address, transport=transport(kind)) as client:
        assert (client.welcome.device, client.welcome.memory) == ("cuda:0", f"cuda-{kind}")
        assert len(client.welcome.device_uuid) == 16
        namespace, digests, payloads, reserved = publish(client, 5)
        other, base = opened(client, child, reserved.slab_ids[4], writable=True)
        address = base + reserved.slots[4] * BLOCK
        assert bytes.fromhex(other.ask("read", address=address, nbytes=BLOCK)) == payloads[4]
        assert read_back(client, namespace, digests) == payloads
        # And the other way: what it writes there is what the service sends.
        more = client.reserve(namespace, chain("back", 1))
        assert more.slab_ids[0] == reserved.slab_ids[4]
        payload = secrets.token_bytes(BLOCK)
        other.ask("write", address=base + more.slots[0] * BLOCK, data=payload.hex())
        client.commit(namespace, more, chain("back", 1), [block_checksum(payload)])
        assert read_back(client, namespace, chain("back", 1)) == [payload]
        check = blocks_pb2.ReportDamageRequest(namespace_id=namespace, digests=b"".join(digests))
        assert client.call(client.blocks.ReportDamage, check).condemned == 0
        # A new slab is cleared, whoever had the memory before.
        free = client.reserve(namespace, [], anonymous=1)
        place = base + free.slots[0] * BLOCK
        assert bytes.fromhex(other.ask("read", address=place, nbytes=BLOCK)) == bytes(BLOCK)
        other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_can_be_opened_by_another_process(launch, child, kind):
    service = launch("--device", "cuda", "--slab-kind", kind)
    with RawClient(service.address, transport=transport(kind)) as client:
        if kind == "vmm":
            reply, (fd,) = client.descriptors.ask(descriptor_pb2.DescriptorRequest(probe=descriptor_pb2.Probe()))
            nonce = reply.probe.nonce
            other = child(fd)
            address = other.ask("map_fd", fd=fd, nbytes=reply.probe.segment.bytes, writable=False)
            os.close(fd)
        else:
            probe = client.call(client.blocks.ProbeHandle, blocks_pb2.ProbeHandleRequest())
            nonce = probe.nonce
            other = child()
            address = other.ask("open_handle", handle=probe.handle.handle.hex())
        assert bytes.fromhex(other.ask("read", address=address, nbytes=len(nonce))) == nonce


def test_a_write_through_a_read_only_mapping_faults_only_the_writer(launch, child):
    service = launch("--device", "cuda:0")
    with RawClient(service.address) as client:
        namespace, digests, payloads, reserved = publish(client, 2)
        reader, reader_base = opened(client, child, reserved.slab_ids[0])
        writer, writer_base = opened(client, child, reserved.slab_ids[0])
        place = reserved.slots[0] * BLOCK
        assert bytes.fromhex(writer.ask("read", address=writer_base + place, nbytes=BLOCK)) == payloads[0]
        assert writer.ask("fill_by_kernel", address=writer_base + place, nbytes=BLOCK) != ""
        with pytest.raises(RuntimeError):
            writer.ask("read", address=writer_base + place, nbytes=BLOCK)
        assert bytes.fromhex(reader.ask("read", address=reader_base + place, nbytes=BLOCK)) == payloads[0]
        assert read_back(client, namespace, digests) == payloads
        assert len(client.reserve(namespace, chain("after", 3)).slots) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_outlives_a_killed_server(launch, child, kind):
    service = launch("--device", "cuda:0", "--slab-kind", kind)
    client = RawClient(service.address, transport=transport(kind))
    _, _, payloads, reserved = publish(client, 3)
    other, base = opened(client, child, reserved.slab_ids[2])
    service.kill()
    time.sleep(1.0)
    address = base + reserved.slots[2] * BLOCK
    assert bytes.fromhex(other.ask("read", address=address, nbytes=BLOCK)) == payloads[2]
    client.close()


def test_a_killed_worker_gives_back_slots_and_memory(launch, child, gpu):
    service = launch("--device", "cuda:0")
    with RawClient(service.address) as client:
        namespace, digests, payloads, _ = publish(client, 2)
        before = stats(service.address)
        free = free_bytes(gpu)
        worker = child()
        worker.ask("session", address=str(service.address), blocks=40, writable=True)
        held = stats(service.address)
        assert held.slots_private == before.slots_private + 40
        # Its context at least.
        assert free_bytes(gpu) < free - (100 << 20)
        worker.kill()
        wait_until(lambda: stats(service.address).slots_private == before.slots_private)
        # Slabs stay in the service, which may have made some; contexts and mappings are gone.
        after = stats(service.address)
        wait_until(lambda: free_bytes(gpu) >= free - (after.used_bytes - before.used_bytes) - (32 << 20))
        assert read_back(client, namespace, digests) == payloads
    assert service.stop() == 0
    wait_until(lambda: free_bytes(gpu) >= free)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_driver(launch, gpu, kind):
    service = launch("--device", "cuda:0", "--slab-kind", kind, "--budget", "512MiB", "--max-sessions", "8")
    with RawClient(service.address, transport=transport(kind)) as client:
        namespace = client.register(ModelShape("numbers", 4 << 20)).namespace_id
        # The first slab is made after the registration, while nobody waits.
        wait_until(lambda: stats(service.address).slabs_live == 1)
        start, free = stats(service.address), free_bytes(gpu)
        reserved = client.reserve(namespace, [], anonymous=200)
        assert "budget" in reserved.short_reason
        end = stats(service.address)
        assert end.budget_bytes == 512 << 20 >= end.used_bytes
        made = (end.slabs_live - start.slabs_live) * 32 << 20
        assert made > 256 << 20
        assert abs(free - free_bytes(gpu) - made) <= 2 * GRANULE
        assert end.slots_private == len(reserved.slots)
        assert end.slots_free + end.slots_private == end.slabs_live * 8
        assert client.abort(reserved) == len(reserved.slots)
        assert stats(service.address).slots_private == 0


def test_devices_are_found_by_uuid(launch, gpu):
    (info, *_) = gpu.devices()
    service = launch("--device", info.text)
    with RawClient(service.address) as client:
        assert (client.welcome.device, client.welcome.device_uuid) == ("cuda:0", info.uuid)
        publish(client, 1)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--device", "cuda:99"], ["cuda:99", "cuda:0 = GPU-", "CUDA_VISIBLE_DEVICES"]),
        (["--device", "GPU-00000000"], ["GPU-00000000", "cuda:0 = GPU-"]),
        (["--device", "cuda:0", "--budget", "900GiB"], ["--budget 966367641600", "free", "smaller"]),
    ],
)
def test_what_the_device_cannot_do_ends_the_start_in_one_line(tmp_path, options, parts):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", "--address", str(tmp_path / "kv.sock"), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode in (1, 2)
    assert len(errors) == 1
    assert all(part in errors[0] for part in parts), errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["cuda-vmm", "cuda-legacy"])
def test_slabs_of_this_process_and_a_full_device(gpu, kind):
    (info, *_) = gpu.devices()
    driver = CudaDriver()
    device = GpuDevice(driver, info, kind)
    free = free_bytes(gpu)
    memory = device.create_slab(64 << 20)
    assert bytes(memory.read((64 << 20) - 100, 100)) == bytes(100)
    data = secrets.token_bytes(5 << 20)
    memory.write(12345, data)
    assert bytes(memory.read(12345, len(data))) == data
    too_much = -(-free // GRANULE) * GRANULE + (1 << 30)
    with pytest.raises(OutOfMemoryError, match=r"cuda:0.*bytes are free"):
        device.create_slab(too_much)
    assert bytes(memory.read(12345, 100)) == data[:100]
    memory.close()
    wait_until(lambda: free_bytes(gpu) >= free - GRANULE)


IN_PROCESS = """
import json, os, secrets, sys, time
from pathlib import Path
import torch
from kvstore_kernels import direct
from kvstore_kernels.checksum import block_checksum
from kvstore_proto.v1 import blocks_pb2
from kvstore.inprocess import InProcessService
from kvstore.testing_client import SLAB, ModelShape, RawClient, chain

torch.ones(1, device="cuda:0")
torch.cuda.synchronize()
free = torch.cuda.mem_get_info(0)[0]
service = InProcessService.start({"device": "cuda:0", "slab_kind": sys.argv[1], "budget": "64MiB"})
started = free - torch.cuda.mem_get_info(0)[0]
kind = "fd" if sys.argv[1] == "vmm" else "cuda-ipc"
with RawClient(Path(service.address), transport=kind) as client:
    namespace = client.register(ModelShape("in", 65536)).namespace_id
    reserved = client.reserve(namespace, chain("in", 2))
    if kind == "fd":
        segment, fd = client.descriptors.open_segment(SLAB, reserved.slab_ids[0], writable=True)
        os.close(fd)
        named, slot_bytes = segment.allocation_id, segment.slot_bytes
    else:
        handle = client.call(client.blocks.OpenSlab, blocks_pb2.OpenSlabRequest(slab_id=reserved.slab_ids[0])).handle
        named, slot_bytes = handle.allocation_id, handle.slot_bytes
    found = direct.find(named)
    class Memory:
        __cuda_array_interface__ = {
            "shape": (found.nbytes,), "typestr": "|u1", "data": (found.address, False), "version": 3
        }
    slab = torch.as_tensor(Memory(), device="cuda:0")
    at = reserved.slots[1] * slot_bytes
    payload = secrets.token_bytes(65536)
    slab[at : at + 65536] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).cuda()
    zero = reserved.slots[0] * slot_bytes
    zeros = bytes(slab[zero : zero + 65536].cpu().numpy().tobytes()) == bytes(65536)
    torch.cuda.synchronize()
    client.commit(namespace, reserved, chain("in", 2), [block_checksum(bytes(65536)), block_checksum(payload)])
    lease = client.lookup_and_lease(namespace, chain("in", 2))
    # Two seconds of work on the worker's stream: the service's copies do not wait for it.
    torch.cuda._sleep(int(3e9))
    began = time.monotonic()
    request = blocks_pb2.ReadBlocksRequest(lease_id=lease.lease_id, first_block=1, blocks=1)
    data = b"".join(p.data for p in client.blocks.ReadBlocks(request, metadata=client.metadata, timeout=10))
    waited = time.monotonic() - began
    torch.cuda.synchronize()
    spun = time.monotonic() - began
before = torch.cuda.mem_get_info(0)[0]
service.close()
kept = bytes(slab[at : at + 65536].cpu().numpy().tobytes()) == payload
del slab, found
again = InProcessService.start({"device": "cuda:0", "slab_kind": sys.argv[1], "budget": "64MiB"})
again.close()
after = torch.cuda.mem_get_info(0)[0]
print(json.dumps(dict(started=started, same=data == payload, zeros=zeros, waited=waited, spun=spun, kept=kept,
                      returned=after - before, left=free - after)))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_in_process_it_shares_the_context_and_the_memory(kind):
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, kind], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)[-1])
    # A second context would take 500 MiB.
    assert seen["started"] < 64 << 20, seen
    assert seen["same"], seen
    assert seen["zeros"], seen
    assert seen["kept"], seen
    assert seen["spun"] > 0.5, seen
    assert seen["waited"] < 0.5 * seen["spun"], seen
    assert seen["left"] < 64 << 20, seen
