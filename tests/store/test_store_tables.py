"""Slot and slab transitions, ledger layout, slab sizes, the eviction policy: the parts without state of the store."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BudgetTooSmallError, IllegalTransitionError
from kvstore.store.ledger import MAGIC, RECORD_BYTES, SLAB_TABLE, Ledger, header_bytes, ledger_bytes
from kvstore.store.policy import LeastRecentlyUsed
from kvstore.store.sizing import GRANULE, plan_namespace, slab_size
from kvstore.store.slots import (
    SLAB_TRANSITIONS,
    SLOT_TRANSITIONS,
    SlabEvent,
    SlabState,
    SlotEvent,
    SlotState,
    next_slab_state,
    next_slot_state,
)
from kvstore.testing import FakeSlabMemory

SLOT_STEPS = {(step.event, step.source): step.target for step in SLOT_TRANSITIONS}
SLAB_STEPS = {(step.event, step.source): step.target for step in SLAB_TRANSITIONS}


@pytest.mark.parametrize("event", SlotEvent)
@pytest.mark.parametrize("state", SlotState)
def test_every_slot_event_in_every_state(event: SlotEvent, state: SlotState) -> None:
    if (event, state) in SLOT_STEPS:
        assert next_slot_state(state, event, 7, 3) is SLOT_STEPS[event, state]
        return
    with pytest.raises(IllegalTransitionError, match=r"slot 3 of slab 7") as caught:
        next_slot_state(state, event, 7, 3)
    assert (caught.value.event, caught.value.state) == (event.value, state.name.lower())


@pytest.mark.parametrize("event", SlabEvent)
@pytest.mark.parametrize("state", SlabState)
def test_every_slab_event_in_every_state(event: SlabEvent, state: SlabState) -> None:
    if (event, state) in SLAB_STEPS:
        assert next_slab_state(state, event, 7) is SLAB_STEPS[event, state]
    else:
        with pytest.raises(IllegalTransitionError, match="slab 7"):
            next_slab_state(state, event, 7)


def test_a_slot_lives_free_private_committed_condemned_free() -> None:
    state = SlotState.FREE
    for event in (SlotEvent.RESERVE, SlotEvent.COMMIT, SlotEvent.CONDEMN, SlotEvent.RECLAIM):
        state = next_slot_state(state, event, 1, 0)
    assert state is SlotState.FREE


def make_ledger(slabs: int = 3, slots: int = 5) -> tuple[Ledger, FakeSlabMemory]:
    memory = FakeSlabMemory(ledger_bytes(slabs, slots))
    return Ledger(memory, namespace_id=9, slot_bytes=4096, slots_per_slab=slots, slabs=slabs), memory


def test_ledger_bytes_are_where_the_docstring_says() -> None:
    ledger, memory = make_ledger()
    ledger.attach_slab(1, 42)
    record = 1 * 5 + 3
    generation = ledger.set_private(record, b"o" * 16)
    ledger.set_committed(record, digest=b"d" * 32, parent=b"p" * 32, tokens=64, checksum=(1 << 64) - 2, error=0.25)
    assert struct.unpack_from("<8sIIQQII", memory.view, 0) == (MAGIC, 2, RECORD_BYTES, 9, 4096, 5, 3)
    assert struct.unpack_from("<3I", memory.view, SLAB_TABLE) == (0, 42, 0)
    at = header_bytes(3) + record * RECORD_BYTES
    word, slab_id, slot, tokens, error, checksum = struct.unpack_from("<QIIIfQ", memory.view, at)
    assert word == generation << 32 | SlotState.COMMITTED
    assert (slab_id, slot, tokens, error, checksum) == (42, 3, 64, 0.25, (1 << 64) - 2)
    assert ledger.read(record).error == 0.25
    assert bytes(memory.view[at + 32 : at + 112]) == b"d" * 32 + b"p" * 32 + b"o" * 16


def test_a_commit_writes_its_word_last() -> None:
    ledger, _ = make_ledger()
    ledger.set_private(0, b"o" * 16)
    seen: list[object] = []

    class Spy:
        def __init__(self, words: memoryview) -> None:
            self.words = words

        def __getitem__(self, index: int) -> int:
            return self.words[index]

        def __setitem__(self, index: int, value: int) -> None:
            self.words[index] = value - value % 256 | SlotState.PRIVATE
            seen.append(ledger.read(0).digest)
            self.words[index] = value

    ledger._words = Spy(ledger._words)  # type: ignore[assignment]
    ledger.set_committed(0, digest=b"d" * 32, parent=bytes(32), tokens=64, checksum=1, error=0.5)
    assert seen == [b"d" * 32]
    assert ledger.read(0).state is SlotState.COMMITTED


def test_generations_grow_over_slabs_and_wrap_past_zero() -> None:
    ledger, memory = make_ledger()
    ledger.attach_slab(0, 1)
    assert [ledger.set_private(0, b"o" * 16) for _ in range(2)] == [1, 2]
    ledger.set_state(0, SlotState.FREE)
    ledger.detach_slab(0)
    ledger.attach_slab(0, 2)
    assert ledger.set_private(0, b"o" * 16) == 3
    struct.pack_into("<Q", memory.view, header_bytes(3), 0xFFFFFFFF << 32)
    assert ledger.set_private(0, b"o" * 16) == 1


def test_a_new_private_record_shows_nothing_of_the_block_before() -> None:
    ledger, _ = make_ledger()
    ledger.set_private(2, b"o" * 16)
    ledger.set_committed(2, digest=b"d" * 32, parent=b"p" * 32, tokens=64, checksum=5, error=0.5)
    ledger.set_private(2, b"n" * 16)
    record = ledger.read(2)
    assert (record.digest, record.parent, record.checksum, record.owner) == (bytes(32), bytes(32), 0, b"n" * 16)
    assert record.error == 0


@given(st.integers(1, 64 << 20), st.integers(1 << 20, 1 << 40), st.integers(1, 4096))
def test_slab_size_keeps_the_rule(slot_bytes: int, budget: int, max_sessions: int) -> None:
    size = slab_size(slot_bytes, budget, max_sessions)
    limit = min(budget // 16, budget // max_sessions)
    assert size.nbytes % GRANULE == 0
    assert size.slots == size.nbytes // slot_bytes >= 1
    if limit // GRANULE * GRANULE >= slot_bytes:
        assert size.nbytes <= limit
        multiples = range(-(-slot_bytes // GRANULE), min(limit // GRANULE, 2000) + 1)
        assert size.nbytes % slot_bytes <= min(multiple * GRANULE % slot_bytes for multiple in multiples)
    else:
        assert size.nbytes - GRANULE < slot_bytes


@pytest.mark.parametrize(
    ("slot_bytes", "budget", "sessions", "slots"),
    [
        pytest.param(32 << 10, 4 << 30, 64, 64, id="small blocks: 2 MiB hold 64 slots"),
        pytest.param(1 << 20, 4 << 30, 64, 64, id="1 MiB: 64 slots are within the limit"),
        pytest.param(1 << 20, 64 << 20, 16, 4, id="1 MiB, little budget: the largest size allowed"),
        pytest.param(3 << 20, 16 << 20, 16, 1, id="one slot is larger than the share: the least that holds it"),
    ],
)
def test_slab_size_examples(slot_bytes: int, budget: int, sessions: int, slots: int) -> None:
    assert slab_size(slot_bytes, budget, sessions).slots == slots


@given(st.integers(64, 8 << 20), st.integers(1 << 16, 1 << 33), st.integers(1, 256))
def test_a_namespace_fills_its_limit_and_never_passes_it(slot_bytes: int, limit: int, max_sessions: int) -> None:
    size = slab_size(slot_bytes, limit, max_sessions)
    if size.nbytes + ledger_bytes(1, size.slots) > limit:
        with pytest.raises(BudgetTooSmallError, match=rf"{limit} bytes .*--budget"):
            plan_namespace(slot_bytes, limit, limit, max_sessions)
        return
    plan = plan_namespace(slot_bytes, limit, limit, max_sessions)
    assert plan.ledger_nbytes == ledger_bytes(plan.max_slabs, plan.slab.slots)
    assert plan.max_slabs * plan.slab.nbytes + plan.ledger_nbytes <= limit
    more = plan.max_slabs + 1
    assert more * plan.slab.nbytes + ledger_bytes(more, plan.slab.slots) > limit


@dataclass(eq=False)
class Item:
    last_used: int


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "use", "take"]), st.integers(0, 19)), max_size=200))
def test_least_recently_used_is_the_oldest_candidate(steps: list[tuple[str, int]]) -> None:
    policy: LeastRecentlyUsed[Item] = LeastRecentlyUsed()
    items = [Item(number) for number in range(20)]
    candidates: set[Item] = set()
    for tick, (what, number) in enumerate(steps, start=100):
        item = items[number]
        if what == "add":
            policy.add(item)
            candidates.add(item)
        elif what == "remove":
            policy.remove(item)
            candidates.discard(item)
        elif what == "use":
            item.last_used = tick
        else:
            victim = policy.victim()
            assert victim is min(candidates, key=lambda item: item.last_used, default=None)
            if victim is not None:
                policy.remove(victim)
                candidates.discard(victim)
        assert len(policy) == len(candidates)
        assert (item in policy) == (item in candidates)


def test_the_heap_of_the_policy_stays_in_proportion() -> None:
    policy: LeastRecentlyUsed[Item] = LeastRecentlyUsed()
    for number in range(10_000):
        item = Item(number)
        policy.add(item)
        policy.remove(item)
    assert len(policy._heap) <= 65
    assert policy.victim() is None
