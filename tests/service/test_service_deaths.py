"""Workers that die, vanish or come back; a service that stops under load; health beside slow work."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvstore_proto.v1 import admin_pb2, blocks_pb2, session_pb2

from kvstore.testing_client import DEADLINE_S, ModelShape, RawClient, admin_channel, admin_stub, chain

# A worker that writes into its private slots, or reads leased blocks in place, until it is killed.
BUSY_WORKER = """
import mmap, os, sys
from pathlib import Path
from kvstore.testing_client import ModelShape, RawClient, chain
address, name, how = sys.argv[1:]
client = RawClient(Path(address), name=name)
namespace = client.register(ModelShape("shared", block_bytes=65536)).namespace_id
leases = [client.lookup_and_lease(namespace, chain("shared", 4)) for _ in range(5)]
reserved = client.reserve(namespace, chain(name, 8), anonymous=8)
writing = how == "write"
refs = reserved if writing else leases[0]
segment, fd = client.descriptors.open_segment(1, refs.slab_ids[0], writable=writing)
memory = mmap.mmap(fd, segment.bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writing else 0))
print("ready", flush=True)
while True:
    for slot in refs.slots:
        start = slot * segment.slot_bytes
        if writing:
            memory[start : start + segment.slot_bytes] = os.urandom(1) * segment.slot_bytes
        else:
            assert len(memory[start : start + segment.slot_bytes]) == segment.slot_bytes
"""


def sessions(admin):
    reply = admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S)
    return {session.name: session for session in reply.sessions}


def wait_until(condition, deadline_s=5.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


@contextlib.contextmanager
def busy_worker(address, name, how):
    command = [sys.executable, "-c", BUSY_WORKER, str(address), name, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def other(shared_service):
    """A worker that is not to notice anything; has committed four blocks of zeros."""
    with RawClient(shared_service.address, name="other") as client:
        namespace = client.register(ModelShape("shared", block_bytes=65536)).namespace_id
        reserved = client.reserve(namespace, chain("shared", 4))
        client.commit(namespace, reserved, chain("shared", 4), [0] * 4)
        refs = {"slab_ids": reserved.slab_ids, "slots": reserved.slots, "generations": reserved.generations}
        client.call(client.blocks.Abort, blocks_pb2.AbortRequest(**refs))
        yield client, namespace


@pytest.mark.parametrize("how", ["write", "read"])
def test_what_a_killed_worker_held_is_back_within_a_second(shared_service, admin, other, how):
    client, namespace = other
    name = f"killed-{how}"
    with busy_worker(shared_service.address, name, how) as process:
        entry = sessions(admin)[name]
        assert (entry.leases, entry.private_slots, entry.process_watched) == (5, 16, True)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: name not in sessions(admin))
        assert time.monotonic() - killed < 1.0
    stats = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S)
    assert stats.leases == 0
    assert stats.devices[0].slots_private == 0
    assert admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=DEADLINE_S).problems == []
    lease = client.lookup_and_lease(namespace, chain("shared", 4))
    assert len(lease.slots) == 4
    client.call(client.blocks.Release, blocks_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))


def test_what_a_dead_writer_had_in_flight_can_be_written_by_others(shared_service, admin, other):
    client, namespace = other
    with busy_worker(shared_service.address, "gone", "write"):
        reserved = client.reserve(namespace, chain("gone", 8))
        assert set(reserved.statuses) == {blocks_pb2.RESERVE_STATUS_IN_FLIGHT}
    wait_until(lambda: "gone" not in sessions(admin))
    again = client.reserve(namespace, chain("gone", 8))
    assert set(again.statuses) == {blocks_pb2.RESERVE_STATUS_UNSPECIFIED}


def test_a_stopped_worker_keeps_all_it_holds(shared_service, admin, other):
    with busy_worker(shared_service.address, "stopped", "read") as process:
        os.kill(process.pid, signal.SIGSTOP)
        # Longer than any grace period of this service.
        time.sleep(1.0)
        entry = sessions(admin)["stopped"]
        assert (entry.leases, entry.private_slots) == (5, 16)
        os.kill(process.pid, signal.SIGCONT)


def test_a_broken_stream_ends_nothing_and_the_instance_takes_over_what_it_held(shared_service, admin, other):
    _, namespace = other
    first = RawClient(shared_service.address, name="broken")
    first.register(ModelShape("shared", block_bytes=65536))
    lease = first.lookup_and_lease(namespace, chain("shared", 4))
    reserved = first.reserve(namespace, [], anonymous=2)
    first.close()
    time.sleep(0.7)
    assert sessions(admin)["broken"].leases == 1
    with RawClient(shared_service.address, name="broken", instance_id=first.instance_id) as second:
        assert second.welcome.session_id != first.welcome.session_id
        assert sessions(admin)["broken"].leases == 1
        # Granted again under the new token, for writing too.
        for slab_id, writable in ((lease.slab_ids[0], False), (reserved.slab_ids[0], True)):
            _, fd = second.descriptors.open_segment(1, slab_id, writable=writable)
            os.close(fd)
        refs = {"slab_ids": reserved.slab_ids, "slots": reserved.slots, "generations": reserved.generations}
        assert second.call(second.blocks.Abort, blocks_pb2.AbortRequest(**refs)).aborted == 2
        release = blocks_pb2.ReleaseRequest(lease_ids=[lease.lease_id])
        with pytest.raises(grpc.RpcError) as caught:
            second.blocks.Release(release, metadata=first.metadata, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert second.call(second.blocks.Release, release).released == 1
        slab_ids = {*lease.slab_ids, *reserved.slab_ids}
        second.say(session_pb2.SessionRequest(slabs_unmapped=session_pb2.SlabsUnmapped(slab_ids=slab_ids)))
        second.close(orderly=True)
    wait_until(lambda: "broken" not in sessions(admin))


def test_the_second_stream_of_an_instance_ends_the_first_with_a_goodbye(shared_service):
    address = shared_service.address
    with RawClient(address) as first, RawClient(address, instance_id=first.instance_id):
        message = first.events.get(timeout=5)
        assert message.WhichOneof("message") == "goodbye"
        assert first.events.get(timeout=5) is None


def test_another_process_can_not_take_over_an_instance(shared_service, admin):
    code = (
        "import sys, grpc; from pathlib import Path; from kvstore.testing_client import RawClient\n"
        "try: RawClient(Path(sys.argv[1]), instance_id=bytes.fromhex(sys.argv[2]))\n"
        "except grpc.RpcError as error: print(error.code().name)"
    )
    with RawClient(shared_service.address, name="mine") as mine:
        command = [sys.executable, "-c", code, str(shared_service.address), mine.instance_id.hex()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        assert result.stdout == "PERMISSION_DENIED\n"
        assert "mine" in sessions(admin)


def test_a_tcp_session_ends_a_grace_period_after_its_stream(shared_service, admin, other):
    _, namespace = other
    far = RawClient(shared_service.listen, name="far")
    far.register(ModelShape("shared", block_bytes=65536))
    assert len(far.lookup_and_lease(namespace, chain("shared", 4)).slots) == 4
    assert not sessions(admin)["far"].process_watched
    far.close()
    assert sessions(admin)["far"].leases == 1
    time.sleep(0.1)
    with RawClient(shared_service.listen, name="far", instance_id=far.instance_id) as again:
        time.sleep(0.5)
        assert sessions(admin)["far"].leases == 1
        again.close()
        wait_until(lambda: "far" not in sessions(admin), 2)


def test_too_many_sessions_are_refused_with_the_limit(launch):
    service = launch("--max-sessions", "2")
    with RawClient(service.address), RawClient(service.address):
        with pytest.raises(grpc.RpcError) as caught:
            RawClient(service.address)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-sessions" in caught.value.details()
    # Those that left make room.
    with admin_channel(service.address) as channel:
        wait_until(lambda: not sessions(admin_stub(channel)))
    RawClient(service.address).close()


def test_b200_a_stop_says_goodbye_and_lets_calls_finish(launch):
    service = launch()
    with RawClient(service.address) as writer, RawClient(service.address) as waiter:
        namespace = writer.register().namespace_id
        waiter.register()
        digests = chain("drain", 2)
        writer.reserve(namespace, digests)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(waiter.lookup_and_lease(namespace, digests, wait_ms=1000))
        )
        thread.start()
        time.sleep(0.3)
        stopping = time.monotonic()
        os.kill(service.pid, signal.SIGTERM)
        assert writer.events.get(timeout=2).goodbye.reason
        with admin_channel(service.address) as channel:
            ready = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert service.wait(8) == 0
        assert 0.3 < time.monotonic() - stopping < 5
        thread.join(5)
        assert found[0].miss_reason == blocks_pb2.MISS_REASON_IN_FLIGHT
    assert [path.name for path in launch.folder.iterdir()] == ["log"]


def test_a_stop_does_not_wait_longer_than_the_grace_period(launch):
    service = launch("--grace", "0.5")
    with RawClient(service.address) as writer, RawClient(service.address) as waiter:
        namespace = writer.register().namespace_id
        waiter.register()
        writer.reserve(namespace, chain("drain", 1))
        refused = []

        def wait():
            with pytest.raises(grpc.RpcError) as caught:
                waiter.lookup_and_lease(namespace, chain("drain", 1), wait_ms=9000)
            refused.append(caught.value.code())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        stopping = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - stopping < 3
        thread.join(5)
        assert len(refused) == 1


def test_b211_health_answers_while_a_big_slab_is_allocated(launch):
    service = launch("--budget", "700MiB", "--max-sessions", "2")
    with (
        RawClient(service.address) as client,
        admin_channel(service.address) as channel,
        grpc.insecure_channel(f"unix:{service.address}") as workers,
    ):
        shape = ModelShape("big", block_bytes=512 << 20)
        done = []

        def reserve():
            namespace = client.register(shape).namespace_id
            request = blocks_pb2.ReserveRequest(namespace_id=namespace, anonymous=1)
            reply = client.blocks.Reserve(request, metadata=client.metadata, timeout=60)
            done.append(len(reply.slots))

        thread = threading.Thread(target=reserve)
        thread.start()
        slowest, checks = 0.0, 0
        while thread.is_alive():
            for stub in (health_pb2_grpc.HealthStub(channel), health_pb2_grpc.HealthStub(workers)):
                before = time.monotonic()
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                slowest = max(slowest, time.monotonic() - before)
                checks += 1
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        thread.join()
        assert done == [1]
        assert checks > 4
        assert slowest < 1.0
