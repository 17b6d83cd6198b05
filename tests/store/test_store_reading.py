"""Look-ups, leases, pins, damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequestError, LimitReachedError, NotHeldError
from kvstore.store import MissReason
from kvstore.store.types import Query
from kvstore.testing import StoreHarness, block_content, digest_chain, model_spec


def test_a_lease_says_where_every_block_lies() -> None:
    harness = StoreHarness()
    writer, reader = harness.worker("w"), harness.worker("r")
    chain = digest_chain(11)
    writer.write(chain[:4])
    reader.write(chain[:9])
    lease = reader.lease(chain)
    assert (lease.blocks, lease.miss_reason) == (9, MissReason.NOT_FOUND)
    assert lease.writers == [("w", 4), ("r", 5)]
    assert reader.read(lease) == [block_content(digest, harness.block_bytes) for digest in chain[:9]]
    assert len({*zip(lease.slab_ids, lease.slots, strict=True)}) == 9
    assert harness.store.payloads.blocks(reader.session_id, lease.lease_id) == (9, harness.block_bytes)


def test_a_miss_has_no_lease() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    lease = worker.lease(digest_chain(2))
    assert (lease.lease_id, lease.blocks, lease.miss_reason) == (0, 0, MissReason.NOT_FOUND)
    empty = worker.lease([])
    assert (empty.lease_id, empty.miss_reason) == (0, MissReason.COMPLETE)
    assert harness.store.stats().leases == 0


def test_a_digest_of_another_chain_is_no_prefix() -> None:
    # The deepest block alone protects its ancestors: blocks that are not its ancestors must not be leased with it.
    harness = StoreHarness()
    worker = harness.worker()
    one, two = digest_chain(3, "one"), digest_chain(3, "two")
    worker.write(one)
    worker.write(two)
    assert worker.lease([one[0], two[1], two[2]]).blocks == 1
    assert worker.lease([one[1]]).blocks == 0
    assert worker.lease([one[0], one[0]]).blocks == 1


def test_long_chains_cross_the_split_of_a_look_up() -> None:
    harness = StoreHarness(slabs=4, block_bytes=8 << 10)
    worker = harness.worker()
    chain = digest_chain(150)
    worker.write(chain)
    for length in (1, 63, 64, 65, 128, 149, 150):
        lease = worker.lease(chain[:length])
        assert (lease.blocks, lease.miss_reason) == (length, MissReason.COMPLETE)


def test_b060_ten_thousand_lookups_pin_nothing() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    chain = digest_chain(8)
    worker.write(chain)
    for _ in range(10_000):
        assert worker.held(chain) == 8
    stats = harness.store.stats()
    assert (stats.leases, stats.counters.lookups) == (0, 0)
    assert all(worker.write(digest_chain(8, "new")))
    assert worker.held(chain) == 0


def test_b060_leases_end_with_their_session() -> None:
    harness = StoreHarness(slabs=1)
    worker, other = harness.worker("a"), harness.worker("b")
    chain = digest_chain(8)
    worker.write(chain)
    for _ in range(100):
        worker.lease(chain)
    assert other.reserve([], anonymous=8).slots == []
    worker.die()
    assert len(other.reserve([], anonymous=8).slots) == 8


def test_b118_release_twice_and_after_the_end() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    worker.write(digest_chain(2))
    lease = worker.lease(digest_chain(2))
    assert harness.store.release(worker.session_id, [lease.lease_id, lease.lease_id, 77]) == 1
    assert worker.release(lease) == 0
    worker.die()
    worker.die()
    harness.assert_clean()


def test_another_sessions_lease_cannot_be_released_or_read() -> None:
    harness = StoreHarness()
    worker, other = harness.worker("a"), harness.worker("b")
    worker.write(digest_chain(1))
    lease = worker.lease(digest_chain(1))
    assert other.release(lease) == 0
    with pytest.raises(NotHeldError):
        other.read(lease)


def test_b144_all_shards_of_a_request_are_leased_in_one_step() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    spec = model_spec(layer_group="full:2-3")
    first, second = harness.worker("rank0"), harness.worker("rank1", spec=spec)
    registration = harness.store.register_model(first.session_id, spec)
    chain = digest_chain(4)
    first.write(chain)
    second.write(chain[:3])
    query = [(first.namespace_id, b"".join(chain)), (registration.namespace_id, b"".join(chain))]
    leases = harness.store.lookup_and_lease(first.session_id, query)
    assert [lease.blocks for lease in leases] == [4, 3]
    for namespace in harness.store.namespaces():
        harness.store.evict(namespace.namespace_id, include_pinned=True)
    assert [len(first.read(lease)) for lease in leases] == [4, 3]
    harness.assert_clean()


def test_a_call_with_one_bad_query_leases_nothing() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    worker.write(chain)
    good = (worker.namespace_id, b"".join(chain))
    for bad in ((worker.namespace_id, b"odd"), (99, chain[0])):
        with pytest.raises((InvalidRequestError, NotHeldError)):
            harness.store.lookup_and_lease(worker.session_id, [good, bad])
    assert harness.store.stats().leases == 0


def test_limits_of_queries_and_leases() -> None:
    harness = StoreHarness(max_queries=2, max_query_digests=5, max_leases_per_session=3)
    worker = harness.worker()
    chain = digest_chain(6)
    worker.write(chain[:1])
    query = (worker.namespace_id, chain[0])
    with pytest.raises(LimitReachedError, match="3 queries"):
        harness.store.lookup(worker.session_id, [query] * 3)
    with pytest.raises(LimitReachedError, match="6 digests"):
        worker.lease(chain)
    leases = [worker.lease(chain[:1]) for _ in range(3)]
    with pytest.raises(LimitReachedError, match="3 leases"):
        worker.lease(chain[:1])
    worker.release(*leases)
    assert worker.lease(chain[:1]).blocks == 1


def test_reads_are_checked_against_lease_and_block() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    worker.write(digest_chain(1))
    lease = worker.lease(digest_chain(1))
    size = harness.block_bytes
    for block, offset, nbytes in ((1, 0, 1), (-1, 0, 1), (0, size, 1), (0, -1, 1), (0, 0, size + 1), (0, 5, -1)):
        with pytest.raises(InvalidRequestError, match="expected"):
            harness.store.read_payload(worker.session_id, lease.lease_id, block, offset, nbytes)
    assert harness.store.read_payload(worker.session_id, lease.lease_id, 0, size, 0) == b""


def corrupt(harness: StoreHarness, digest: bytes) -> None:
    for namespace in harness.store._state.namespaces.values():
        node = namespace.index.get(digest)
        if node is not None:
            node.slab.payload(node.slot)[-1] ^= 1


def test_damage_takes_the_block_and_all_behind_it_and_nothing_else() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain, branch = digest_chain(6), digest_chain(2, "other")
    worker.write(chain)
    worker.write(branch)
    lease = worker.lease(chain)
    corrupt(harness, chain[2])
    report = b"".join(chain + branch)
    assert harness.store.report_damage(worker.session_id, worker.namespace_id, report) == 4
    assert (worker.held(chain), worker.held(branch)) == (2, 2)
    assert worker.lease(chain).miss_reason is MissReason.DAMAGED
    # What is leased stays where it is until the lease ends.
    assert worker.read(lease)[4] == block_content(chain[4], harness.block_bytes)
    stats = harness.store.stats()
    assert (stats.counters.damaged, stats.devices[0].slots_condemned) == (1, 4)
    harness.assert_clean()
    worker.release(lease)
    assert harness.store.stats().devices[0].slots_condemned == 0
    # Written again it is held again, and no longer called damaged.
    assert worker.write(chain) == [False, False, True, True, True, True]
    assert worker.lease(chain).miss_reason is MissReason.COMPLETE
    harness.assert_clean()


def test_the_rest_of_a_condemned_chain_stays_protected_by_the_lease() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    chain = digest_chain(5)
    worker.write(chain)
    lease = worker.lease(chain)
    corrupt(harness, chain[3])
    harness.store.report_damage(worker.session_id, worker.namespace_id, chain[3])
    harness.assert_clean()
    # Three slots are free; the two condemned and the three leased ones must not be given away.
    assert len(worker.reserve([], anonymous=8).slots) == 3
    assert worker.held(chain) == 3
    assert len(worker.read(lease)) == 5
    assert worker.release(lease) == 1
    harness.assert_clean()
    assert len(worker.reserve([], anonymous=8).slots) == 5


def test_two_leases_of_different_depth_on_a_condemned_chain() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(6)
    worker.write(chain)
    deep, shallow = worker.lease(chain), worker.lease(chain[:3])
    harness.store.evict(worker.namespace_id, include_pinned=False)
    harness.assert_clean()
    worker.release(deep)
    assert harness.store.stats().devices[0].slots_condemned == 3
    worker.release(shallow)
    assert harness.store.stats().devices[0].slots_condemned == 0
    harness.assert_clean()


def test_the_background_check_condemns_what_is_damaged() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(5)
    worker.write(chain)
    corrupt(harness, chain[1])
    steps = harness.store.verify_payloads()
    assert next(steps) is True
    assert next(steps) is False
    # The rest went with the damaged one: nothing is left to read.
    assert list(steps) == []
    assert worker.held(chain) == 1


def test_pins_protect_a_chain_until_they_are_lifted() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    chain = digest_chain(3)
    worker.write(chain)
    assert harness.store.pin(worker.session_id, worker.namespace_id, chain[2], True) == 3
    assert harness.store.namespaces()[0].pinned_chains == 1
    for number in range(4):
        worker.write(digest_chain(5, str(number)))
    assert worker.held(chain) == 3
    assert harness.store.pin_chain(worker.namespace_id, chain[2], False) == 3
    assert all(worker.write(digest_chain(8, "big")))
    assert worker.held(chain) == 0
    with pytest.raises(NotHeldError, match="Prewarm"):
        harness.store.pin(worker.session_id, worker.namespace_id, chain[2], True)
    assert harness.store.namespaces()[0].pinned_chains == 0


def test_blocks_with_a_larger_error_count_as_not_held() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    store, chain = harness.store, digest_chain(5)
    entries = worker.fill(worker.reserve(chain[:4]), chain[:4])
    errors = [0.01, 0.0, 0.5, 0.02]
    worker.commit([replace(entry, error=error) for entry, error in zip(entries, errors, strict=True)])
    for bound, blocks in ((1.0, 4), (0.5, 4), (0.49, 2), (0.01, 2), (0.005, 0), (0.0, 0)):
        query = Query(worker.namespace_id, b"".join(chain), bound)
        reason = MissReason.NOT_FOUND if blocks == 4 else MissReason.FIDELITY
        for found in (store.lookup(worker.session_id, [query])[0],
                      store.lookup_and_lease(worker.session_id, [query])[0]):  # fmt: skip
            assert (found.blocks, found.miss_reason) == (blocks, reason)
    assert worker.lease(chain).blocks == 4
    assert worker.lease(chain[:3]).miss_reason is MissReason.COMPLETE
    (shown,) = store.namespaces()
    assert (shown.largest_error, shown.mean_error) == (0.5, pytest.approx(0.1325))
    assert not store.check_integrity()
    with pytest.raises(InvalidRequestError, match="max_block_error"):
        store.lookup(worker.session_id, [Query(worker.namespace_id, b"", float("nan"))])


def test_who_waits_for_a_writer_does_not_wait_behind_a_block_it_would_not_take() -> None:
    harness = StoreHarness()
    writer, reader = harness.worker("w"), harness.worker("r")
    chain = digest_chain(2)
    (entry,) = writer.fill(writer.reserve(chain[:1]), chain[:1])
    writer.commit([replace(entry, error=0.5)])
    writer.reserve(chain[1:])
    place = (reader.session_id, reader.namespace_id, b"".join(chain))
    assert harness.store.in_flight_digest(*place) == chain[1]
    assert harness.store.in_flight_digest(*place, 0.4) is None


@pytest.mark.parametrize("error", [-0.1, float("nan"), float("inf")])
def test_errors_that_are_none_are_refused(error: float) -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(1)
    (entry,) = worker.fill(worker.reserve(chain), chain)
    with pytest.raises(InvalidRequestError, match="finite number from 0 on"):
        worker.commit([replace(entry, error=error)])
    assert worker.held(chain) == 0
