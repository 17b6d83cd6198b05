"""Memory that is slow to reach, or reached by handles: work in threads meanwhile, and what is never freed."""

from __future__ import annotations

import pytest

from kvstore.device.base import CUDA_LEGACY
from kvstore.errors import AccessDeniedError, ConflictError, InvalidRequestError, NotHeldError, SlotNotOwnedError
from kvstore.store import Reservation, SlotRef, Store, StoreConfig
from kvstore.store.events import SlabGone, UnmapRequested
from kvstore.store.sizing import GRANULE
from kvstore.testing import FakeClock, FakeDevice, StoreHarness, digest_chain, model_spec


def refs(answer: Reservation) -> list[SlotRef]:
    return [SlotRef(*place) for place in zip(answer.slab_ids, answer.slots, answer.generations, strict=True)]


def private(harness: StoreHarness) -> int:
    return harness.store.stats().devices[0].slots_private


def legacy(**options: object) -> StoreHarness:
    harness = StoreHarness(**options)  # type: ignore[arg-type]
    harness.device = FakeDevice(kind=CUDA_LEGACY)
    return harness


@pytest.mark.parametrize("end", ["abort", "death", "superseded"])
def test_a_slot_stays_taken_until_its_last_write_is_over(end: str) -> None:
    harness = StoreHarness(slabs=1)
    worker, other = harness.worker("a"), harness.worker("b")
    answer = worker.reserve(digest_chain(1))
    (ref,) = refs(answer)
    spans = [harness.store.payloads.begin_write(worker.session_id, ref, 0, 8) for _ in range(2)]
    if end == "abort":
        assert worker.give_back(answer) == 1
    elif end == "death":
        worker.die()
    else:
        # The slot goes with the instance, and is given back under its new id.
        worker = harness.worker("a", instance_id=worker.instance_id)
        assert worker.give_back(answer) == 1
    harness.assert_clean()
    assert private(harness) == 1
    # Whoever may write the slab gets every other slot of it.
    taker = other if end == "death" else worker
    taken = set(zip(*_places(taker.reserve([], anonymous=8)), strict=True))
    assert len(taken) == 7
    assert (ref.slab_id, ref.slot) not in taken
    for span in spans:
        assert taker.reserve([], anonymous=1).slots == []
        span.write(b"12345678")
        harness.store.payloads.end_write(ref)
        harness.assert_clean()
    assert taker.reserve([], anonymous=1).slots == [ref.slot]


def _places(answer: Reservation) -> tuple[list[int], list[int]]:
    return answer.slab_ids, answer.slots


def test_a_block_is_not_committed_while_it_is_written() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(1)
    answer = worker.reserve(chain)
    entries = worker.fill(answer, chain)
    harness.store.payloads.begin_write(worker.session_id, refs(answer)[0], 0, 1)
    with pytest.raises(InvalidRequestError, match="still being written"):
        worker.commit(entries)
    harness.store.payloads.end_write(refs(answer)[0])
    assert worker.commit(entries) == [True]
    with pytest.raises(SlotNotOwnedError):
        harness.store.payloads.begin_write(worker.session_id, refs(answer)[0], 0, 1)


def test_a_draining_slab_waits_for_a_write() -> None:
    harness = StoreHarness(slabs=2, ledgers=2)
    worker = harness.worker("a", transport="bytes", watched=False)
    answer = worker.reserve([], anonymous=1)
    (ref,) = refs(answer)
    harness.store.payloads.begin_write(worker.session_id, ref, 0, 1)
    harness.store.end_lease_grace(worker.session_id, "its stream ended")
    harness.settle()
    namespace = harness.store.namespaces()[0].namespace_id
    harness.store._removal.drain(harness.store._state.slabs[ref.slab_id])
    harness.assert_clean()
    assert private(harness) == 1
    harness.store.payloads.end_write(ref)
    harness.settle()
    assert any(isinstance(event, SlabGone) and event.slab_id == ref.slab_id for event in harness.events)
    assert namespace not in {space.namespace_id for space in harness.store.namespaces()}


def test_the_result_of_a_check_counts_only_while_the_block_is_there() -> None:
    harness = StoreHarness(slabs=1)
    worker = harness.worker()
    chain = digest_chain(3)
    worker.write(chain)
    checks = harness.store.payloads.damage_checks(worker.session_id, worker.namespace_id, b"".join(chain))
    assert [check.is_sound() for check in checks] == [True] * 3
    harness.store.evict(worker.namespace_id, include_pinned=True)
    # Its slot may hold another block by now: what was read says nothing.
    worker.write(chain)
    assert harness.store.payloads.checked(checks[0], sound=False) == 0
    assert worker.held(chain) == 3
    (fresh, *_) = harness.store.payloads.checks()
    assert harness.store.payloads.checked(fresh, sound=False) == 3
    assert worker.held(chain) == 0


def test_a_slab_that_is_closed_during_a_check_says_nothing() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    worker.write(digest_chain(1))
    (check,) = harness.store.payloads.checks()
    check.span.memory.close()
    assert check.is_sound()


def test_a_read_is_asked_for_again_after_the_copy() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(2)
    worker.write(chain)
    lease = worker.lease(chain)
    place = (worker.session_id, lease.lease_id, 1, 5, 9)
    span = harness.store.payloads.leased_span(*place)
    assert harness.store.payloads.leased_span(*place) == span
    worker.release(lease)
    with pytest.raises(NotHeldError, match="lease"):
        harness.store.payloads.leased_span(*place)


def test_slabs_without_a_handle_are_not_opened_by_one() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    (ref,) = refs(worker.reserve([], anonymous=1))
    with pytest.raises(ConflictError, match="no IPC handle"):
        harness.store.open_slab(worker.session_id, ref.slab_id, writable=False)


class Handled(FakeDevice):
    """Fake slabs that have handles."""

    def create_slab(self, nbytes, pace=None):  # type: ignore[no-untyped-def]
        memory = super().create_slab(nbytes, pace)
        memory.ipc_handle = lambda: b"h" * 64  # type: ignore[method-assign]
        return memory


def test_only_the_writer_opens_a_slab_for_writing() -> None:
    harness = legacy()
    harness.device = Handled(kind=CUDA_LEGACY)
    writer, reader = harness.worker("a", transport="cuda-ipc"), harness.worker("b", transport="cuda-ipc")
    stranger = harness.worker("c", tenant="other", transport="cuda-ipc")
    (ref,) = refs(writer.reserve([], anonymous=1))
    assert harness.store.open_slab(writer.session_id, ref.slab_id, writable=True).slab_id == ref.slab_id
    assert harness.store.open_slab(reader.session_id, ref.slab_id, writable=False).slab_id == ref.slab_id
    with pytest.raises(AccessDeniedError, match="Expected"):
        harness.store.open_slab(reader.session_id, ref.slab_id, writable=True)
    for writable in (False, True):
        with pytest.raises(NotHeldError):
            harness.store.open_slab(stranger.session_id, ref.slab_id, writable=writable)


def test_a_slab_that_is_opened_too_late_is_asked_back_at_once() -> None:
    harness = legacy()
    harness.device = Handled(kind=CUDA_LEGACY)
    writer, reader = (
        harness.worker("a", transport="cuda-ipc"),
        harness.worker("b", transport="cuda-ipc", obedient=False),
    )
    chain = digest_chain(1)
    answer = writer.reserve(chain)
    writer.commit(writer.fill(answer, chain))
    lease = reader.lease(chain)
    slab_id = answer.slab_ids[0]
    harness.store._removal.drain(harness.store._state.slabs[slab_id])
    harness.settle()
    reader.release(lease)
    harness.store.unmapped(reader.session_id, [slab_id])
    harness.settle()
    before = sum(isinstance(event, UnmapRequested) for event in reader.refused)
    harness.store.open_slab(reader.session_id, slab_id, writable=False)
    harness.settle()
    assert sum(isinstance(event, UnmapRequested) for event in reader.refused) == before + 1
    writer.give_back(answer)
    assert harness.store.stats().devices[0].slabs_draining == 1
    reader.answer()
    assert harness.store.stats().devices[0].slabs_draining == 0
    harness.assert_clean()


@pytest.mark.parametrize(
    ("watched", "opened", "freed"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_handle_memory_that_an_unwatched_process_opened_is_never_freed(
    watched: bool, opened: bool, freed: bool
) -> None:
    harness = legacy(slabs=4)
    harness.device = Handled(kind=CUDA_LEGACY)
    worker = harness.worker(transport="cuda-ipc", watched=watched)
    worker.write(digest_chain(2))
    (slab,) = harness.store._state.slabs.values()
    if opened:
        harness.store.open_slab(worker.session_id, slab.slab_id, writable=True)
    if watched:
        worker.die()
    else:
        harness.store.end_lease_grace(worker.session_id, "its stream ended")
    if slab.state.name == "LIVE":
        harness.store._removal.drain(slab)
    harness.settle()
    harness.assert_clean()
    device = harness.store.stats().devices[0]
    assert harness.device.created[0].closed is freed
    assert (device.slabs_draining, device.used_bytes > 0) == (int(not freed), not freed)
    # Whoever comes next gets other memory.
    other = harness.worker("next", transport="cuda-ipc")
    assert other.write(digest_chain(2)) == [True, True]
    assert len(harness.device.created) == 2


def test_the_descriptor_memory_of_such_a_process_goes_with_its_last_user() -> None:
    harness = StoreHarness(slabs=4)
    worker = harness.worker(watched=False)
    worker.write(digest_chain(2))
    harness.store.end_lease_grace(worker.session_id, "its stream ended")
    harness.settle()
    assert harness.store.stats().devices[0].slabs_draining == 0
    assert harness.device.created[1].closed


def test_what_the_service_takes_itself_is_in_the_budget() -> None:
    device = FakeDevice()
    config = StoreConfig(budget_bytes=8 * GRANULE, fixed_bytes=GRANULE)
    store = Store(config, create_ledger=device.create_slab, clock=FakeClock())
    stats = store.stats().devices[0]
    assert (stats.budget_bytes, stats.used_bytes) == (8 * GRANULE, GRANULE)
    session = bytes(15) + b"s"
    store.open_session(
        session_id=session, instance_id=session, tenant="t", name="", transport="fd", transport_reason="",
        watched=True, client_version="1",
    )  # fmt: skip
    namespace = store.register_model(session, model_spec(GRANULE)).namespace_id
    slabs = 0
    while (request := store.reserve(session, namespace, b"", 100).needs_slab) is not None:
        store.add_slab(request, device.create_slab(request.nbytes))
        slabs += 1
    assert slabs == 6
    assert store.stats().devices[0].used_bytes <= 8 * GRANULE
    assert store.check_integrity() == []


def test_pinned_blocks_are_counted_with_their_ancestors() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    chain = digest_chain(5)
    worker.write(chain)
    for end in (chain[1], chain[3]):
        harness.store.pin(worker.session_id, worker.namespace_id, end, True)
    assert harness.store.stats().devices[0].blocks_pinned == 4
    harness.store.pin(worker.session_id, worker.namespace_id, chain[3], False)
    assert harness.store.stats().devices[0].blocks_pinned == 2
