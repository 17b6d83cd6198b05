"""Slabs that are allocated before anybody needs them."""

from __future__ import annotations

import pytest

from kvstore.store import Quota, QuotaRule
from kvstore.store.sizing import GRANULE
from kvstore.testing import FakeWorker, StoreHarness, digest_chain, model_spec


def ahead(worker: FakeWorker) -> int | None:
    """Allocates what the store wants ahead; the new slab's id."""
    harness = worker.harness
    request = harness.store.slab_ahead(worker.session_id, worker.namespace_id)
    if request is None:
        return None
    slab_id = harness.store.add_slab(request, harness.device.create_slab(request.nbytes))
    harness.settle()
    harness.assert_clean()
    return slab_id


def test_the_next_reservation_finds_slots_without_an_allocation() -> None:
    harness = StoreHarness(slabs=4)
    worker = harness.worker()
    worker.reserve([], anonymous=1)
    slab_id = ahead(worker)
    assert slab_id is not None
    # Seven slots are left and eight lie ahead: enough for another of this size.
    assert ahead(worker) is None
    made = len(harness.device.created)
    assert slab_id in worker.reserve([], anonymous=15).slab_ids
    assert len(harness.device.created) == made


def test_as_many_slots_lie_ready_as_the_last_reservation_took() -> None:
    harness = StoreHarness(slabs=12)
    worker = harness.worker()
    worker.reserve([], anonymous=20)
    assert harness.store.stats().devices[0].slots_free == 4
    while ahead(worker) is not None:
        pass
    assert harness.store.stats().devices[0].slots_free == 20
    for _ in range(60):
        worker.give_back(worker.reserve([], anonymous=1))
    worker.reserve([], anonymous=20)
    assert ahead(worker) is not None


def test_whoever_comes_next_gets_it() -> None:
    harness = StoreHarness(slabs=4)
    first, second = harness.worker("a"), harness.worker("b")
    first.reserve([], anonymous=8)
    slab_id = ahead(first)
    first.die()
    assert slab_id in second.reserve([], anonymous=16).slab_ids


def test_a_reservation_waits_for_the_slab_that_is_under_way() -> None:
    harness = StoreHarness(slabs=4)
    worker, other = harness.worker("a"), harness.worker("b")
    worker.reserve([], anonymous=8)
    request = harness.store.slab_ahead(worker.session_id, worker.namespace_id)
    assert request is not None
    assert harness.store.slab_ahead(other.session_id, other.namespace_id) is None
    for session in (worker, other):
        answer = harness.store.reserve(session.session_id, session.namespace_id, b"", 8)
        assert answer.needs_slab is request


def test_nothing_is_evicted_and_no_limit_passed() -> None:
    harness = StoreHarness(slabs=2)
    worker = harness.worker()
    for name in "ab":
        worker.write(digest_chain(8, name))
    assert ahead(worker) is None
    assert [worker.held(digest_chain(8, name)) for name in "ab"] == [8, 8]


def test_the_maximum_of_a_namespace_holds() -> None:
    quota = QuotaRule(quota=Quota(maximum=2 * GRANULE))
    harness = StoreHarness(slabs=8, quotas=(quota,))
    worker = harness.worker()
    worker.reserve([], anonymous=8)
    assert ahead(worker) is None


def test_the_share_of_another_namespace_is_left_alone() -> None:
    harness = StoreHarness(slabs=4, ledgers=2)
    worker, other = harness.worker("a"), harness.worker("b", tenant="other")
    worker.reserve([], anonymous=8)
    assert ahead(worker) is not None
    worker.reserve([], anonymous=8)
    # Half of the budget is the other's, who has not begun.
    assert ahead(worker) is None
    assert all(other.write(digest_chain(16)))


def test_an_unused_slab_ahead_gives_way_to_a_namespace_that_is_short() -> None:
    harness = StoreHarness(slabs=3, ledgers=2)
    worker = harness.worker("a")
    worker.write(digest_chain(8))
    while ahead(worker) is not None:
        pass
    worker.write(digest_chain(8, "second"))
    while ahead(worker) is not None:
        pass
    assert harness.store.stats().devices[0].slabs_live == 3
    other = harness.worker("b", tenant="other")
    assert all(other.write(digest_chain(8)))
    assert (worker.held(digest_chain(8)), worker.held(digest_chain(8, "second"))) == (8, 8)
    harness.assert_clean()


def test_after_a_failure_nothing_is_tried_for_a_while() -> None:
    harness = StoreHarness(slabs=4)
    worker = harness.worker()
    worker.reserve([], anonymous=8)
    request = harness.store.slab_ahead(worker.session_id, worker.namespace_id)
    assert request is not None
    harness.store.slab_failed(request, "none")
    assert ahead(worker) is None
    harness.clock.advance(5.1)
    assert ahead(worker) is not None


@pytest.mark.parametrize("blocks", [256 << 10, 682 << 10])
def test_the_last_of_two_sessions_takes_a_whole_budget(blocks: int) -> None:
    harness = StoreHarness(slabs=3, block_bytes=blocks)
    first, second = harness.worker("a", spec=model_spec(blocks)), harness.worker("b", spec=model_spec(blocks))
    slots = harness.slots_per_slab
    first.reserve([], anonymous=slots)
    while ahead(first) is not None:
        pass
    assert len(second.reserve([], anonymous=2 * slots).slots) == 2 * slots
    assert second.reserve([], anonymous=1).short_reason
