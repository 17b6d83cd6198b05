"""The client against a real service that holds its blocks on a GPU, each a process of its own."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from kvstore_client import Store
from kvstore_client.blocks import Origin
from kvstore_client.device_work import sent_so_far
from kvstore_client.testing import (
    LAYOUT,
    chain_of,
    content,
    digest,
    fill,
    identity,
    payload,
    plan,
    wait_for,
    write_chain,
)
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

from kvstore.launch import ServiceProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
Open = Callable[..., Store]
DEVICE = "cuda:0"

# What another worker process runs: address, transport ("-": any), device, command.
WORKER = """
import sys, time
import torch
from kvstore_client import connect
from kvstore_client.testing import PATIENT, chain_of, content, digest, fill, identity, payload, plan, write_chain

address, transport, device, command = sys.argv[1:]
store = connect(address, name="other", require_transport=None if transport == "-" else transport, config=PATIENT,
                required=command != "write")
namespace = store.namespace_for(identity(), plan, device=device)
digests = chain_of("doc", 5)
request = store.open_request(namespace)
if command == "read":
    match = request.match([b"".join(digests)])[0]
    same = [content(b) for b in match.blocks] == [payload(d) for d in digests]
    where = sorted({(str(b.slab.device), b.slab.pinned) for b in match.blocks})
    print(store.stats()["transport"], len(match.blocks), same, where, match.reason, flush=True)
elif command == "write":
    for round_ in range(10_000):
        with store.open_request(namespace) as request:
            digests = chain_of(("kill", address, round_), 7)
            request.reserve([b"".join(digests)], 2)
            write_chain(request, digests)
            if round_ == 0:
                print("writing", flush=True)
elif command == "trespass":
    block = request.match([b"".join(digests)])[0].blocks[0]
    print("mapped", block.slab.writable, flush=True)
    try:
        block.slab.slot_tensor(block.slot).fill_(7)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("fault", "illegal" in str(error) or "access" in str(error), flush=True)
    else:
        print("written", flush=True)
    sys.stdout.flush()
    import os
    os._exit(0)
request.close()
store.close()
"""


class Service:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log = (folder / "log").open("ab")
        self.process = ServiceProcess.start(
            folder / "kv.sock", options=("--listen", "127.0.0.1:0", *options), stderr=self.log, deadline_s=60
        )
        self.address = str(self.process.address)
        listen = self.process.listen
        self.tcp = listen.removeprefix("tcp://").removeprefix("http://")
        self._channel = grpc.insecure_channel(f"unix:{self.address}.admin", options=[("grpc.enable_http_proxy", 0)])
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def stats(self) -> admin_pb2.GetStatsResponse:
        return self.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=10)

    def private(self) -> int:
        return sum(d.slots_private for d in self.stats().devices)

    def problems(self) -> list[str]:
        return list(self.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(payloads=True), timeout=30).problems)

    def close(self) -> None:
        self._channel.close()
        self.process.stop()
        self.log.close()
        # Shown when a test failed.
        sys.stdout.write((self.folder / "log").read_text()[-4000:])
        shutil.rmtree(self.folder)


def start(*options: str) -> Service:
    return Service(Path(tempfile.mkdtemp(prefix="kv-")), *options)


@pytest.fixture(scope="module")
def vmm() -> Iterator[Service]:
    running = start("--device", DEVICE, "--slab-kind", "vmm", "--budget", "512MiB")
    yield running
    running.close()


@pytest.fixture(scope="module")
def legacy() -> Iterator[Service]:
    running = start("--device", DEVICE, "--slab-kind", "legacy", "--budget", "512MiB")
    yield running
    running.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Service]:
    running = start("--device", "cpu", "--budget", "256MiB")
    yield running
    running.close()


def worker(address: str, transport: str, device: str, command: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, address, transport, device, command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def said(address: str, transport: str, device: str, command: str, **environment: str) -> str:
    with worker(address, transport, device, command, **environment) as other:
        try:
            out, _ = other.communicate(timeout=90)
        finally:
            other.kill()
    return out.strip()


def address_of(request: pytest.FixtureRequest, kind: str) -> tuple[Service, str]:
    name, _, way = kind.partition("-")
    service: Service = request.getfixturevalue(name)
    return service, service.tcp if way == "tcp" else service.address


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("vmm", "fd"), ("legacy", "cuda-ipc"), ("legacy-tcp", "cuda-ipc"), ("vmm-tcp", "bytes"), ("vmm", "bytes")],
)
def test_another_process_reads_the_same_bytes(
    request: pytest.FixtureRequest, opened: Open, kind: str, transport: str
) -> None:
    service, address = address_of(request, kind)
    store = opened(address, require_transport=transport)
    stats = store.stats()
    assert stats["transport"] == transport
    assert stats["device"].startswith("cuda")
    ns = store.namespace_for(identity(), plan, device=DEVICE)
    assert ns.shares, ns.reason
    digests = chain_of("doc", 5)
    with store.open_request(ns) as own:
        own.reserve([b"".join(digests)], 1)
        blocks = write_chain(own, digests)
        assert {str(b.slab.device) for b in blocks} == {DEVICE}
        assert {b.origin for b in blocks} <= {Origin.LOCAL if transport == "bytes" else Origin.PRIVATE, Origin.LOCAL}
        assert store.flush(30)
        report = own.report()
        assert report.blocks_committed + report.commits_lost == 5, report
    found = said(address, transport, DEVICE, "read")
    assert found == f"{transport} 5 True [('{DEVICE}', False)]", found
    assert service.problems() == []


def test_workers_without_a_gpu_read_by_bytes(vmm: Service) -> None:
    found = said(vmm.address, "-", "cpu", "read", CUDA_VISIBLE_DEVICES="")
    assert found == "bytes 5 True [('cpu', False)]", found
    # One that sees the GPU but computes on the CPU.
    found = said(vmm.address, "-", "cpu", "read")
    assert found == "fd 5 True [('cpu', False)]", found


@pytest.fixture(autouse=True)
def _data(request: pytest.FixtureRequest, opened: Open) -> None:
    """Every service that a test uses holds the chain "doc"."""
    kind = getattr(request.node, "callspec", None)
    used = {*request.fixturenames, *([] if kind is None else [kind.params.get("kind", "")])}
    for name in ("vmm", "legacy", "host"):
        if name in used:
            store = opened(request.getfixturevalue(name).address)
            ns = store.namespace_for(identity(), plan, device=DEVICE)
            digests = chain_of("doc", 5)
            with store.open_request(ns) as own:
                own.reserve([b"".join(digests)])
                write_chain(own, digests)
                assert store.flush(30)


def test_a_write_through_a_read_only_mapping_faults_only_the_writer(vmm: Service, opened: Open) -> None:
    store = opened(vmm.address, require_transport="fd")
    ns = store.namespace_for(identity(), plan, device=DEVICE)
    found = said(vmm.address, "fd", DEVICE, "trespass")
    assert found == "mapped False\nfault True", found
    digests = chain_of("doc", 5)
    with store.open_request(ns) as own:
        assert [content(b) for b in own.match([b"".join(digests)])[0].blocks] == [payload(d) for d in digests]
    assert vmm.problems() == []


def test_a_killed_writer_gives_everything_back(vmm: Service) -> None:
    before = vmm.private()
    with worker(vmm.address, "fd", DEVICE, "write") as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "writing"
        time.sleep(0.3)
        other.send_signal(signal.SIGKILL)
        other.wait(20)
    assert wait_for(lambda: vmm.private() <= before, 20), vmm.stats()
    assert vmm.problems() == []
    assert said(vmm.address, "fd", DEVICE, "read").startswith("fd 5 True")


@pytest.mark.parametrize("kind", ["vmm", "legacy"])
def test_downgrade_and_upgrade_in_place(request: pytest.FixtureRequest, opened: Open, kind: str) -> None:
    service, address = address_of(request, kind)
    store = opened(address, require_transport="fd" if kind == "vmm" else "cuda-ipc")
    ns = store.namespace_for(identity(f"downgrade-{kind}"), plan, device=DEVICE)
    with store.open_request(ns) as own:
        own.reserve([], 1)
        block = own.take()
        assert block.origin is Origin.PRIVATE
        fill(block, payload("before"))
        where = block.address
        link = store._core.connection.link
        assert link is not None
        assert link.slabs is not None
        assert link.slabs.downgrade([block.slab_id]) == [block.slab_id]
        assert not block.slab.writable
        assert content(block) == payload("before"), "still readable"
        slab = link.slabs.open(block.slab_id, LAYOUT.block_bytes, writable=True, compute_device=DEVICE)
        assert slab is block.slab
        assert block.address == where
        fill(block, payload("after"))
        assert content(block) == payload("after")
    assert service.problems() == []


@pytest.mark.parametrize("kind", ["vmm", "legacy"])
def test_mappings_end_when_nothing_refers_to_them(request: pytest.FixtureRequest, opened: Open, kind: str) -> None:
    _, address = address_of(request, kind)
    store = opened(address)
    ns = store.namespace_for(identity(), plan, device=DEVICE)
    with store.open_request(ns) as own:
        blocks = own.match([b"".join(chain_of("doc", 5))])[0].blocks
        view = blocks[0].slab.data[:100]
        ids = {b.slab_id for b in blocks}
        link = store._core.connection.link
        assert link is not None
        slabs = link.slabs
        assert slabs is not None
        slabs.retire(sorted(ids))
        del blocks
        gc.collect()
        assert slabs.alive == len(ids), "a view is left"
        assert view.sum().item() >= 0
        del view
        gc.collect()
        assert wait_for(lambda: slabs.alive == 0, 10)


def test_commit_waits_for_the_kernels_that_write(vmm: Service, opened: Open) -> None:
    writer, reader = opened(vmm.address), opened(vmm.address)
    ns = writer.namespace_for(identity(), plan, device=DEVICE)
    theirs = reader.namespace_for(identity(), plan, device=DEVICE)
    name = digest("spin", os.getpid())
    data = torch.frombuffer(bytearray(payload("spin")), dtype=torch.uint8).to(DEVICE)
    torch.cuda.synchronize()
    early = 0
    with writer.open_request(ns) as own:
        own.reserve([name])
        block = own.take(name)
        began = time.monotonic()
        torch.cuda._sleep(int(2 * 1.7e9))
        block.slab.slot_tensor(block.slot)[: LAYOUT.block_bytes].copy_(data)
        event = sent_so_far(torch.cuda.current_stream())
        own.commit([(block, name, bytes(32))], after=event)
        assert time.monotonic() - began < 0.5, "commit() does not wait"
        while time.monotonic() - began < 30:
            done = event.query()
            with reader.open_request(theirs) as asking:
                blocks = asking.match([name])[0].blocks
                if blocks:
                    assert event.query()
                    assert content(blocks[0]) == payload("spin")
                    break
                early += not done
        else:
            pytest.fail("the block never became visible")
    assert time.monotonic() - began > 1.0
    assert early > 3, "it was asked for while the kernel ran"


def test_placement_on_the_host(host: Service, opened: Open) -> None:
    store = opened(host.address)
    ns = store.namespace_for(identity("placed"), plan, device=DEVICE)
    assert (store.stats()["transport"], store.stats()["memory"]) == ("fd", "memfd")
    digests = chain_of("placed", 6)
    with store.open_request(ns) as own:
        own.reserve([b"".join(digests)], 2)
        blocks = write_chain(own, digests)
        assert {(b.origin, str(b.slab.device)) for b in blocks} == {(Origin.LOCAL, DEVICE)}
        assert store.flush(30)
        report = own.report()
        assert report.blocks_committed == 6, report
        assert report.bytes_sent == 6 * LAYOUT.block_bytes
    with store.open_request(ns) as own:
        blocks = own.match([b"".join(digests)])[0].blocks
        assert [content(b) for b in blocks] == [payload(d) for d in digests]
        assert {(b.origin, str(b.slab.device), b.slab.pinned) for b in blocks} == {(Origin.LEASED, "cpu", True)}
        onto = torch.empty(LAYOUT.block_bytes, dtype=torch.uint8, device=DEVICE)
        onto.copy_(blocks[0].slab.slot_tensor(blocks[0].slot)[: LAYOUT.block_bytes], non_blocking=True)
        torch.cuda.synchronize()
        assert onto.cpu().numpy().tobytes() == payload(digests[0])
    # A reader in another process: read-only, pinned with the flag for it.
    assert said(host.address, "fd", DEVICE, "read") == "fd 5 True [('cpu', True)]"
    assert said(host.address, "fd", "cpu", "read") == "fd 5 True [('cpu', False)]"
    assert host.problems() == []


def test_embedded_in_this_process(opened: Open) -> None:
    before = torch.cuda.mem_get_info(0)[0]
    store = opened("embedded", device=DEVICE, budget=128 * 2**20, require_transport="fd")
    ns = store.namespace_for(identity(), plan, device=DEVICE)
    digests = chain_of("doc", 5)
    with store.open_request(ns) as own:
        own.reserve([b"".join(digests)], 1)
        blocks = write_chain(own, digests)
        assert {b.origin for b in blocks} == {Origin.PRIVATE}
        assert store.flush(30)
        assert own.report().blocks_committed == 5
    del blocks
    with store.open_request(ns) as own:
        blocks = own.match([b"".join(digests)])[0].blocks
        assert [content(b) for b in blocks] == [payload(d) for d in digests]
    assert before - torch.cuda.mem_get_info(0)[0] < 300 * 2**20, "no second context"
    # Memory that is still looked through outlives the service.
    kept = blocks[0]
    store.close()
    assert content(kept) == payload(digests[0])
    del blocks, kept
    gc.collect()


def test_doctor_names_what_works(vmm: Service, legacy: Service) -> None:
    expected = {
        vmm.address: ("fd", {"fd", "bytes"}),
        legacy.tcp: ("cuda-ipc", {"cuda-ipc", "bytes"}),
    }
    path = os.pathsep.join(p for p in sys.path if p)
    for address, (chosen, working) in expected.items():
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", "doctor", "--address", address, "--json"],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found["chosen"] == chosen, found
        assert {c["transport"] for c in found["candidates"] if c["works"]} == working, found
        assert found["device_here"] == DEVICE
