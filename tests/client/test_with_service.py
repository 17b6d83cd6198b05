"""The client against the real service, each a process of its own."""

import contextlib
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from kvstore_client import ClosedError, ForkedProcessError, Store, TransportUnavailableError
from kvstore_client.blocks import Origin
from kvstore_client.request import Request
from kvstore_client.testing import FAST, chain_of, content, digest, fill, identity, payload, plan, wait_for, write_chain
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

from kvstore.launch import ServiceProcess

Open = Callable[..., Store]

# What a second worker process runs: a command line of words; prints one word a step.
WORKER = """
import sys, time
from kvstore_client import connect
from kvstore_client.testing import PATIENT, chain_of, content, fill, identity, payload, plan, write_chain

address, transport, command = sys.argv[1:]
store = connect(address, name="other", require_transport=transport, config=PATIENT, required=command != "write")
namespace = store.namespace_for(identity(), plan)
request = store.open_request(namespace)
digests = chain_of("doc", 5)
if command == "read":
    match = request.match([b"".join(digests)])[0]
    print(len(match.blocks), [content(b) for b in match.blocks] == [payload(d) for d in digests], match.writers)
elif command == "write":
    # Until it is killed, at whatever point that is.
    for round_ in range(10_000):
        with store.open_request(namespace) as request:
            digests = chain_of(("kill", sys.argv[1], round_), 7)
            request.match([b"".join(digests)])
            request.reserve([b"".join(digests)], 2)
            write_chain(request, digests)
            if round_ == 0:
                print("writing", flush=True)
elif command == "hold":
    match = request.match([b"".join(digests)])[0]
    request.reserve([b"".join(chain_of("half", 3))], 2)
    fill(request.take(), b"half a block")
    print(len(match.blocks), flush=True)
    time.sleep(60)
request.close()
store.close()
"""


class Service:
    """A running service and its administrator."""

    def __init__(self, process: ServiceProcess) -> None:
        self.process = process
        self.address = str(process.address)
        self._channel = grpc.insecure_channel(f"unix:{self.address}.admin", options=[("grpc.enable_http_proxy", 0)])
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def stats(self) -> admin_pb2.GetStatsResponse:
        return self.admin.GetStats(admin_pb2.GetStatsRequest(), timeout=5)

    def private(self) -> int:
        return sum(d.slots_private for d in self.stats().devices)

    def problems(self) -> list[str]:
        return list(self.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(payloads=True), timeout=10).problems)

    def children(self) -> list[int]:
        """The server process, which the supervisor started."""
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        self._channel.close()


def start(folder: Path, *options: str) -> Service:
    with (folder / "log").open("ab") as log:
        return Service(ServiceProcess.start(folder / "kv.sock", options=("--budget", "32MiB", *options), stderr=log))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service that tests share: each uses a model of its own or leaves nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    running = start(folder, "--listen", "127.0.0.1:0")
    yield running
    running.close()
    running.process.stop()
    shutil.rmtree(folder)


@pytest.fixture
def own_service(short_folder: Path) -> Iterator[Service]:
    running = start(short_folder)
    yield running
    running.close()
    for child in running.children() if running.process.poll() is None else []:
        os.kill(child, signal.SIGCONT)
    running.process.stop()
    # Shown when the test failed.
    sys.stdout.write((short_folder / "log").read_text())


def worker(address: str, transport: str, command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, address, transport, command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("transport", ["fd", "bytes"])
def test_another_process_reads_the_same_bytes(service: Service, opened: Open, transport: str) -> None:
    store = opened(service.address, name="writer", require_transport=transport)
    ns = store.namespace_for(identity(), plan)
    assert ns.shares
    digests = chain_of("doc", 5)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)], 1)
        blocks = write_chain(request, digests)
        assert {b.origin for b in blocks} == {Origin.PRIVATE if transport == "fd" else Origin.LOCAL}
        assert store.flush()
        report = request.report()
        assert report.blocks_committed + report.commits_lost == 5
        assert report.short_reasons == []
    other = worker(service.address, transport, "read")
    output, _ = other.communicate(timeout=60)
    assert output.split(" ", 2)[:2] == ["5", "True"]
    assert "writer" in output
    assert store.flush()
    assert service.private() == 0
    assert service.stats().leases == 0
    assert service.problems() == []


@pytest.mark.parametrize(("transport", "calls"), [("fd", 1), ("bytes", 2)])
def test_slots_come_with_the_look_up(service: Service, opened: Open, transport: str, calls: int) -> None:
    store = opened(service.address, require_transport=transport)
    ns = store.namespace_for(identity(), plan)
    held, one, two = (chain_of((transport, name), 2) for name in ("held", "one", "two"))
    with store.open_request(ns) as request:
        request.reserve([b"".join(held)])
        write_chain(request, held)
        assert store.flush()
    with store.open_request(ns) as request:
        rows = [b"".join([*held, *one]), b"".join([*held, *two, one[0]])]
        assert [len(m.blocks) for m in request.match(rows, anonymous=2)] == [2, 2]
        # What the hook asks for: each digest once, repetitions and what comes next without one.
        assert request.reserve([b"".join(one), b"".join(two)], 3) == ["write"] * 4
        assert request.report().rpcs == calls
        if transport == "fd":
            taken = [request.take(d) for d in (*one, *two)] + [request.take() for _ in range(3)]
            assert {block.origin for block in taken} == {Origin.PRIVATE}
            assert len(set(taken)) == 7
            assert request.take().origin is Origin.LOCAL, "nothing was reserved twice"
    assert store.flush()
    assert (service.private(), service.stats().leases, service.problems()) == (0, 0, [])


def test_what_did_not_come_with_the_look_up_is_asked_for(service: Service, opened: Open) -> None:
    store = opened(service.address, require_transport="fd")
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("asked", 3)
    with store.open_request(ns) as request:
        assert request.match([b"".join(digests[:2])], anonymous=1)[0].reason == "not-found"
        assert request.reserve([b"".join(digests)], 3) == ["write"] * 3
        assert request.report().rpcs == 2
        taken = [request.take(d) for d in digests] + [request.take() for _ in range(3)]
        assert {block.origin for block in taken} == {Origin.PRIVATE}
        assert request.take().origin is Origin.LOCAL
        # It counts for the next reservation alone.
        assert request.reserve([], 1) == []
        assert request.take().origin is Origin.PRIVATE
    assert store.flush()
    assert (service.private(), service.stats().leases) == (0, 0)


def test_slots_that_come_when_the_request_is_closed_go_back(service: Service, opened: Open) -> None:
    store = opened(service.address, require_transport="fd")
    ns = store.namespace_for(identity(), plan)
    for round_ in range(30):
        request = store.open_request(ns)
        closing = threading.Timer(random.random() * 2e-3, request.close)
        closing.start()
        with contextlib.suppress(ClosedError):
            request.match([b"".join(chain_of(("late", round_), 20))], anonymous=5)
        closing.join()
    assert store.flush()
    assert (service.private(), service.stats().leases, service.problems()) == (0, 0, [])


def test_two_workers_that_commit_the_same_chain_store_it_once(service: Service, opened: Open) -> None:
    # b147
    one, two = opened(service.address, name="one"), opened(service.address, name="two")
    digests = chain_of("same", 6)
    before = service.stats().commits
    requests = [s.open_request(s.namespace_for(identity(), plan)) for s in (one, two)]
    statuses = [r.reserve([b"".join(digests)]) for r in requests]
    assert statuses == [["write"] * 6, ["in_flight"] * 6]
    # b128: nobody sees what is being written.
    match = requests[1].match([b"".join(digests)])[0]
    assert (match.blocks, match.reason) == ([], "in-flight")
    for request in requests:
        write_chain(request, digests)
    assert one.flush()
    assert two.flush()
    assert service.stats().commits - before == 6
    assert requests[0].report().blocks_committed + requests[1].report().blocks_committed == 6
    assert requests[0].report().commits_lost + requests[1].report().commits_lost == 6
    assert [content(b) for b in requests[1].match([b"".join(digests)])[0].blocks] == [payload(d) for d in digests]
    for request in requests:
        request.close()
    assert one.flush()
    assert two.flush()
    assert service.private() == 0
    assert service.problems() == []


def test_waiting_for_a_writer(service: Service, opened: Open) -> None:
    one, two = opened(service.address, name="w1"), opened(service.address, name="w2")
    ns = one.namespace_for(identity(), plan)
    ns2 = two.namespace_for(identity(), plan)
    digests = chain_of("wait", 2)
    with one.open_request(ns) as writer, two.open_request(ns2) as reader:
        writer.reserve([b"".join(digests)])
        started = time.monotonic()
        assert reader.match([b"".join(digests)], wait_ms=200)[0].reason == "in-flight"
        assert 0.15 < time.monotonic() - started < 1.5
        write_chain(writer, digests)
        assert one.flush()
        match = reader.match([b"".join(digests)], wait_ms=5000)[0]
        assert [content(b) for b in match.blocks] == [payload(d) for d in digests]


def test_flipped_byte_in_the_slab_is_a_miss_and_condemned(
    own_service: Service, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    # b140
    writer, reader = opened(own_service.address, name="w"), opened(own_service.address, name="r")
    digests = chain_of("flip", 4)
    with writer.open_request(writer.namespace_for(identity(), plan)) as request:
        request.reserve([b"".join(digests)])
        blocks = write_chain(request, digests)
        assert writer.flush()
        blocks[2].slab.slot_buffer(blocks[2].slot)[1234] ^= 1
        ns = reader.namespace_for(identity(), plan)
        with caplog.at_level(logging.WARNING, "kvstore_client"), reader.open_request(ns) as other:
            match = other.match([b"".join(digests)])[0]
            assert [content(b) for b in match.blocks] == [payload(d) for d in digests[:2]]
            assert match.reason == "damaged"
            again = other.match([b"".join(digests)])[0]
            assert (len(again.blocks), again.reason) == (2, "damaged")
        assert len([r for r in caplog.records if "checksum" in r.getMessage()]) == 1
    assert own_service.stats().damaged >= 1
    assert reader.flush()
    assert writer.flush()
    assert own_service.problems() == []


def test_readers_cannot_write(service: Service, opened: Open) -> None:
    writer, reader = opened(service.address), opened(service.address)
    digests = chain_of("ro", 2)
    with writer.open_request(writer.namespace_for(identity(), plan)) as request:
        request.reserve([b"".join(digests)])
        write_chain(request, digests)
        assert writer.flush()
    with reader.open_request(reader.namespace_for(identity(), plan)) as request:
        block = request.match([b"".join(digests)])[0].blocks[0]
        assert not block.slab.writable
        assert not block.writable
        assert block.slab.slot_buffer(block.slot).readonly
        start, end = block.slab.base_address, block.slab.base_address + block.slab.slots * block.slab.slot_bytes
        rights = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if _covers(line, start)]
        assert rights == ["r--s"]
        assert end > start
        # A worker that reserves in the same slab gets it writable at the same address, if it may write it at all.


def _covers(line: str, address: int) -> bool:
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    return first <= address < last


def test_killed_writer_leaves_nothing(own_service: Service, opened: Open) -> None:
    # b059, b115
    store = opened(own_service.address, name="writer")
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("doc", 5)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)])
        write_chain(request, digests)
        assert store.flush()
    assert store.flush()
    other = worker(own_service.address, "fd", "hold")
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "5"
    assert own_service.private() == 5
    assert own_service.stats().leases == 1
    other.kill()
    other.communicate()
    assert wait_for(lambda: own_service.private() == 0 and own_service.stats().leases == 0, 1.0)
    assert own_service.problems() == []
    with store.open_request(ns) as request:
        assert len(request.match([b"".join(digests)])[0].blocks) == 5


@pytest.mark.slow
def test_workers_killed_at_random_points_leave_the_service_sound(own_service: Service) -> None:
    # b115
    generator = random.Random(115)
    for _ in range(4):
        others = [worker(own_service.address, transport, "write") for transport in ("fd", "bytes")]
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline().strip() == "writing"
        for other in others:
            time.sleep(generator.random() * 0.05)
            other.kill()
            other.communicate()
        assert wait_for(lambda: own_service.private() == 0 and own_service.stats().leases == 0, 2.0)
        assert own_service.problems() == []


def test_stopped_server(own_service: Service, opened: Open) -> None:
    # b113
    store = opened(own_service.address, config=FAST)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("stop", 3)
    request = store.open_request(ns)
    request.reserve([b"".join(digests)], 4)
    blocks = write_chain(request, digests)
    assert store.flush()
    (server,) = own_service.children()
    os.kill(server, signal.SIGSTOP)
    try:
        worst = 0.0
        for i in range(12):
            started = time.monotonic()
            block = request.take()
            request.ensure_ahead(2)
            request.commit([(block, digest("stopped", i), digests[-1])])
            worst = max(worst, time.monotonic() - started)
        assert worst < 0.05
        started = time.monotonic()
        assert request.match([b"".join(digests)])[0].reason == "service-silent"
        assert time.monotonic() - started < 0.4 + 0.4
        assert store.stats()["breaker_open"]
        started = time.monotonic()
        request.match([b"".join(digests)])
        assert time.monotonic() - started < 0.05
        assert [content(b) for b in blocks] == [payload(d) for d in digests]
    finally:
        os.kill(server, signal.SIGCONT)
    assert wait_for(lambda: not store.stats()["breaker_open"])
    assert len(request.match([b"".join(digests)])[0].blocks) == 3
    request.close()
    assert store.flush()
    assert wait_for(lambda: own_service.private() == 0)
    assert wait_for(lambda: own_service.stats().leases == 0), "answers that came too late leave no lease"
    assert own_service.problems() == []


def test_what_was_reserved_ahead_goes_back_while_the_rest_is_kept(own_service: Service, opened: Open) -> None:
    store = opened(own_service.address, config=FAST)
    ns = store.namespace_for(identity(), plan)
    with store.open_request(ns) as request:
        request.reserve([], 3)
        kept = request.take()
        fill(kept, payload("kept"))
        request.release_ahead()
        assert store.flush()
        assert own_service.private() == 1
        # One that is under way comes too late.
        request.ensure_ahead(4)
        request.release_ahead()
        assert store.flush()
        assert wait_for(lambda: own_service.private() == 1)
        request.ensure_ahead(2)
        assert store.flush()
        assert own_service.private() == 3
        assert content(kept) == payload("kept")
    assert store.flush()
    assert wait_for(lambda: own_service.private() == 0)
    assert own_service.problems() == []


def test_a_store_closed_before_its_cache_says_goodbye_when_that_goes(own_service: Service, opened: Open) -> None:
    store = opened(own_service.address)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("late", 3)
    request = store.open_request(ns)
    request.reserve([b"".join(digests)], 2)
    blocks = write_chain(request, digests)
    assert store.flush()
    assert request.match([b"".join(digests)])[0].blocks
    store.close(1.0)
    assert content(blocks[0]) == payload(digests[0]), "what is still read stays mapped"
    assert own_service.stats().sessions == 1
    del request
    assert wait_for(lambda: own_service.private() == 0 and own_service.stats().leases == 0)
    assert own_service.stats().sessions == 1, "a block is still read"
    del blocks
    assert wait_for(lambda: own_service.stats().sessions == 0)
    assert wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("kvstore-")])
    assert own_service.problems() == []


def test_a_lingering_session_does_not_outlive_the_service_or_hold_the_exit(own_service: Service) -> None:
    script = """
import sys
from kvstore_client import connect
from kvstore_client.testing import PATIENT, chain_of, identity, plan
store = connect(sys.argv[1], config=PATIENT)
request = store.open_request(store.namespace_for(identity(), plan))
request.reserve([b"".join(chain_of("exit", 2))], 2)
block = request.take()
store.close(1.0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", script, own_service.address]
    started = time.monotonic()
    subprocess.run(command, env=environment, timeout=30, check=True)
    assert time.monotonic() - started < 20
    assert wait_for(lambda: own_service.stats().sessions == 0)


def test_session_goes_on_after_a_broken_stream(own_service: Service, opened: Open) -> None:
    store = opened(own_service.address)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("resume", 4)
    request = store.open_request(ns)
    request.reserve([b"".join(digests)], 1)
    write_chain(request, digests[:2])
    assert store.flush()
    held = request.match([b"".join(digests)])[0]
    boot = store.stats()["boot_id"]
    link = store._core.connection.link
    assert link is not None
    link.stream.cancel()
    assert wait_for(lambda: link.lost.is_set() and store.attached and ns.shares)
    assert store.stats()["boot_id"] == boot
    assert own_service.stats().sessions == 1
    assert own_service.stats().leases == 1
    # Slots of before are still this session's, and so is the lease.
    write_chain(request, digests, first=2)
    assert store.flush()
    assert request.report().blocks_committed == 4
    assert request.report().local_blocks == 0
    assert [content(b) for b in held.blocks] == [payload(d) for d in digests[:2]]
    again = request.match([b"".join(digests)])[0]
    assert again.blocks[0].slab is held.blocks[0].slab, "one mapping a slab and boot"
    request.close()
    assert store.flush()
    assert (own_service.private(), own_service.stats().leases) == (0, 0)
    assert own_service.problems() == []


def test_killed_service_and_a_new_one(short_folder: Path, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    # b108
    caplog.set_level(logging.WARNING, "kvstore_client")
    first = start(short_folder)
    store = opened(first.address)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("reborn", 3)
    request = store.open_request(ns)
    request.reserve([b"".join(digests)], 2)
    write_chain(request, digests[:2])
    assert store.flush()
    private = request.take()
    first.close()
    first.process.kill()
    assert wait_for(lambda: not store.attached)
    # What the request holds stays readable and writable; what it takes now is local.
    assert content(request.take(digests[2])) is not None
    private.slab.slot_buffer(private.slot)[:4] = b"mine"
    assert request.match([b"".join(digests)])[0].reason == "service-away"
    local = [request.take() for _ in range(4)]
    assert {b.origin for b in local[2:]} == {Origin.LOCAL}
    second = start(short_folder)
    try:
        assert store.wait_attached(5)
        assert wait_for(lambda: ns.shares)
        assert request.match([b"".join(digests)])[0].reason == "not-found"
        # Blocks of the old service and of this process go to the new one all the same.
        write_chain(request, digests)
        assert store.flush()
        assert [content(b) for b in request.match([b"".join(digests)])[0].blocks] == [payload(d) for d in digests]
        assert private.slab.slot_buffer(private.slot)[:4] == b"mine"
        request.close()
        assert store.flush()
        assert second.private() == 0
        assert second.problems() == []
    finally:
        second.close()
        second.process.stop()
    lines = [r.getMessage() for r in caplog.records]
    assert len([line for line in lines if "lost the service" in line]) == 1, lines


def test_service_that_appears_later(short_folder: Path, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    # b120
    caplog.set_level(logging.WARNING, "kvstore_client")
    store = opened(str(short_folder / "kv.sock"))
    ns = store.namespace_for(identity(), plan)
    request = store.open_request(ns)
    digests = chain_of("later", 2)
    assert request.match([b"".join(digests)])[0].reason == "service-away"
    request.reserve([b"".join(digests)])
    blocks = [request.take(d) for d in digests]
    assert {b.origin for b in blocks} == {Origin.LOCAL}
    assert len(caplog.records) == 1
    running = start(short_folder)
    try:
        assert store.wait_attached(5)
        assert wait_for(lambda: ns.shares)
        write_chain(request, digests)
        assert store.flush()
        assert len(request.match([b"".join(digests)])[0].blocks) == 2
        request.close()
    finally:
        store.close()
        running.close()
        running.process.stop()


def test_full_service(own_service: Service, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvstore_client")
    store = opened(own_service.address)
    ns = store.namespace_for(identity(), plan)
    slots = 32 * 2**20 // ns.layout.block_bytes
    with store.open_request(ns) as request:
        request.reserve([], slots + 10)
        origins = [request.take().origin for _ in range(slots + 10)]
        assert origins.count(Origin.PRIVATE) > 0
        assert origins.count(Origin.LOCAL) >= 10
        report = request.report()
        assert report.local_blocks == origins.count(Origin.LOCAL)
        assert report.short_reasons
    assert len(caplog.records) == 1, [r.getMessage() for r in caplog.records]
    assert store.flush()
    assert own_service.private() == 0
    assert store.stats()["local_blocks"] == 0


def test_slabs_go_when_the_service_wants_them(own_service: Service, opened: Open) -> None:
    store = opened(own_service.address)
    big = store.namespace_for(identity("one"), plan)
    slots = 32 * 2**20 // big.layout.block_bytes
    for part in range(8):
        digests = chain_of(("fill", part), slots // 8)
        with store.open_request(big) as request:
            request.reserve([b"".join(digests)])
            write_chain(request, digests)
            assert store.flush()
    assert store.flush()
    assert store.stats()["mapped_slabs"] >= 14
    del request
    gc.collect()
    # Another model needs its half: slabs of the first are drained, which takes this process's acknowledgements.
    other = store.namespace_for(identity("two"), plan)
    with store.open_request(other) as request:
        assert wait_for(lambda: _reserves(store, request, slots) >= slots // 3, 15)
    assert wait_for(lambda: all(d.slabs_draining == 0 for d in own_service.stats().devices))
    assert store.flush()
    assert own_service.problems() == []


def _reserves(store: Store, request: Request, slots: int) -> int:
    """Private slots that the request has, after it asked for what it lacks of a half."""
    request.ensure_ahead(slots // 2)
    store.flush()
    return len(request._ready)


def test_forked_child_may_not_use_the_store(service: Service, opened: Open) -> None:
    # b139
    store = opened(service.address)
    ns = store.namespace_for(identity(), plan)
    with store.open_request(ns) as request:
        request.reserve([digest("fork")], 1)
        block = write_chain(request, [digest("fork")])[0]
        assert store.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                calls = [lambda: request.take(), lambda: store.open_request(ns), lambda: store.flush()]
                refused = sum(_refuses(call) for call in calls)
                request.close()
                store.close()
                code = 0 if refused == len(calls) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert content(block) == payload(digest("fork"))
        assert len(request.match([digest("fork")])[0].blocks) == 1


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedProcessError:
        return True
    return False


def test_many_lookups_leave_no_pins(service: Service, opened: Open) -> None:
    # b060
    store = opened(service.address)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("pins", 2)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)])
        write_chain(request, digests)
        assert store.flush()
        for _ in range(100):
            request.match([b"".join(digests)] * 20)
        assert service.stats().leases == 2000
    for _ in range(200):
        with store.open_request(ns) as request:
            request.match([b"".join(digests)] * 40)
    assert store.flush(30)
    assert service.stats().leases == 0


def test_tcp_falls_back_to_bytes_and_says_why(service: Service, opened: Open) -> None:
    store = opened(service.process.listen)
    assert store.stats()["transport"] == "bytes"
    assert "not a Unix socket" in store.stats()["transport_reason"]
    with pytest.raises(TransportUnavailableError, match="Unix socket"):
        opened(service.process.listen, require_transport="fd")
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("tcp", 2)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)])
        write_chain(request, digests)
        assert store.flush()
        assert [content(b) for b in request.match([b"".join(digests)])[0].blocks] == [payload(d) for d in digests]
    assert store.flush()


def test_proxies_in_the_environment_are_ignored(
    service: Service, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # b172
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert opened(service.address, required=True).attached
    assert opened(service.process.listen, required=True).attached


def test_embedded_service_ends_with_close(opened: Open) -> None:
    store = opened("embedded")
    assert store.stats()["transport"] == "fd"
    assert store._service is not None
    pid, folder = store._service.pid, Path(store.address).parent
    store.close()
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
