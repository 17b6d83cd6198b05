"""Payloads through a running service: damage, the bytes transport, and what happens when memory runs short."""

import random
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


def test_damage_is_verified_before_anything_is_condemned(worker, admin):
    one = worker()
    namespace = one.register(ModelShape("damage")).namespace_id
    digests = chain("damage", 5)
    reserved = one.publish(namespace, digests, payloads_for(digests, 8))
    report = blocks_pb2.ReportDamageRequest(namespace_id=namespace, digests=b"".join(digests))
    assert one.call(one.blocks.ReportDamage, report).condemned == 0
    segment, memory = one.map(reserved.slab_ids[3], writable=True)
    memory[reserved.slots[3] * segment.slot_bytes + 17] ^= 1
    before = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=5).damaged
    assert one.call(one.blocks.ReportDamage, report).condemned == 2
    lease = one.lookup_and_lease(namespace, digests)
    assert len(lease.slots) == 3
    assert lease.miss_reason == blocks_pb2.MISS_REASON_DAMAGED
    assert admin.GetStats(admin_pb2.GetStatsRequest(), timeout=5).damaged > before


@pytest.mark.parametrize("block_bytes", [520, 4104, (4 << 20) + 100_008])
def test_b168_payloads_of_any_size_travel_in_chunks_over_tcp(launch_pair, block_bytes):
    address, listen = launch_pair
    shape = ModelShape(f"bytes-{block_bytes}", block_bytes=block_bytes)
    with RawClient(listen, name="far") as far, RawClient(address, name="near") as near:
        namespace = far.register(shape).namespace_id
        near.register(shape)
        digests = chain("bytes", 2)
        reserved = far.reserve(namespace, digests)
        assert len(reserved.slots) == 2, reserved.short_reason
        payloads = [random.Random(i).randbytes(block_bytes) for i in range(2)]
        written = far.blocks.WriteBlocks(chunks(reserved, payloads, 1 << 20), metadata=far.metadata, timeout=20)
        assert written.bytes == 2 * block_bytes
        committed = far.commit(namespace, reserved, digests, [block_checksum(payload) for payload in payloads])
        assert all(committed.committed)
        lease = near.lookup_and_lease(namespace, digests)
        assert [block[:block_bytes] for block in near.read(lease)] == payloads
        mine = far.lookup_and_lease(namespace, digests)
        got = [bytearray(), bytearray()]
        request = blocks_pb2.ReadBlocksRequest(lease_id=mine.lease_id)
        for piece in far.blocks.ReadBlocks(request, metadata=far.metadata, timeout=20):
            assert piece.offset == len(got[piece.block])
            assert len(piece.data) <= 1 << 20
            got[piece.block] += piece.data
        assert got == payloads
        for request in (
            blocks_pb2.ReadBlocksRequest(lease_id=mine.lease_id, first_block=3),
            blocks_pb2.ReadBlocksRequest(lease_id=mine.lease_id, first_block=1, blocks=2),
        ):
            stream = far.blocks.ReadBlocks(request, metadata=far.metadata, timeout=20)
            assert code_of(next, stream) is grpc.StatusCode.INVALID_ARGUMENT
        far.call(far.blocks.Release, blocks_pb2.ReleaseRequest(lease_ids=[mine.lease_id]))
        stream = far.blocks.ReadBlocks(
            blocks_pb2.ReadBlocksRequest(lease_id=mine.lease_id), metadata=far.metadata, timeout=20
        )
        assert code_of(next, stream) is grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def launch_pair(shared_launch):
    service = shared_launch(
        "--listen", "127.0.0.1:0", "--budget", "256MiB", "--max-sessions", "4",
        address=shared_launch.folder / "b.sock",
    )  # fmt: skip
    return service.address, service.listen


def chunks(reserved, payloads, size):
    for index, payload in enumerate(payloads):
        for offset in range(0, len(payload), size):
            yield blocks_pb2.WriteBlocksRequest(
                slab_id=reserved.slab_ids[index],
                slot=reserved.slots[index],
                generation=reserved.generations[index],
                offset=offset,
                data=payload[offset : offset + size],
            )


def test_payloads_go_only_into_private_slots_of_the_caller(worker):
    shape = ModelShape("intruder")
    owner, intruder = worker(), worker()
    namespace = owner.register(shape).namespace_id
    intruder.register(shape)
    digests = chain("intruder", 1)
    reserved = owner.reserve(namespace, digests)

    def write(who, **changes):
        fields = {
            "slab_id": reserved.slab_ids[0], "slot": reserved.slots[0], "generation": reserved.generations[0],
            "offset": 0, "data": b"x" * 10, **changes,
        }  # fmt: skip
        requests = iter([blocks_pb2.WriteBlocksRequest(**fields)])
        return who.blocks.WriteBlocks(requests, metadata=who.metadata, timeout=5)

    assert write(owner).bytes == 10
    invalid, conflict = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(write, owner, offset=4090) is invalid
    assert code_of(write, owner, offset=2**64 - 5) is invalid
    assert code_of(write, owner, data=b"") is invalid
    assert code_of(write, owner, data=bytes((1 << 20) + 1)) is invalid
    assert code_of(write, owner, generation=reserved.generations[0] + 1) is conflict
    assert code_of(write, owner, slab_id=9999) is conflict
    assert code_of(write, intruder) is conflict
    owner.commit(namespace, reserved, digests, [1])
    assert code_of(write, owner) is conflict


def test_a_full_budget_grants_less_and_says_why(launch):
    service = launch("--budget", "8MiB", "--max-sessions", "2")
    with RawClient(service.address) as one:
        namespace = one.register(ModelShape("full", block_bytes=256 << 10)).namespace_id
        reserved = one.reserve(namespace, [], anonymous=64)
        assert 0 < len(reserved.slots) < 64
        assert reserved.short_reason
        with admin_channel(service.address) as channel:
            device = admin_stub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=5).devices[0]
        assert device.used_bytes <= device.budget_bytes


def test_a_budget_below_one_slab_is_named(launch):
    service = launch("--budget", "4MiB")
    with RawClient(service.address) as one:
        with pytest.raises(grpc.RpcError) as caught:
            one.register(ModelShape("big", block_bytes=16 << 20))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--budget" in caught.value.details()


def test_memory_moves_to_another_namespace_when_its_holder_lets_go(launch):
    service = launch("--budget", "8MiB", "--max-sessions", "2")
    with (
        RawClient(service.address) as rich,
        RawClient(service.address) as poor,
        admin_channel(service.address) as channel,
    ):
        wealth = rich.register(ModelShape("rich", block_bytes=256 << 10)).namespace_id
        for index in range(30):
            reserved = rich.reserve(wealth, chain(f"rich-{index}", 1))
            if not reserved.slots:
                break
            rich.commit(wealth, reserved, chain(f"rich-{index}", 1), [1])
            refs = {"slab_ids": reserved.slab_ids, "slots": reserved.slots, "generations": reserved.generations}
            rich.call(rich.blocks.Abort, blocks_pb2.AbortRequest(**refs))
        need = poor.register(ModelShape("poor", block_bytes=256 << 10)).namespace_id
        deadline = time.monotonic() + 10
        while not poor.reserve(need, [], anonymous=2).slots:
            assert time.monotonic() < deadline, "the memory never came free"
            while not rich.events.empty():
                message = rich.events.get()
                if message.WhichOneof("message") == "unmap":
                    done = session_pb2.SlabsUnmapped(slab_ids=message.unmap.slab_ids)
                    rich.say(session_pb2.SessionRequest(slabs_unmapped=done))
            time.sleep(0.05)
        admin = admin_stub(channel)
        assert list(integrity(admin, payloads=False).problems) == []
        device = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=5).devices[0]
        assert device.used_bytes <= device.budget_bytes
