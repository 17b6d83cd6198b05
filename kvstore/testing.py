"""What tests of the service need: a clock that stands still, memory that is only memory, ready-made models.

Shipped with the package, so that whoever builds on the store can test without a device.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvstore.errors import OutOfMemoryError
from kvstore.store.events import DowngradeRequested, Event, LedgerGone, SlabGone, UnmapRequested
from kvstore.store.ledger import ledger_bytes
from kvstore.store.sizing import GRANULE
from kvstore.store.store import Store
from kvstore.store.types import (
    ROOT_DIGEST,
    CommitEntry,
    LeaseResult,
    ModelSpec,
    Reservation,
    SlotRef,
    StoreConfig,
)
from kvstore.testing_device import FakeDevice, FakeSlabMemory

__all__ = [
    "FakeClock",
    "FakeDevice",
    "FakeSlabMemory",
    "FakeWorker",
    "StoreHarness",
    "block_content",
    "digest_chain",
    "model_spec",
]


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


def digest_chain(length: int, text: str = "") -> list[bytes]:
    """Digests of a chain of `length` blocks, the same for the same text; chains of other texts share none."""
    chain = []
    parent = bytes(32)
    for position in range(length):
        parent = hashlib.sha256(b"%s|%d|%s" % (parent, position, text.encode())).digest()
        chain.append(parent)
    return chain


def model_spec(block_bytes: int = 256 << 10, model: str = "tiny", **changes: object) -> ModelSpec:
    """A plausible model. Any field of ModelSpec can be given in `changes`."""
    spec = ModelSpec(
        fingerprint=hashlib.sha256(model.encode()).digest(),
        model_name=model,
        codec="passthrough",
        codec_plan=b"plan of " + model.encode(),
        layer_group="full:0-1",
        first_kv_head=0,
        total_kv_heads=2,
        kv_heads=2,
        layers=2,
        k_dim=16,
        v_dim=16,
        dtype="float32",
        block_tokens=64,
        block_bytes=block_bytes,
        layout_digest=hashlib.sha256(b"layout %d" % block_bytes).digest(),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def block_content(digest: bytes, nbytes: int) -> bytes:
    """The bytes that a FakeWorker writes as the block of a digest."""
    return (digest * (nbytes // len(digest) + 1))[:nbytes]


@dataclass(eq=False)
class FakeWorker:
    """One session of a StoreHarness, registered for one model. It does what a client does, without one.

    `obedient`: it answers unmap and downgrade requests at once.
    """

    harness: StoreHarness
    name: str
    session_id: bytes
    instance_id: bytes
    namespace_id: int
    obedient: bool = True
    refused: list[Event] = field(default_factory=list)

    def reserve(self, digests: Sequence[bytes], anonymous: int = 0) -> Reservation:
        """Reserves, allocating slabs as the store asks for them."""
        store, device = self.harness.store, self.harness.device
        grow = True
        while True:
            answer = store.reserve(self.session_id, self.namespace_id, b"".join(digests), anonymous, grow=grow)
            if answer.needs_slab is None:
                self.harness.settle()
                return answer
            try:
                memory = device.create_slab(answer.needs_slab.nbytes)
            except OutOfMemoryError as error:
                store.slab_failed(answer.needs_slab, str(error))
                grow = False
            else:
                store.add_slab(answer.needs_slab, memory)
            self.harness.settle()

    def fill(self, reservation: Reservation, digests: Sequence[bytes]) -> list[CommitEntry]:
        """Writes the blocks of a chain's start into reserved slots; entries to commit, for as many as got slots."""
        from kvstore_kernels.checksum import block_checksum

        entries = []
        parents = [ROOT_DIGEST, *digests]
        places = zip(reservation.slab_ids, reservation.slots, reservation.generations, strict=True)
        for place, digest, parent in zip(places, digests, parents, strict=False):
            data = block_content(digest, self.harness.block_bytes)
            self.harness.store.write_payload(self.session_id, SlotRef(*place), 0, data)
            entries.append(CommitEntry(*place, digest, parent, block_checksum(data)))
        return entries

    def commit(self, entries: Sequence[CommitEntry]) -> list[bool]:
        """Commits."""
        committed = self.harness.store.commit(self.session_id, self.namespace_id, entries)
        self.harness.settle()
        return committed

    def give_back(self, entries: Sequence[CommitEntry] | Reservation) -> int:
        """Ends the hold on slots."""
        if isinstance(entries, Reservation):
            refs = [SlotRef(*ref) for ref in zip(entries.slab_ids, entries.slots, entries.generations, strict=True)]
        else:
            refs = [SlotRef(entry.slab_id, entry.slot, entry.generation) for entry in entries]
        ended = self.harness.store.abort(self.session_id, refs)
        self.harness.settle()
        return ended

    def write(self, digests: Sequence[bytes]) -> list[bool]:
        """A whole request that leaves a chain behind: reserve, write, commit, give back."""
        reservation = self.reserve(digests)
        entries = self.fill(reservation, digests)
        committed = self.commit(entries)
        self.give_back(reservation)
        return committed

    def lease(self, digests: Sequence[bytes]) -> LeaseResult:
        """Leases the longest held prefix."""
        query = [(self.namespace_id, b"".join(digests))]
        (lease,) = self.harness.store.lookup_and_lease(self.session_id, query)
        self.harness.settle()
        return lease

    def held(self, digests: Sequence[bytes]) -> int:
        """Length of the held prefix, pinning nothing."""
        return self.harness.store.lookup(self.session_id, [(self.namespace_id, b"".join(digests))])[0].blocks

    def release(self, *leases: LeaseResult) -> int:
        """Releases leases."""
        released = self.harness.store.release(self.session_id, [lease.lease_id for lease in leases])
        self.harness.settle()
        return released

    def read(self, lease: LeaseResult) -> list[bytes]:
        """The bytes of all leased blocks."""
        store, nbytes = self.harness.store, self.harness.block_bytes
        return [store.read_payload(self.session_id, lease.lease_id, block, 0, nbytes) for block in range(lease.blocks)]

    def die(self) -> None:
        """Its process is dead."""
        self.harness.store.close_session(self.session_id, "killed by the test")
        self.harness.settle()

    def answer(self) -> None:
        """Answers the requests it did not answer when they came."""
        pending, self.refused = self.refused, []
        for event in pending:
            self.harness.carry_out(event, forced=True)
        self.harness.settle()


class StoreHarness:
    """A store on fake memory with a fake clock, whose events are carried out at once.

    The budget holds `slabs` slabs of 2 MiB and the ledgers of `ledgers` namespaces. `events` are all events so far.
    """

    def __init__(self, slabs: int = 4, block_bytes: int = 256 << 10, ledgers: int = 1, **config: object) -> None:
        self.block_bytes = block_bytes
        self.slots_per_slab = GRANULE // block_bytes
        budget = slabs * GRANULE + ledgers * ledger_bytes(slabs, self.slots_per_slab)
        self.clock = FakeClock()
        self.device = FakeDevice()
        self.workers: dict[bytes, FakeWorker] = {}
        self.events: list[Event] = []
        self._ids = itertools.count(1)
        self.store = Store(
            StoreConfig(budget_bytes=budget, **config),  # type: ignore[arg-type]
            create_ledger=self.device.create_slab,
            clock=self.clock,
        )

    def new_id(self) -> bytes:
        """Another 16 bytes."""
        return next(self._ids).to_bytes(16, "big")

    def worker(
        self,
        name: str = "a",
        *,
        tenant: str = "tenant",
        spec: ModelSpec | None = None,
        watched: bool = True,
        transport: str = "fd",
        obedient: bool = True,
        instance_id: bytes | None = None,
    ) -> FakeWorker:
        """Opens a session and registers a model."""
        session_id, instance_id = self.new_id(), instance_id or self.new_id()
        self.store.open_session(
            session_id=session_id,
            instance_id=instance_id,
            tenant=tenant,
            name=name,
            transport=transport,
            transport_reason="",
            watched=watched,
            client_version="1",
        )
        registration = self.store.register_model(session_id, spec or model_spec(self.block_bytes))
        worker = FakeWorker(self, name, session_id, instance_id, registration.namespace_id, obedient)
        self.workers[session_id] = worker
        self.settle()
        return worker

    def settle(self) -> None:
        """Carries out what the store asks for."""
        while events := self.store.take_events():
            for event in events:
                self.events.append(event)
                self.carry_out(event)

    def carry_out(self, event: Event, *, forced: bool = False) -> None:
        """Does what one event asks for; `forced`: also what a disobedient worker would leave."""
        if isinstance(event, (SlabGone, LedgerGone)):
            event.memory.close()
        elif isinstance(event, (UnmapRequested, DowngradeRequested)):
            worker = self.workers.get(event.session_id)
            if worker is None or not (worker.obedient or forced):
                if worker is not None:
                    worker.refused.append(event)
            elif any(event.session_id == stats.session_id for stats in self.store.sessions()):
                answer = self.store.unmapped if isinstance(event, UnmapRequested) else self.store.downgraded
                answer(event.session_id, event.slab_ids)

    def assert_clean(self) -> None:
        """All invariants hold."""
        problems = self.store.check_integrity()
        assert not problems, "\n".join(problems)
