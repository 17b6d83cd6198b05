"""Blocks through a running service: shared memory, commits, waits, damage, the bytes transport, pressure."""

import mmap
import os
import random
import threading
import time

import grpc
import pytest
from kvstore_kernels.checksum import block_checksum
from kvstore_proto.v1 import admin_pb2, blocks_pb2, session_pb2

from kvstore.testing_client import (
    DEADLINE_S,
    DescriptorRefusedError,
    ModelShape,
    RawClient,
    admin_channel,
    admin_stub,
    chain,
)

SLAB, LEDGER = 1, 2
NOT_FOUND, PERMISSION_DENIED = 5, 7


def payloads_for(digests, seed, block_bytes=4096):
    rng = random.Random(seed)
    return [rng.randbytes(block_bytes) for _ in digests]


def integrity(admin, *, payloads=True):
    return admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(payloads=payloads), timeout=DEADLINE_S)


def code_of(call, *args, **kwargs):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value.code()


def refused(call, *args, **kwargs):
    with pytest.raises(DescriptorRefusedError) as caught:
        call(*args, **kwargs)
    return caught.value.code


def wait_until(condition, deadline_s=5.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def has_memory(client, namespace, slots=16):
    """So many slots come without another slab: a slab is one session's to write."""
    client.abort(client.reserve(namespace, [], slots))


def test_one_worker_writes_and_another_reads_the_same_bytes_in_place(worker, admin):
    shape = ModelShape("shared", block_bytes=4096 + 128)
    writer, reader = worker(name="writer"), worker(name="reader")
    namespace = writer.register(shape).namespace_id
    assert reader.register(shape).namespace_id == namespace
    digests = chain("shared", 7)
    payloads = payloads_for(digests, 1, 4096 + 128)
    reserved = writer.publish(namespace, digests, payloads)
    lease = reader.lookup_and_lease(namespace, [*digests, *chain("more", 1)])
    assert reader.read(lease) == payloads
    assert list(lease.generations) == list(reserved.generations)
    assert list(lease.checksums) == [block_checksum(payload) for payload in payloads]
    assert [(run.writer, run.blocks) for run in lease.writers] == [("writer", 7)]
    assert lease.miss_reason == blocks_pb2.MISS_REASON_NOT_FOUND
    found = integrity(admin)
    assert (list(found.problems), found.damaged) == ([], 0)
    assert found.blocks_verified >= 7


def test_a_reader_gets_a_descriptor_that_can_not_be_mapped_for_writing(worker):
    shape = ModelShape("readonly")
    writer, reader = worker(), worker()
    namespace = writer.register(shape).namespace_id
    reader.register(shape)
    digests = chain("readonly", 1)
    writer.publish(namespace, digests, payloads_for(digests, 2))
    slab_id = reader.lookup_and_lease(namespace, digests).slab_ids[0]
    segment, fd = reader.descriptors.open_segment(SLAB, slab_id, writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, segment.bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    # Sealed: nobody can pull the pages from under a reader.
    with pytest.raises(OSError):
        os.truncate(fd, 0)
    os.close(fd)
    assert refused(reader.descriptors.open_segment, SLAB, slab_id, writable=True) == PERMISSION_DENIED


def test_a_foreign_namespace_is_closed(worker):
    owner, stranger = worker(), worker()
    mine = owner.register(ModelShape("mine")).namespace_id
    digests = chain("mine", 2)
    reserved = owner.publish(mine, digests, payloads_for(digests, 3))
    stranger.register(ModelShape("other"))
    for kind, segment in ((SLAB, reserved.slab_ids[0]), (LEDGER, mine)):
        assert refused(stranger.descriptors.open_segment, kind, segment, writable=False) == NOT_FOUND
    assert code_of(stranger.lookup_and_lease, mine, digests) is grpc.StatusCode.NOT_FOUND
    assert code_of(stranger.reserve, mine, digests) is grpc.StatusCode.NOT_FOUND
    assert code_of(stranger.commit, mine, reserved, digests, [0, 0]) is grpc.StatusCode.NOT_FOUND


def test_the_ledger_of_a_namespace_is_open_to_its_sessions_for_reading(worker):
    owner = worker()
    namespace = owner.register(ModelShape("ledger")).namespace_id
    owner.publish(namespace, chain("ledger", 1), payloads_for(chain("ledger", 1), 4))
    segment, fd = owner.descriptors.open_segment(LEDGER, namespace, writable=False)
    assert os.fstat(fd).st_size == segment.bytes
    os.close(fd)
    assert refused(owner.descriptors.open_segment, LEDGER, namespace, writable=True) == PERMISSION_DENIED


def test_the_first_commit_wins_and_the_second_keeps_its_slot(worker):
    shape = ModelShape("race")
    first, second = worker(), worker()
    namespace = first.register(shape).namespace_id
    second.register(shape)
    digests = chain("race", 3)
    one = first.reserve(namespace, digests)
    two = second.reserve(namespace, digests)
    assert set(one.statuses) == {blocks_pb2.RESERVE_STATUS_UNSPECIFIED}
    assert set(two.statuses) == {blocks_pb2.RESERVE_STATUS_IN_FLIGHT}
    assert len(two.slots) == 3
    assert list(first.commit(namespace, one, digests, [1, 2, 3]).committed) == [True] * 3
    assert list(first.commit(namespace, one, digests, [1, 2, 3]).committed) == [True] * 3
    assert list(second.commit(namespace, two, digests, [1, 2, 3]).committed) == [False] * 3
    abort = blocks_pb2.AbortRequest(slab_ids=two.slab_ids, slots=two.slots, generations=two.generations)
    assert second.call(second.blocks.Abort, abort).aborted == 3
    assert second.call(second.blocks.Abort, abort).aborted == 0


@pytest.mark.parametrize("ending", ["commit", "abort", "goodbye"])
def test_a_waiting_lookup_wakes_when_the_writer_is_done(worker, ending):
    shape = ModelShape(f"wait-{ending}")
    writer, waiter = worker(), worker()
    namespace = writer.register(shape).namespace_id
    waiter.register(shape)
    digests = chain(f"wait-{ending}", 3)
    reserved = writer.reserve(namespace, digests)
    found = []

    def wait():
        found.append(waiter.lookup_and_lease(namespace, digests, wait_ms=8000))
        found.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    # Others are served meanwhile.
    assert waiter.lookup_and_lease(namespace, digests).miss_reason == blocks_pb2.MISS_REASON_IN_FLIGHT
    before = time.monotonic()
    if ending == "commit":
        writer.commit(namespace, reserved, digests, [1, 2, 3])
    elif ending == "abort":
        refs = {"slab_ids": reserved.slab_ids, "slots": reserved.slots, "generations": reserved.generations}
        writer.call(writer.blocks.Abort, blocks_pb2.AbortRequest(**refs))
    else:
        writer.close(orderly=True)
    thread.join(5)
    assert len(found[0].slots) == (3 if ending == "commit" else 0)
    assert found[1] - before < 1.0


def test_a_waiting_lookup_gives_up_in_time(worker):
    shape = ModelShape("patience")
    writer, waiter = worker(), worker()
    namespace = writer.register(shape).namespace_id
    waiter.register(shape)
    digests = chain("patience", 3)
    reserved = writer.reserve(namespace, digests)
    writer.commit(namespace, reserved, digests[:1], [1])
    before = time.monotonic()
    lease = waiter.lookup_and_lease(namespace, digests, wait_ms=300)
    assert 0.25 < time.monotonic() - before < 1.5
    assert len(lease.slots) == 1
    assert lease.miss_reason == blocks_pb2.MISS_REASON_IN_FLIGHT
    assert lease.in_flight_age_ms >= 250
    over = blocks_pb2.LookupAndLeaseRequest(queries=[], wait_ms=60_001)
    assert code_of(waiter.call, waiter.blocks.LookupAndLease, over) is grpc.StatusCode.INVALID_ARGUMENT


def test_b118_release_is_idempotent_from_two_threads_and_after_the_end(worker, shared_service):
    one = worker()
    namespace = one.register(ModelShape("release")).namespace_id
    digests = chain("release", 2)
    one.publish(namespace, digests, payloads_for(digests, 5))
    lease_ids = [one.lookup_and_lease(namespace, digests).lease_id for _ in range(20)]
    released = []

    def release():
        for lease_id in lease_ids:
            request = blocks_pb2.ReleaseRequest(lease_ids=[lease_id, lease_id, 2**60])
            released.append(one.call(one.blocks.Release, request).released)

    threads = [threading.Thread(target=release) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(released) == 20
    # After the session has ended the answer is a refusal, not a crash.
    one.close(orderly=True)
    with RawClient(shared_service.address) as other:
        assert (
            code_of(
                other.blocks.Release, blocks_pb2.ReleaseRequest(lease_ids=lease_ids), metadata=one.metadata, timeout=5
            )
            is grpc.StatusCode.UNAUTHENTICATED
        )


def test_b137_a_model_that_two_share_outlives_either(worker, admin):
    shape = ModelShape("two")
    first, second = worker(), worker()
    namespace = first.register(shape).namespace_id
    assert second.register(shape).namespace_id == namespace
    digests = chain("two", 2)
    payloads = payloads_for(digests, 6)
    first.publish(namespace, digests, payloads)
    first.close(orderly=True)
    assert second.read(second.lookup_and_lease(namespace, digests)) == payloads
    second.publish(namespace, chain("two-more", 2), payloads_for(chain("two-more", 2), 7))
    third = worker()
    assert third.register(shape).namespace_id == namespace
    second.close()
    assert third.read(third.lookup_and_lease(namespace, digests)) == payloads
    assert list(integrity(admin).problems) == []


def test_b220_another_layout_of_the_same_model_is_refused_with_both_named(worker):
    one, two = worker(), worker()
    one.register(ModelShape("layout", block_bytes=4096))
    with pytest.raises(grpc.RpcError) as caught:
        two.register(ModelShape("layout", block_bytes=8192))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "4096" in caught.value.details()
    assert "8192" in caught.value.details()
    assert two.register(ModelShape("layout", block_bytes=4096)).codec_plan_kept


def test_the_first_codec_plan_is_kept_for_all(worker):
    one, two = worker(), worker()
    assert not one.call(one.sessions.GetCodecPlan, plan_request("plan")).found
    mine = one.register(ModelShape("plan", codec="int8", codec_plan=b"first"))
    theirs = two.register(ModelShape("plan", codec="int8", codec_plan=b"second"))
    assert (mine.codec_plan_kept, theirs.codec_plan_kept) == (True, False)
    assert theirs.codec_plan == b"first"
    assert theirs.namespace_id == mine.namespace_id
    assert two.call(two.sessions.GetCodecPlan, plan_request("plan")).codec_plan == b"first"


def plan_request(name):
    fingerprint = ModelShape(name).request().model_fingerprint
    return session_pb2.GetCodecPlanRequest(model_fingerprint=fingerprint, codec="int8")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("model_fingerprint", b"short"),
        ("model_fingerprint", bytes(64)),
        ("layout.digest", b""),
        ("layout.block_bytes", 0),
        ("layout.block_bytes", 2**63),
        ("layout.layers", 0),
        ("layout.k_dim", 2**32 - 1),
        ("layout.dtype", "x" * 1000),
        ("shard.total_kv_heads", 1),
        ("shard.first_kv_head", 2),
        ("model_name", "a\x00b"),
    ],
)
def test_b161_a_registration_with_impossible_values_is_refused(worker, change, value):
    request = ModelShape("impossible").request()
    target, _, field = change.rpartition(".")
    setattr(getattr(request, target) if target else request, field, value)
    one = worker()
    assert code_of(one.call, one.sessions.RegisterModel, request) is grpc.StatusCode.INVALID_ARGUMENT


def test_b161_blocks_with_impossible_values_are_refused(worker, admin):
    one = worker()
    namespace = one.register(ModelShape("values")).namespace_id
    digests = chain("values", 2)
    reserved = one.reserve(namespace, digests)
    good = {
        "namespace_id": namespace, "slab_ids": reserved.slab_ids, "slots": reserved.slots,
        "generations": reserved.generations, "digests": b"".join(digests), "parents": bytes(32) + digests[0],
        "checksums": [1, 2], "errors": [0.0, 0.5],
    }  # fmt: skip
    bad = grpc.StatusCode.INVALID_ARGUMENT
    for change in (
        {"slots": [0]}, {"generations": []}, {"checksums": [1, 2, 3]}, {"digests": bytes(63)}, {"parents": b""},
        {"errors": []}, {"errors": [0, -0.1]}, {"errors": [0, float("nan")]}, {"errors": [float("inf"), 0]},
    ):  # fmt: skip
        assert code_of(one.call, one.blocks.Commit, blocks_pb2.CommitRequest(**{**good, **change})) is bad
    for change in ({"slots": [2**32 - 1] * 2}, {"slab_ids": [77, 77]}, {"generations": [9, 9]}):
        refusal = code_of(one.call, one.blocks.Commit, blocks_pb2.CommitRequest(**{**good, **change}))
        assert refusal is grpc.StatusCode.FAILED_PRECONDITION
    for request in (
        blocks_pb2.ReserveRequest(namespace_id=namespace, digests=b"x" * 31),
        blocks_pb2.ReserveRequest(namespace_id=namespace, anonymous=2**32 - 1),
    ):
        assert code_of(one.call, one.blocks.Reserve, request) is bad
    assert code_of(one.call, one.blocks.Pin, blocks_pb2.PinRequest(namespace_id=namespace, digest=b"x")) is bad
    assert list(integrity(admin, payloads=False).problems) == []


def test_the_next_reservation_finds_a_slab_that_was_allocated_meanwhile(launch):
    service = launch("--max-sessions", "4")
    with RawClient(service.address) as one, admin_channel(service.address) as channel:
        admin = admin_stub(channel)

        def slabs():
            return admin.GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S).devices[0].slabs_live

        namespace = one.register(ModelShape("ahead", 512 << 10)).namespace_id
        first = one.reserve(namespace, chain("ahead", 2))
        deadline = time.monotonic() + 5
        while slabs() == len(set(first.slab_ids)):
            assert time.monotonic() < deadline, "no slab ahead"
            time.sleep(0.01)
        before = slabs()
        assert len(one.reserve(namespace, chain("more", 2)).slots) == 2
        # What it needed was there; another one follows only behind it.
        assert before == 2


def test_a_look_up_brings_slots_for_what_is_not_held(worker, admin):
    shape = ModelShape("rest")
    writer, reader = worker(), worker()
    namespace = writer.register(shape).namespace_id
    reader.register(shape)
    held, more, other = chain("rest", 3), chain("rest-more", 2), chain("rest-other", 1)
    writer.publish(namespace, held, payloads_for(held, 4))
    has_memory(reader, namespace)
    rows = [(namespace, [*held, *more]), (namespace, [*held[:2], *other, *more]), (namespace, held)]
    found = reader.look_up_and_reserve(rows, anonymous=4)
    assert [len(lease.slots) for lease in found.leases] == [3, 2, 3]
    # more, other: each once; more again in the second row has a slot without a digest.
    assert list(found.reservation.statuses) == [blocks_pb2.RESERVE_STATUS_UNSPECIFIED] * 3
    assert len(found.reservation.slots) == 3 + 2 + 4
    assert found.reservation.boot_id == found.boot_id
    # They are the caller's: it may write and commit them, and give all back.
    payloads = payloads_for(more, 5)
    for slab_id, slot, payload in zip(found.reservation.slab_ids, found.reservation.slots, payloads, strict=False):
        segment, memory = reader.map(slab_id, writable=True)
        memory[slot * segment.slot_bytes : slot * segment.slot_bytes + len(payload)] = payload
    committed = reader.commit(namespace, found.reservation, more, [block_checksum(payload) for payload in payloads])
    assert list(committed.committed) == [True, True]
    assert reader.abort(found.reservation) == 9
    assert len(writer.lookup_and_lease(namespace, more).slots) == 2
    assert not integrity(admin).problems


def test_a_look_up_that_finds_all_brings_only_the_further_slots(worker):
    owner = worker()
    namespace = owner.register(ModelShape("all-held")).namespace_id
    digests = chain("all-held", 2)
    owner.publish(namespace, digests, payloads_for(digests, 6))
    has_memory(owner, namespace)
    found = owner.look_up_and_reserve([(namespace, digests)], anonymous=2)
    assert (list(found.reservation.statuses), len(found.reservation.slots)) == ([], 2)


def test_no_slots_come_with_a_look_up_that_has_to_wait_for_a_writer(worker):
    shape = ModelShape("rest-in-flight")
    writer, reader = worker(), worker()
    namespace = writer.register(shape).namespace_id
    reader.register(shape)
    digests = chain("rest-in-flight", 2)
    writer.reserve(namespace, digests)
    has_memory(reader, namespace)
    found = reader.look_up_and_reserve([(namespace, digests)], anonymous=1)
    assert found.leases[0].miss_reason == blocks_pb2.MISS_REASON_IN_FLIGHT
    assert not found.HasField("reservation")
    # Behind a block that nobody writes, the same ones are another's: that is a status, as in Reserve.
    found = reader.look_up_and_reserve([(namespace, [*chain("rest-free", 1), *digests])])
    assert list(found.reservation.statuses) == [0, *[blocks_pb2.RESERVE_STATUS_IN_FLIGHT] * 2]


def test_memory_that_is_not_there_yet_does_not_hold_up_a_look_up(worker):
    owner = worker()
    namespace = owner.register(ModelShape("rest-grows")).namespace_id
    digests = chain("rest-grows", 2)
    owner.publish(namespace, digests, payloads_for(digests, 7))
    rest, anonymous = chain("rest-grows-more", 3), 2000
    found = owner.look_up_and_reserve([(namespace, [*digests, *rest])], anonymous)
    assert len(found.leases[0].slots) == 2
    assert not found.HasField("reservation")
    reserved = owner.reserve(namespace, rest, anonymous)
    assert (len(reserved.slots), reserved.short_reason) == (2003, "")


def test_slots_with_a_look_up_are_of_one_namespace_and_bounded(worker, admin):
    owner = worker()
    spaces = [owner.register(ModelShape(name)).namespace_id for name in ("rest-one", "rest-two")]
    digests = chain("rest-one", 1)
    owner.publish(spaces[0], digests, payloads_for(digests, 8))
    held = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S)
    code = code_of(owner.look_up_and_reserve, [(space, digests) for space in spaces])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(owner.look_up_and_reserve, [(spaces[0], digests)], 2**31) is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(owner.look_up_and_reserve, []) is grpc.StatusCode.INVALID_ARGUMENT
    after = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S)
    assert [d.slots_private for d in after.devices] == [d.slots_private for d in held.devices]
    assert after.leases == held.leases
