"""Where slots come from: growth, eviction, take-over, downgrade, budget between namespaces, draining."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import InvalidRequestError, NotHeldError, OutOfMemoryError
from kvstore.store import CommitEntry, Quota, QuotaRule
from kvstore.store.events import DowngradeRequested, SlabGone, UnmapRequested, WriterChanged
from kvstore.store.sizing import GRANULE
from kvstore.testing import FakeSlabMemory, FakeWorker, StoreHarness, block_content, digest_chain

# Three slots fill a slab of 2 MiB but for an eighth of a slot.
THIRD = 682 << 10


def used(harness: StoreHarness) -> int:
    return harness.store.stats().devices[0].used_bytes


def test_b142_the_end_of_a_chain_goes_first() -> None:
    harness = StoreHarness(slabs=1, block_bytes=THIRD)
    worker = harness.worker()
    chain = digest_chain(3)
    worker.write(chain)
    assert worker.write(digest_chain(1, "new")) == [True]
    assert worker.held(chain) == 2
    assert worker.held(digest_chain(1, "new")) == 1
    harness.assert_clean()


def test_the_least_recently_used_chain_goes_first() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    chains = [digest_chain(2, str(number)) for number in range(4)]
    for chain in chains:
        worker.write(chain)
    for number in (0, 2):
        worker.release(worker.lease(chains[number]))
    worker.write(digest_chain(4, "new"))
    assert [worker.held(chain) for chain in chains] == [2, 0, 2, 0]


def test_a_parent_inherits_the_recency_of_its_child() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    recent, older = digest_chain(4, "recent"), digest_chain(4, "older")
    worker.write(recent)
    worker.write(older)
    lease = worker.lease(older)
    worker.release(worker.lease(recent))
    # While `older` is leased, the end of `recent` has to go.
    worker.write(digest_chain(1, "new"))
    worker.release(lease)
    assert (worker.held(recent), worker.held(older)) == (3, 4)
    # What is left of `recent` was used when its end was: later than `older`.
    worker.write(digest_chain(1, "newer"))
    assert (worker.held(recent), worker.held(older)) == (3, 3)


def test_leased_and_pinned_chains_are_never_evicted() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    leased, pinned = digest_chain(3, "leased"), digest_chain(3, "pinned")
    worker.write(leased)
    worker.write(pinned)
    lease = worker.lease(leased)
    harness.store.pin(worker.session_id, worker.namespace_id, pinned[-1], True)
    for number in range(20):
        worker.write(digest_chain(4, str(number)))
    assert (worker.held(leased), worker.held(pinned)) == (3, 3)
    assert worker.read(lease) == [block_content(digest, harness.block_bytes) for digest in leased]
    harness.assert_clean()


def test_b054_endless_writes_stay_within_the_budget() -> None:
    harness = StoreHarness(slabs=3)
    worker = harness.worker()
    budget = harness.store.stats().devices[0].budget_bytes
    for number in range(60):
        assert all(worker.write(digest_chain(5, str(number))))
        assert used(harness) <= budget
    # All memory ever made: three slabs and the ledger.
    assert sum(memory.nbytes for memory in harness.device.created) == used(harness) == budget
    assert worker.held(digest_chain(5, "59")) == 5
    harness.assert_clean()


def test_b129_victims_under_random_load_are_never_in_use() -> None:
    harness = StoreHarness(slabs=2, block_bytes=400 << 10)
    workers = [harness.worker(f"w{number}") for number in range(4)]
    choice = random.Random(129)
    leases: list[tuple[FakeWorker, object, list[bytes]]] = []
    for _ in range(400):
        worker = choice.choice(workers)
        chain = digest_chain(choice.randint(1, 4), str(choice.randrange(8)))
        worker.write(chain)
        lease = worker.lease(chain)
        if lease.lease_id:
            leases.append((worker, lease, chain))
        if len(leases) > 3:
            holder, old, digests = leases.pop(choice.randrange(len(leases)))
            data = holder.read(old)  # type: ignore[arg-type]
            assert data == [block_content(d, harness.block_bytes) for d in digests[: len(data)]]
            holder.release(old)  # type: ignore[arg-type]
    harness.assert_clean()


def test_b132_what_can_be_evicted_can_be_had_at_once() -> None:
    harness = StoreHarness(slabs=2)
    worker = harness.worker()
    for number in range(4):
        worker.write(digest_chain(4, str(number)))
    long = worker.reserve([], anonymous=16)
    assert len(long.slots) == 16
    assert worker.reserve([], anonymous=1).short_reason
    worker.give_back(long)
    assert worker.reserve([], anonymous=16).short_reason == ""


def test_the_store_grows_before_it_evicts() -> None:
    harness = StoreHarness(slabs=4)
    worker = harness.worker()
    chains = [digest_chain(8, str(number)) for number in range(4)]
    for chain in chains:
        worker.write(chain)
    assert [worker.held(chain) for chain in chains] == [8] * 4
    assert harness.store.stats().counters.evictions == 0


def test_a_failed_allocation_falls_back_to_eviction_and_is_tried_again_later() -> None:
    harness = StoreHarness(slabs=3, slab_retry_s=5.0)
    worker = harness.worker()
    harness.device.fail_next()
    answer = worker.reserve([], anonymous=2)
    assert answer.slots == []
    assert "as the test ordered" in answer.short_reason
    assert used(harness) == 0
    harness.clock.advance(5.1)
    assert all(worker.write(digest_chain(8)))
    harness.device.fail_next()
    assert all(worker.write(digest_chain(8, "new")))
    assert worker.held(digest_chain(8)) == 0
    harness.assert_clean()


def test_a_ledger_that_cannot_be_made_ends_the_request() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    request = harness.store.prepare_slab(worker.session_id, worker.namespace_id)
    assert request is not None
    assert harness.store.prepare_slab(worker.session_id, worker.namespace_id) is request
    harness.device.fail_next()
    memory = FakeSlabMemory(request.nbytes)
    with pytest.raises(OutOfMemoryError):
        harness.store.add_slab(request, memory)
    assert used(harness) == 0
    assert not memory.closed
    with pytest.raises(InvalidRequestError, match="exactly once"):
        harness.store.slab_failed(request, "again")
    harness.assert_clean()


def test_a_slab_of_another_size_is_refused_and_a_late_one_is_kept() -> None:
    harness = StoreHarness()
    worker, other = harness.worker("a"), harness.worker("b")
    request = harness.store.prepare_slab(worker.session_id, worker.namespace_id)
    assert request is not None
    with pytest.raises(InvalidRequestError, match=f"expected {request.nbytes}"):
        harness.store.add_slab(request, FakeSlabMemory(request.nbytes - 1))
    worker.die()
    slab_id = harness.store.add_slab(request, FakeSlabMemory(request.nbytes))
    # Its session is dead: whoever comes next writes it.
    assert set(other.reserve([], anonymous=8).slab_ids) == {slab_id}
    harness.assert_clean()


def test_prepared_slabs_are_not_made_twice() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    request = harness.store.prepare_slab(worker.session_id, worker.namespace_id)
    assert request is not None
    harness.store.add_slab(request, FakeSlabMemory(request.nbytes))
    assert harness.store.prepare_slab(worker.session_id, worker.namespace_id) is None
    assert len(worker.reserve([], anonymous=8).slots) == 8


def test_the_slabs_of_a_dead_writer_are_taken_over_with_what_they_hold() -> None:
    harness = StoreHarness(slabs=1)
    first, second = harness.worker("a"), harness.worker("b")
    chain = digest_chain(6)
    first.write(chain)
    private = first.reserve([], anonymous=1)
    assert second.reserve([], anonymous=2).slots == []
    first.die()
    answer = second.reserve([], anonymous=4)
    assert len(answer.slots) == 4
    assert set(answer.slab_ids) == set(private.slab_ids)
    assert WriterChanged(private.slab_ids[0], second.session_id) in harness.events
    # Two slots were free, so that two leaves had to go.
    assert second.held(chain) == 4
    harness.assert_clean()


def test_a_writer_is_asked_to_downgrade_and_nobody_waits() -> None:
    harness = StoreHarness(slabs=2)
    rich = harness.worker("rich", obedient=False)
    rich.write(digest_chain(16))
    poor = harness.worker("poor")
    answer = poor.reserve([], anonymous=2)
    assert answer.slots == []
    assert "handed over" in answer.short_reason
    (request,) = [event for event in harness.events if isinstance(event, DowngradeRequested)]
    assert request.session_id == rich.session_id
    # Asking again does not take more, and the slab is no longer written to.
    assert poor.reserve([], anonymous=2).slots == []
    assert len([event for event in harness.events if isinstance(event, DowngradeRequested)]) == 1
    assert set(rich.reserve([], anonymous=16).slab_ids).isdisjoint(request.slab_ids)
    harness.assert_clean()
    rich.answer()
    assert WriterChanged(request.slab_ids[0], poor.session_id) in harness.events
    assert set(poor.reserve([], anonymous=2).slab_ids) == set(request.slab_ids)
    harness.assert_clean()


def test_slabs_with_private_slots_are_not_asked_for() -> None:
    harness = StoreHarness(slabs=1)
    rich, poor = harness.worker("rich"), harness.worker("poor")
    rich.write(digest_chain(7))
    rich.reserve([], anonymous=1)
    assert "in use" in poor.reserve([], anonymous=1).short_reason
    assert not [event for event in harness.events if isinstance(event, DowngradeRequested)]


@pytest.mark.parametrize("who", ["the writer", "the other"])
def test_a_downgrade_whose_partner_dies(who: str) -> None:
    harness = StoreHarness(slabs=1)
    rich = harness.worker("rich", obedient=False)
    rich.write(digest_chain(8))
    poor = harness.worker("poor")
    poor.reserve([], anonymous=2)
    if who == "the writer":
        rich.die()
        assert len(poor.reserve([], anonymous=2).slots) == 2
    else:
        poor.die()
        assert len(rich.reserve([], anonymous=2).slots) == 2
    harness.assert_clean()


def test_a_writer_that_maps_nothing_is_not_asked() -> None:
    harness = StoreHarness(slabs=1)
    rich, poor = harness.worker("rich", transport="bytes", obedient=False), harness.worker("poor")
    rich.write(digest_chain(8))
    assert len(poor.reserve([], anonymous=2).slots) == 2
    harness.assert_clean()


def test_a_second_namespace_gets_its_share_from_the_first() -> None:
    harness = StoreHarness(slabs=4, ledgers=2)
    first = harness.worker("first")
    chain = digest_chain(32)
    assert all(first.write(chain))
    second = harness.worker("second", tenant="other")
    for number in range(6):
        second.write(digest_chain(8, str(number)))
    shares = {stats.tenant: stats.slabs for stats in harness.store.namespaces()}
    assert shares == {"tenant": 2, "other": 2}
    # Neither takes from the other any more.
    for number in range(6):
        assert all(first.write(digest_chain(8, str(number))))
        assert all(second.write(digest_chain(8, str(number))))
    assert {stats.tenant: stats.slabs for stats in harness.store.namespaces()} == shares
    harness.assert_clean()


def test_freed_budget_goes_to_the_namespace_it_was_freed_for() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    rich = harness.worker("rich", obedient=False)
    rich.write(digest_chain(16))
    poor = harness.worker("poor", tenant="other")
    assert "moved from another namespace" in poor.reserve([], anonymous=1).short_reason
    (request,) = [event for event in harness.events if isinstance(event, UnmapRequested)]
    assert request.session_id == rich.session_id
    assert harness.store.stats().devices[0].slabs_draining == 1
    rich.answer()
    assert harness.store.stats().devices[0].slabs_draining == 0
    # The rich one wants it back at once, and does not get it.
    rich.reserve([], anonymous=16)
    assert len(poor.reserve([], anonymous=8).slots) == 8
    harness.assert_clean()


def test_b163_memory_never_passes_to_another_namespace() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    first = harness.worker("first")
    first.write(digest_chain(16))
    old = [memory for memory in harness.device.created if memory.nbytes == GRANULE]
    second = harness.worker("second", tenant="other")
    assert "another namespace" in second.reserve([], anonymous=1).short_reason
    answer = second.reserve([], anonymous=1)
    gone = [event for event in harness.events if isinstance(event, SlabGone)]
    assert len(gone) == 1
    assert gone[0].memory in old
    assert old[old.index(gone[0].memory)].discarded  # type: ignore[arg-type]
    slab = harness.store._state.slabs[answer.slab_ids[0]]
    assert slab.memory not in old
    assert bytes(slab.payload(answer.slots[0])) == bytes(harness.block_bytes)


def test_an_acknowledgement_while_a_lease_lasts_is_asked_for_again() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    first = harness.worker("first", obedient=False)
    chain = digest_chain(16)
    first.write(chain)
    lease = first.lease(chain)
    second = harness.worker("second", tenant="other")
    second.reserve([], anonymous=1)
    (request,) = first.refused
    assert isinstance(request, UnmapRequested)
    harness.store.unmapped(first.session_id, request.slab_ids)
    # It still has the right to map the slab for its lease: the slab is not gone when the lease is.
    first.release(lease)
    assert harness.store.stats().devices[0].slabs_draining == 1
    assert first.refused == [request, request]
    harness.assert_clean()
    first.answer()
    assert harness.store.stats().devices[0].slabs_draining == 0
    assert len(second.reserve([], anonymous=1).slots) == 1


def test_leased_blocks_of_a_draining_slab_can_be_read_until_released() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    first = harness.worker("first")
    chain = digest_chain(16)
    first.write(chain)
    lease = first.lease(chain)
    second = harness.worker("second", tenant="other")
    assert second.reserve([], anonymous=1).slots == []
    device = harness.store.stats().devices[0]
    assert (device.slabs_draining, device.slots_condemned) == (1, 16 - first.held(chain))
    assert first.read(lease) == [block_content(digest, harness.block_bytes) for digest in chain]
    harness.assert_clean()
    # The worker had acknowledged while it still read: it is asked again when its lease has ended.
    first.release(lease)
    assert harness.store.stats().devices[0].slabs_draining == 0
    assert len(second.reserve([], anonymous=1).slots) == 1
    harness.assert_clean()


def test_a_namespace_nobody_uses_gives_way_entirely() -> None:
    harness = StoreHarness(slabs=3, ledgers=2)
    first = harness.worker("first")
    first.write(digest_chain(24))
    first.die()
    second = harness.worker("second", tenant="other")
    assert all(second.write(digest_chain(24)))
    assert [stats.tenant for stats in harness.store.namespaces()] == ["other"]
    harness.assert_clean()


def test_pinned_chains_are_not_taken_by_another_namespace() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    first = harness.worker("first")
    chain = digest_chain(16)
    first.write(chain)
    harness.store.pin(first.session_id, first.namespace_id, chain[-1], True)
    second = harness.worker("second", tenant="other")
    assert second.reserve([], anonymous=1).slots == []
    assert first.held(chain) == 16
    harness.assert_clean()


def test_quotas_bound_a_namespace_and_guarantee_bytes() -> None:
    slab_and_ledger = 2 * GRANULE + (64 << 10)
    rules = (
        QuotaRule(tenant="capped", quota=Quota(maximum=slab_and_ledger)),
        QuotaRule(tenant="safe", quota=Quota(guaranteed=4 * GRANULE)),
    )
    harness = StoreHarness(slabs=5, ledgers=3, quotas=rules)
    capped = harness.worker("c", tenant="capped")
    for number in range(5):
        assert all(capped.write(digest_chain(8, str(number))))
    assert "maximum" in capped.reserve([], anonymous=17).short_reason
    safe = harness.worker("s", tenant="safe")
    assert all(safe.write(digest_chain(24)))
    greedy = harness.worker("g", tenant="greedy")
    greedy.reserve([], anonymous=40)
    stats = {stats.tenant: stats for stats in harness.store.namespaces()}
    assert stats["safe"].slabs == 3
    assert stats["capped"].slab_bytes <= slab_and_ledger
    assert stats["capped"].max_bytes == slab_and_ledger
    assert stats["safe"].guaranteed_bytes == 4 * GRANULE
    assert safe.held(digest_chain(24)) == 24
    harness.assert_clean()


def test_without_a_watched_process_every_slab_it_mapped_drains() -> None:
    harness = StoreHarness(slabs=3)
    watched = harness.worker("watched")
    blind = harness.worker("blind", watched=False)
    chain = digest_chain(4)
    watched.write(chain)
    private = watched.reserve([], anonymous=1)
    blind.lease(chain)
    harness.store.end_lease_grace(blind.session_id, "stream over, grace over")
    harness.settle()
    # Nobody may write where the lost worker may still read: not even into the free slots.
    assert watched.held(chain) == 0
    assert private.slab_ids[0] not in watched.reserve([], anonymous=8).slab_ids
    harness.assert_clean()
    assert watched.give_back(private) == 1
    (gone,) = [event for event in harness.events if isinstance(event, SlabGone)]
    assert gone.slab_id == private.slab_ids[0]
    assert isinstance(gone.memory, FakeSlabMemory)
    assert not gone.memory.discarded, "its pages must not change under the lost worker"
    harness.assert_clean()


def test_a_bytes_session_that_is_not_watched_drains_nothing() -> None:
    harness = StoreHarness()
    writer, reader = harness.worker("w"), harness.worker("r", watched=False, transport="bytes")
    chain = digest_chain(2)
    writer.write(chain)
    reader.lease(chain)
    harness.store.end_lease_grace(reader.session_id, "grace over")
    harness.settle()
    assert writer.held(chain) == 2
    assert harness.store.stats().leases == 0


def test_unmapping_a_live_slab_makes_it_anybodys() -> None:
    harness = StoreHarness(slabs=1)
    first, second = harness.worker("a"), harness.worker("b")
    first.write(digest_chain(2))
    slab_id = first.reserve([], anonymous=0).slab_ids or [1]
    harness.store.unmapped(first.session_id, [*slab_id, 99])
    assert len(second.reserve([], anonymous=6).slots) == 6
    assert harness.store.stream_ended(first.session_id)
    harness.assert_clean()


def test_b185_evict_says_what_it_did() -> None:
    harness = StoreHarness(slabs=3)
    worker = harness.worker()
    free, leased, pinned = digest_chain(3, "free"), digest_chain(4, "leased"), digest_chain(5, "pinned")
    for chain in (free, leased, pinned):
        worker.write(chain)
    lease = worker.lease(leased)
    harness.store.pin(worker.session_id, worker.namespace_id, pinned[-1], True)
    result = harness.store.evict(worker.namespace_id, include_pinned=False)
    assert (result.freed, result.condemned, result.pinned) == (3, 4, 5)
    assert [worker.held(chain) for chain in (free, leased, pinned)] == [0, 0, 5]
    result = harness.store.evict(worker.namespace_id, include_pinned=True)
    assert (result.freed, result.condemned, result.pinned) == (5, 0, 0)
    assert worker.held(pinned) == 0
    worker.release(lease)
    (stats,) = harness.store.namespaces()
    assert (stats.committed, stats.condemned, stats.private, stats.free, stats.pinned_chains) == (0, 0, 0, 16, 0)
    with pytest.raises(NotHeldError, match="namespace 99"):
        harness.store.evict(99, include_pinned=False)
    harness.assert_clean()


def test_statistics_are_exact() -> None:
    harness = StoreHarness(slabs=2)
    worker = harness.worker()
    worker.write(digest_chain(3))
    worker.lease(digest_chain(5))
    worker.reserve([], anonymous=2)
    stats = harness.store.stats()
    (device,) = stats.devices
    assert (device.slots_free, device.slots_private, device.slots_committed, device.slots_condemned) == (3, 2, 3, 0)
    assert (device.slabs_live, device.slabs_draining) == (1, 0)
    assert device.used_bytes == sum(memory.nbytes for memory in harness.device.created)
    counters = stats.counters
    assert (counters.lookups, counters.lookup_tokens, counters.hit_tokens, counters.commits) == (1, 320, 192, 3)
    assert (stats.leases, stats.sessions) == (1, 1)
    (namespace,) = harness.store.namespaces()
    assert (namespace.committed, namespace.private, namespace.free, namespace.sessions) == (3, 2, 3, 1)
    # What the snapshot says does not change with the store.
    worker.write(digest_chain(1, "later"))
    assert counters.commits == 3


def test_a_promised_slab_gives_its_writer_no_more_slots() -> None:
    harness = StoreHarness(slabs=1)
    rich, poor = harness.worker("rich", obedient=False), harness.worker("poor")
    rich.write(digest_chain(3))
    assert poor.reserve([], anonymous=1).slots == []
    # Five slots are free in it, but its writer may map it read-only at any moment.
    assert rich.reserve([], anonymous=1).slots == []
    rich.answer()
    assert len(poor.reserve([], anonymous=5).slots) == 5
    harness.assert_clean()


def test_slabs_with_private_slots_are_not_moved_to_another_namespace() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    first, second = harness.worker("first"), harness.worker("second", tenant="other")
    private = first.reserve([], anonymous=16)
    assert second.reserve([], anonymous=1).slots == []
    assert harness.store.stats().devices[0].slabs_draining == 0
    assert first.give_back(private) == 16
    second.reserve([], anonymous=1)
    assert len(second.reserve([], anonymous=1).slots) == 1
    harness.assert_clean()


def test_nothing_is_committed_into_a_draining_slab() -> None:
    harness = StoreHarness()
    writer, blind = harness.worker("w"), harness.worker("blind", watched=False)
    chain = digest_chain(3)
    entries = writer.fill(writer.reserve(chain), chain)
    writer.commit(entries[:1])
    blind.lease(chain)
    harness.store.end_lease_grace(blind.session_id, "grace over")
    harness.settle()
    fresh = digest_chain(1, "fresh")
    assert writer.commit(entries[1:]) == [False, False]
    root = [CommitEntry(e.slab_id, e.slot, e.generation, fresh[0], bytes(32), e.checksum) for e in entries[1:2]]
    assert writer.commit(root) == [False]
    harness.assert_clean()
    assert writer.give_back(entries) == 3
    assert harness.store.stats().devices[0].slabs_draining == 0
