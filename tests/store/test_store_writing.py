"""Reserve, commit, abort."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequestError, LimitReachedError, NotHeldError, SlotNotOwnedError
from kvstore.store import CommitEntry, MissReason, ReserveStatus, SlotRef
from kvstore.testing import StoreHarness, digest_chain

WRITE, COMMITTED, IN_FLIGHT = ReserveStatus.WRITE, ReserveStatus.COMMITTED, ReserveStatus.IN_FLIGHT


def test_every_digest_gets_a_slot_whatever_its_status() -> None:
    harness = StoreHarness()
    first, second = harness.worker("a"), harness.worker("b")
    chain = digest_chain(3)
    first.write(chain[:1])
    first.reserve(chain[1:2])
    harness.clock.advance(1.25)
    answer = second.reserve(chain, anonymous=2)
    assert answer.statuses == [COMMITTED, IN_FLIGHT, WRITE]
    assert answer.in_flight_age_ms == [0, 1250, 0]
    assert len(answer.slots) == 5
    assert answer.short_reason == ""


def test_slots_come_as_one_ascending_run() -> None:
    harness = StoreHarness(slabs=2, block_bytes=16 << 10)
    worker = harness.worker()
    first = worker.reserve([], anonymous=20)
    second = worker.reserve([], anonymous=3)
    assert first.slots == list(range(20))
    assert second.slots == [20, 21, 22]
    harness.store.abort(worker.session_id, [SlotRef(first.slab_ids[0], slot, 1) for slot in (3, 7, 8)])
    # Three side by side are better than the three holes.
    assert worker.reserve([], anonymous=3).slots == [23, 24, 25]
    assert worker.reserve([], anonymous=1).slots == [3]


def test_in_flight_ends_with_commit_abort_and_death() -> None:
    harness = StoreHarness()
    writer, reader = harness.worker("w"), harness.worker("r")
    chain = digest_chain(4)
    reservation = writer.reserve(chain)
    entries = writer.fill(reservation, chain)
    heard: list[tuple[int, bool]] = []
    for number, digest in enumerate(chain):
        harness.store.watch_digest(
            writer.namespace_id, digest, lambda committed, number=number: heard.append((number, committed))
        )
    assert reader.lease(chain).miss_reason is MissReason.IN_FLIGHT
    assert harness.store.in_flight_digest(reader.session_id, reader.namespace_id, b"".join(chain)) == chain[0]
    # The writer itself need not wait for itself.
    assert writer.lease(chain).miss_reason is MissReason.NOT_FOUND
    writer.commit(entries[:1])
    assert heard == [(0, True)]
    assert harness.store.in_flight_digest(reader.session_id, reader.namespace_id, b"".join(chain)) == chain[1]
    writer.give_back(entries[1:2])
    assert heard[1:] == [(1, False)]
    assert reader.lease(chain).miss_reason is MissReason.NOT_FOUND
    writer.die()
    assert sorted(heard[2:]) == [(2, False), (3, False)]
    harness.assert_clean()


def test_a_watch_can_be_cancelled_and_answers_at_once_when_nothing_is_in_flight() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    heard: list[bool] = []
    harness.store.watch_digest(worker.namespace_id, chain[0], heard.append)()
    assert heard == [False]
    worker.write(chain[:1])
    harness.store.watch_digest(worker.namespace_id, chain[0], heard.append)
    assert heard == [False, True]
    reservation = worker.reserve(chain[1:])
    cancel = harness.store.watch_digest(worker.namespace_id, chain[1], heard.append)
    cancel()
    cancel()
    worker.give_back(reservation)
    assert heard == [False, True]
    with pytest.raises(NotHeldError):
        harness.store.watch_digest(99, chain[0], heard.append)


def test_one_session_may_write_a_digest_twice() -> None:
    harness = StoreHarness()
    worker, other = harness.worker("a"), harness.worker("b")
    chain = digest_chain(1)
    first, second = worker.reserve(chain), worker.reserve(chain)
    assert (first.statuses, second.statuses) == ([WRITE], [WRITE])
    worker.give_back(first)
    assert other.reserve(chain).statuses == [IN_FLIGHT]
    worker.give_back(second)
    assert other.reserve(chain).statuses == [WRITE]
    harness.assert_clean()


def test_b147_eight_workers_write_the_same_prefix_one_copy_stays() -> None:
    harness = StoreHarness(slabs=16)
    workers = [harness.worker(f"w{number}") for number in range(8)]
    chain = digest_chain(6)
    reservations = [worker.reserve(chain) for worker in workers]
    assert [r.statuses[0] for r in reservations] == [WRITE] + [IN_FLIGHT] * 7
    written = [w.fill(r, chain) for w, r in zip(workers, reservations, strict=True)]
    outcomes = [w.commit(e) for w, e in zip(workers, written, strict=True)]
    assert outcomes[0] == [True] * 6
    assert outcomes[1:] == [[False] * 6] * 7
    # The losers keep their slots as private ones, until they give them back.
    device = harness.store.stats().devices[0]
    assert (device.slots_committed, device.slots_private) == (6, 42)
    for worker, reservation in zip(workers, reservations, strict=True):
        assert worker.give_back(reservation) == 6
    stats = harness.store.stats()
    assert (stats.devices[0].slots_committed, stats.devices[0].slots_private) == (6, 0)
    assert (stats.counters.commits, stats.counters.commit_losses) == (6, 42)
    harness.assert_clean()


def test_commit_can_be_repeated() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(3)
    entries = worker.fill(worker.reserve(chain), chain)
    assert worker.commit(entries) == worker.commit(entries) == [True] * 3
    worker.give_back(entries)
    # Also after the hold has ended, as long as the block is there.
    assert worker.commit(entries) == [True] * 3
    assert harness.store.stats().counters.commits == 3


@pytest.mark.parametrize("failure", ["abort", "kill", "never committed"])
def test_b105_only_committed_blocks_are_visible(failure: str) -> None:
    harness = StoreHarness()
    writer, reader = harness.worker("w"), harness.worker("r")
    chain = digest_chain(4)
    entries = writer.fill(writer.reserve(chain), chain)
    writer.commit(entries[:2])
    if failure == "abort":
        writer.give_back(entries[2:])
    elif failure == "kill":
        writer.die()
    assert reader.held(chain) == 2
    assert len(reader.read(reader.lease(chain))) == 2
    harness.assert_clean()


def test_a_block_without_its_parent_stays_private() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(3)
    entries = worker.fill(worker.reserve(chain), chain)
    assert worker.commit(entries[1:]) == [False, False]
    assert worker.commit(entries[:2]) == [True, True]
    harness.store.evict(worker.namespace_id, include_pinned=True)
    assert worker.commit(entries[2:]) == [False]
    # The evicted blocks are still held by their writer: condemned, and a repeat says that they are gone.
    assert worker.commit(entries[:2]) == [False, False]
    harness.assert_clean()
    assert worker.give_back(entries) == 3
    assert harness.store.stats().devices[0].slots_condemned == 0


def test_what_a_writer_committed_stays_until_it_gives_the_slot_back() -> None:
    harness = StoreHarness(slabs=1)
    worker, other = harness.worker("a"), harness.worker("b", transport="bytes")
    chain = digest_chain(8)
    entries = worker.fill(worker.reserve(chain), chain)
    worker.commit(entries)
    # The writer may read its blocks in place: none of them can be evicted.
    assert worker.reserve([], anonymous=1).slots == []
    assert other.reserve([], anonymous=1).slots == []
    assert worker.held(chain) == 8
    worker.give_back(entries[-2:])
    assert len(worker.reserve([], anonymous=8).slots) == 2
    assert worker.held(chain) == 6
    harness.assert_clean()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"generation": 99}, SlotNotOwnedError),
        ({"slot": 7}, SlotNotOwnedError),
        ({"slot": 1 << 31}, SlotNotOwnedError),
        ({"slot": -1}, SlotNotOwnedError),
        ({"slab_id": 99}, SlotNotOwnedError),
        ({"digest": bytes(32)}, InvalidRequestError),
        ({"digest": b"short"}, InvalidRequestError),
        ({"parent": b""}, InvalidRequestError),
        ({"parent": digest_chain(2)[1]}, InvalidRequestError),
        ({"checksum": 1 << 64}, InvalidRequestError),
        ({"checksum": -1}, InvalidRequestError),
    ],
    ids=str,
)
def test_b161_a_commit_with_one_bad_entry_changes_nothing(change: dict[str, object], error: type[Exception]) -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    entries = worker.fill(worker.reserve(chain), chain)
    bad = replace(entries[1], **change)  # type: ignore[arg-type]
    with pytest.raises(error, match=r"[Ee]xpected"):
        worker.commit([entries[0], bad])
    assert worker.held(chain) == 0
    assert worker.commit(entries) == [True, True]
    harness.assert_clean()


def test_one_slot_cannot_become_two_blocks() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    first, _ = worker.fill(worker.reserve(chain), chain)
    twice = CommitEntry(first.slab_id, first.slot, first.generation, chain[1], chain[0], 1)
    with pytest.raises(InvalidRequestError, match="two digests"):
        worker.commit([first, twice])
    assert worker.commit([first]) == [True]
    with pytest.raises(SlotNotOwnedError, match="committed"):
        worker.commit([twice])
    harness.assert_clean()


def test_b161_foreign_slots_cannot_be_committed_aborted_or_written() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    owner, thief, stranger = harness.worker("a"), harness.worker("b"), harness.worker("c", tenant="other")
    chain = digest_chain(1)
    reservation = owner.reserve(chain)
    (entry,) = owner.fill(reservation, chain)
    for worker in (thief, stranger):
        with pytest.raises(SlotNotOwnedError):
            worker.commit([entry])
        assert worker.give_back(reservation) == 0
        ref = SlotRef(entry.slab_id, entry.slot, entry.generation)
        with pytest.raises(SlotNotOwnedError):
            harness.store.write_payload(worker.session_id, ref, 0, b"x")
    assert owner.commit([entry]) == [True]


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, (256 << 10) + 1), (256 << 10, 1)])
def test_b161_writes_stay_within_the_slot(offset: int, size: int) -> None:
    harness = StoreHarness()
    worker = harness.worker()
    reservation = worker.reserve([], anonymous=2)
    ref = SlotRef(reservation.slab_ids[0], reservation.slots[0], reservation.generations[0])
    with pytest.raises(InvalidRequestError, match="expected a range"):
        harness.store.write_payload(worker.session_id, ref, offset, bytes(size))


def test_committed_and_returned_slots_cannot_be_written() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    entries = worker.fill(worker.reserve(chain), chain)
    worker.commit(entries[:1])
    worker.give_back(entries[1:])
    for entry in entries:
        ref = SlotRef(entry.slab_id, entry.slot, entry.generation)
        with pytest.raises(SlotNotOwnedError):
            harness.store.write_payload(worker.session_id, ref, 0, b"x")


def test_b118_aborting_twice_or_a_reused_slot_is_harmless() -> None:
    harness = StoreHarness(slabs=1)
    worker, other = harness.worker("a"), harness.worker("b")
    old = worker.reserve([], anonymous=2)
    assert (worker.give_back(old), worker.give_back(old)) == (2, 0)
    worker.die()
    new = other.reserve([], anonymous=2)
    assert new.slots == old.slots
    assert new.generations == [2, 2]
    assert other.give_back(old) == 0
    assert other.give_back(new) == 2


def test_reservations_have_limits() -> None:
    harness = StoreHarness(max_query_digests=4)
    worker = harness.worker()
    with pytest.raises(LimitReachedError, match="5 slots"):
        worker.reserve(digest_chain(2), anonymous=3)
    with pytest.raises(InvalidRequestError, match="anonymous is -1"):
        worker.reserve([], anonymous=-1)
    with pytest.raises(InvalidRequestError, match="names no block"):
        worker.reserve([bytes(32)])
    assert worker.reserve([], anonymous=0).slots == []
    assert harness.store.stats().devices[0].used_bytes == 0


def test_b116_a_full_cache_declines_and_counts() -> None:
    harness = StoreHarness(slabs=2)
    worker = harness.worker()
    held = worker.reserve([], anonymous=13)
    for _ in range(50):
        answer = worker.reserve(digest_chain(5))
        assert len(answer.slots) == 3
        assert "budget" in answer.short_reason
        # Digests without a slot are not in flight: nobody will write them.
        assert answer.statuses == [WRITE] * 5
        worker.give_back(answer)
    assert harness.store.stats().counters.reserve_short == 100
    assert worker.give_back(held) == 13
    harness.assert_clean()
