"""Random lives of a small store against a simple model, all invariants checked after every step."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.store import CommitEntry, LeaseResult, ReserveStatus, SlotRef
from kvstore.store.slots import SlotState
from kvstore.testing import FakeWorker, StoreHarness, model_spec

BLOCK = 512 << 10
SAMPLE = 64
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
PICK = st.integers(0, 1000)
RARELY = st.integers(0, 5).map(lambda number: number == 5)
Place = tuple[int, int, int]


def chain(path: list[int]) -> list[bytes]:
    digests = []
    parent = bytes(32)
    for token in path:
        parent = hashlib.sha256(parent + bytes([token])).digest()
        digests.append(parent)
    return digests


class StoreMachine(RuleBasedStateMachine):
    """The model: which bytes lie where, who holds what, which digests are committed."""

    @initialize(slabs=st.integers(2, 5), same=st.booleans(), obedient=st.booleans())
    def start(self, slabs: int, same: bool, obedient: bool) -> None:
        self.harness = StoreHarness(slabs=slabs, block_bytes=BLOCK, ledgers=2, max_sessions=6)
        self.store = self.harness.store
        self.workers: list[FakeWorker] = []
        self.held: dict[FakeWorker, dict[Place, CommitEntry]] = {}
        self.leases: dict[FakeWorker, list[tuple[LeaseResult, list[bytes]]]] = {}
        self.bytes: dict[Place, bytes] = {}
        self.committed: dict[int, set[bytes]] = {}
        self.evictions = 0
        self.damage_allowed: set[bytes] = set()
        for tenant in "AA" if same else "AB":
            self.connect(tenant, watched=True, obedient=obedient, maps=True)

    def _worker(self, pick: int) -> FakeWorker:
        return self.workers[pick % len(self.workers)]

    def _slot_head(self, place: Place) -> bytes:
        slab = self.store._state.slabs[place[0]]
        assert slab.generation(place[1]) == place[2], "a held or leased slot was reused"
        return bytes(slab.payload(place[1])[:SAMPLE])

    @precondition(lambda self: len(self.workers) < 5)
    @rule(tenant=st.sampled_from("AB"), watched=st.booleans(), obedient=st.booleans(), maps=st.booleans())
    def connect(self, tenant: str, watched: bool, obedient: bool, maps: bool) -> None:
        transport = "fd" if maps else "bytes"
        worker = self.harness.worker(
            f"w{len(self.workers)}",
            tenant=tenant,
            watched=watched,
            obedient=obedient,
            transport=transport,
            spec=model_spec(BLOCK),
        )
        self.workers.append(worker)
        self.held[worker] = {}
        self.leases[worker] = []

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, path=PATHS, keep=st.booleans())
    def whole_request(self, pick: int, path: list[int], keep: bool) -> None:
        worker = self._worker(pick)
        before = set(self.held[worker])
        self.reserve(pick, path, 0)
        new = [place for place in self.held[worker] if place not in before]
        entries = [self.held[worker][place] for place in new]
        for entry, done in zip(entries, worker.commit(entries), strict=True):
            if done:
                self.committed.setdefault(worker.namespace_id, set()).add(entry.digest)
        if not keep:
            worker.give_back(entries)
            for place in new:
                del self.held[worker][place]

    @precondition(lambda self: self.workers)
    @rule(fail=RARELY)
    def break_device(self, fail: bool) -> None:
        if fail:
            self.harness.device.fail_next()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, path=PATHS, anonymous=st.integers(0, 3))
    def reserve(self, pick: int, path: list[int], anonymous: int) -> None:
        worker = self._worker(pick)
        digests = chain(path)
        taken = {place[:2] for held in self.held.values() for place in held}
        leased = {
            place[:2]
            for pairs in self.leases.values()
            for lease, _ in pairs
            for place in zip(lease.slab_ids, lease.slots, lease.generations, strict=True)
        }
        answer = worker.reserve(digests, anonymous)
        places = list(zip(answer.slab_ids, answer.slots, answer.generations, strict=True))
        assert len(answer.statuses) == len(digests)
        assert (len(places) < len(digests) + anonymous) == bool(answer.short_reason)
        for place in places:
            assert place[:2] not in taken, "a slot in use was granted again"
            assert place[:2] not in leased, "a leased slot was granted"
            taken.add(place[:2])
        entries = worker.fill(answer, digests)
        for place, entry in zip(places, entries, strict=False):
            self.held[worker][place] = entry
            self.bytes[place] = self._slot_head(place)
        for place in places[len(digests) :]:
            marker = hashlib.sha256(repr(place).encode()).digest() * 2
            self.store.write_payload(worker.session_id, SlotRef(*place), 0, marker)
            self.held[worker][place] = CommitEntry(*place, bytes(32), bytes(32), 0)
            self.bytes[place] = marker
        for digest, status in zip(digests, answer.statuses, strict=True):
            # Reserving evicts, also of these chains: the status is that after it.
            if status is ReserveStatus.COMMITTED:
                assert digest in self._index(worker.namespace_id)

    def _index(self, namespace_id: int) -> set[bytes]:
        namespace = self.store._state.namespaces.get(namespace_id)
        return {node.digest for node in namespace.index} if namespace else set()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, start=PICK, count=st.integers(1, 6))
    def commit(self, pick: int, start: int, count: int) -> None:
        worker = self._worker(pick)
        entries = [entry for entry in self.held[worker].values() if entry.digest != bytes(32)]
        if not entries:
            return
        start %= len(entries)
        batch = entries[start : start + count]
        before = self._index(worker.namespace_id)
        committed = worker.commit(batch)
        # In the second round a block may find a parent that came after it in the first.
        again = worker.commit(batch)
        assert all(second for first, second in zip(committed, again, strict=True) if first)
        committed = again
        for entry, done in zip(batch, committed, strict=True):
            slab = self.store._state.slabs[entry.slab_id]
            state = slab.slot_state(entry.slot)
            if done:
                assert state is SlotState.COMMITTED
                assert entry.parent == bytes(32) or entry.parent in self._index(worker.namespace_id)
                self.committed.setdefault(worker.namespace_id, set()).add(entry.digest)
            elif state is SlotState.PRIVATE and entry.digest not in before and slab.state.name == "LIVE":
                others = entry.digest in self._index(worker.namespace_id)
                assert others or entry.parent not in self._index(worker.namespace_id)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, start=PICK, count=st.integers(1, 20))
    def abort(self, pick: int, start: int, count: int) -> None:
        worker = self._worker(pick)
        places = list(self.held[worker])
        start = start % len(places) if places else 0
        some = places[start : start + count]
        entries = [self.held[worker].pop(place) for place in some]
        assert worker.give_back(entries) == len(entries)
        assert worker.give_back(entries) == 0

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, path=PATHS)
    def lease(self, pick: int, path: list[int]) -> None:
        worker = self._worker(pick)
        digests = chain(path)
        lease = worker.lease(digests)
        index = self._index(worker.namespace_id)
        expected = next((n for n, digest in enumerate(digests) if digest not in index), len(digests))
        assert lease.blocks == expected
        assert sum(blocks for _, blocks in lease.writers) == lease.blocks
        if lease.lease_id:
            self.leases[worker].append((lease, digests[: lease.blocks]))
            for place, digest in zip(
                zip(lease.slab_ids, lease.slots, lease.generations, strict=True), digests, strict=False
            ):
                head = self._slot_head(place)
                if head != self.bytes.get(place):
                    raise AssertionError("a block was leased whose bytes nobody wrote")
                if digest not in self.damage_allowed:
                    assert head == (digest * 2)[:SAMPLE]

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, which=PICK)
    def release(self, pick: int, which: int) -> None:
        worker = self._worker(pick)
        if self.leases[worker]:
            lease, _ = self.leases[worker].pop(which % len(self.leases[worker]))
            assert worker.release(lease) == 1
            assert worker.release(lease) == 0

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, really=RARELY)
    def end(self, pick: int, really: bool) -> None:
        if not really:
            return
        worker = self._worker(pick)
        self.workers.remove(worker)
        del self.held[worker], self.leases[worker]
        worker.die()
        worker.die()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, really=RARELY)
    def lose_stream(self, pick: int, really: bool) -> None:
        if not really:
            return
        worker = self._worker(pick)
        if self.store.stream_ended(worker.session_id):
            assert not self.held[worker]
            assert not self.leases[worker]
            self.workers.remove(worker)
            del self.held[worker], self.leases[worker]
        self.harness.settle()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def connect_again(self, pick: int) -> None:
        worker = self._worker(pick)
        stats = next(s for s in self.store.sessions() if s.session_id == worker.session_id)
        successor = self.harness.worker(
            worker.name,
            tenant=stats.tenant,
            watched=stats.process_watched,
            obedient=worker.obedient,
            transport=stats.transport,
            spec=model_spec(BLOCK),
            instance_id=worker.instance_id,
        )
        assert successor.namespace_id == worker.namespace_id
        self.workers[self.workers.index(worker)] = successor
        self.held[successor] = self.held.pop(worker)
        self.leases[successor] = self.leases.pop(worker)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def answer(self, pick: int) -> None:
        self._worker(pick).answer()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, path=PATHS, pinned=st.booleans())
    def pin(self, pick: int, path: list[int], pinned: bool) -> None:
        worker = self._worker(pick)
        digests = chain(path)
        if digests[-1] in self._index(worker.namespace_id):
            assert self.store.pin(worker.session_id, worker.namespace_id, digests[-1], pinned) == len(digests)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, answered=st.booleans())
    def slab_ahead(self, pick: int, answered: bool) -> None:
        worker = self._worker(pick)
        before = self.store.stats()
        request = self.store.slab_ahead(worker.session_id, worker.namespace_id)
        after = self.store.stats()
        assert after.counters.evictions == before.counters.evictions
        assert after.devices[0].slabs_draining == before.devices[0].slabs_draining
        if request is None:
            return
        if answered:
            self.harness.device.forgive()
            self.store.add_slab(request, self.harness.device.create_slab(request.nbytes))
        else:
            self.store.slab_failed(request, "no memory (as the test ordered)")
        self.harness.settle()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, include_pinned=st.booleans(), really=RARELY)
    def evict(self, pick: int, include_pinned: bool, really: bool) -> None:
        if not really:
            return
        namespace_id = self._worker(pick).namespace_id
        before = self._index(namespace_id)
        result = self.store.evict(namespace_id, include_pinned=include_pinned)
        self.harness.settle()
        after = self._index(namespace_id)
        assert result.freed + result.condemned == len(before) - len(after)
        assert result.pinned == len(after)
        assert not (include_pinned and after)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, which=PICK)
    def damage(self, pick: int, which: int) -> None:
        worker = self._worker(pick)
        namespace = self.store._state.namespaces[worker.namespace_id]
        nodes = sorted(namespace.index, key=lambda node: node.digest)
        if not nodes:
            return
        node = nodes[which % len(nodes)]
        place = (node.slab_id, node.slot, node.generation)
        assert self.store.report_damage(worker.session_id, worker.namespace_id, node.digest) == 0
        node.slab.payload(node.slot)[5] ^= 0xFF
        self.bytes[place] = self._slot_head(place)
        self.damage_allowed.add(node.digest)
        before = len(namespace.index)
        condemned = self.store.report_damage(worker.session_id, worker.namespace_id, node.digest)
        self.harness.settle()
        assert condemned == before - len(self._index(worker.namespace_id)) >= 1
        self.committed[worker.namespace_id] &= self._index(worker.namespace_id)
        self.damage_allowed.discard(node.digest)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @invariant()
    def clean(self) -> None:
        if hasattr(self, "harness"):
            self.harness.assert_clean()

    @invariant()
    def what_is_held_stays(self) -> None:
        if not hasattr(self, "harness"):
            return
        for held in self.held.values():
            for place in held:
                assert self._slot_head(place) == self.bytes[place], "a held block's bytes changed"
        for worker, pairs in self.leases.items():
            for lease, _ in pairs:
                assert self.store.payloads.blocks(worker.session_id, lease.lease_id) == (lease.blocks, BLOCK)
                places = zip(lease.slab_ids, lease.slots, lease.generations, strict=True)
                for block, place in enumerate(places):
                    head = self.store.read_payload(worker.session_id, lease.lease_id, block, 0, SAMPLE)
                    assert head == self.bytes[place] == self._slot_head(place), "a leased block's bytes changed"

    @invariant()
    def nothing_is_lost_but_by_eviction(self) -> None:
        if not hasattr(self, "harness"):
            return
        evictions = self.store.stats().counters.evictions
        lost = 0
        for namespace_id, digests in self.committed.items():
            index = self._index(namespace_id)
            lost += len(digests - index)
            self.committed[namespace_id] = index
        assert lost <= evictions - self.evictions
        self.evictions = evictions

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for worker in self.workers:
            worker.die()
        self.harness.assert_clean()
        stats = self.store.stats()
        (device,) = stats.devices
        assert (stats.leases, stats.sessions, device.slots_private, device.slots_condemned) == (0, 0, 0, 0)
        assert device.slabs_draining == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
