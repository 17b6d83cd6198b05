"""Reserve, commit, abort: how blocks come to be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.device.base import SlabMemory
from kvstore.errors import InvalidRequestError, LimitReachedError, OutOfMemoryError, SlotNotOwnedError
from kvstore.store.events import LedgerCreated, SlabAdded, WriterChanged
from kvstore.store.index import Node
from kvstore.store.ledger import Ledger
from kvstore.store.namespace import InFlight, Namespace
from kvstore.store.removal import Removal
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.slots import SlabState, SlotState
from kvstore.store.state import StoreState
from kvstore.store.supply import Supply
from kvstore.store.types import (
    DIGEST_BYTES,
    ROOT_DIGEST,
    CommitEntry,
    Reservation,
    ReserveStatus,
    SlabRequest,
    SlotRef,
)

_CHECKSUMS = 1 << 64


class Writing:
    """Private slots and what becomes of them. Everything is checked before anything is changed."""

    def __init__(self, state: StoreState, supply: Supply, removal: Removal) -> None:
        self._state = state
        self._supply = supply
        self._removal = removal

    def reserve(
        self, session: Session, namespace: Namespace, digests: bytes, anonymous: int, *, grow: bool
    ) -> Reservation:
        """See Store.reserve."""
        chain = self._state.split(digests)
        most = self._state.config.max_query_digests
        if anonymous < 0:
            raise InvalidRequestError(f"anonymous is {anonymous}: expected 0 or more")
        wanted = len(chain) + anonymous
        if wanted > most:
            raise LimitReachedError(f"{wanted} slots in one reservation: at most {most} are allowed. Ask for less")
        if ROOT_DIGEST in chain:
            raise InvalidRequestError("a digest of 32 zero bytes names no block: expected a chain digest")
        reason = self._supply.find(session, namespace, wanted, grow=grow)
        if isinstance(reason, SlabRequest):
            return Reservation([], [], [], [], [], needs_slab=reason)
        granted = self._grant(session, namespace, wanted)
        statuses, ages = self._announce(session, namespace, chain, granted)
        self._state.counters.reserve_short += wanted - len(granted)
        return Reservation(
            [slab.slab_id for slab, _ in granted],
            [slot for _, slot in granted],
            [slab.generation(slot) for slab, slot in granted],
            statuses,
            ages,
            reason if len(granted) < wanted else "",
        )

    def commit(self, session: Session, namespace: Namespace, entries: Sequence[CommitEntry]) -> list[bool]:
        """See Store.commit."""
        most = self._state.config.max_query_digests
        if len(entries) > most:
            raise LimitReachedError(f"{len(entries)} blocks in one commit: at most {most} are allowed. Commit in parts")
        digest_of: dict[tuple[int, int], bytes] = {}
        for entry in entries:
            self._check_entry(session, namespace, entry)
            if digest_of.setdefault((entry.slab_id, entry.slot), entry.digest) != entry.digest:
                raise InvalidRequestError(
                    f"slot {entry.slot} of slab {entry.slab_id} comes with two digests in one commit: expected one"
                )
        return [self._commit_one(session, namespace, entry) for entry in entries]

    def abort(self, session: Session, slots: Sequence[SlotRef]) -> int:
        """See Store.abort."""
        ended = 0
        for ref in slots:
            if session.slots.get((ref.slab_id, ref.slot)) == ref.generation:
                self._removal.end_hold(session, self._state.slabs[ref.slab_id], ref.slot)
                ended += 1
        return ended

    def add_slab(self, request: SlabRequest, memory: SlabMemory) -> int:
        """See Store.add_slab."""
        namespace = self._open_request(request)
        if memory.nbytes != request.nbytes:
            raise InvalidRequestError(
                f"memory of {memory.nbytes} bytes for slab request {request.request_id}: expected {request.nbytes}"
            )
        ledger = namespace.ledger
        if ledger is None:
            try:
                ledger = self._create_ledger(namespace)
            except OutOfMemoryError as error:
                self.slab_failed(request, str(error))
                raise
        del namespace.requests[request.request_id]
        slab = Slab(
            next(self._state.slab_ids),
            namespace,
            memory,
            ledger,
            namespace.ranges.pop(),
            request.slots,
            request.slot_bytes,
            self._state.policy_factory(),
        )
        ledger.attach_slab(slab.slab_range, slab.slab_id)
        self._state.slabs[slab.slab_id] = slab
        namespace.slabs[slab.slab_id] = slab
        self._state.events.append(SlabAdded(slab.slab_id, namespace.namespace_id, memory, slab.slots, slab.slot_bytes))
        session = self._state.sessions.get(request.session_id)
        if session is not None:
            slab.writer = session
            self._state.events.append(WriterChanged(slab.slab_id, session.session_id))
        return slab.slab_id

    def slab_failed(self, request: SlabRequest, error: str) -> None:
        """See Store.slab_failed."""
        namespace = self._open_request(request)
        before = namespace.used_bytes
        del namespace.requests[request.request_id]
        self._state.budget.give_back(before - namespace.used_bytes)
        self._supply.allocation_failed(error)

    def _open_request(self, request: SlabRequest) -> Namespace:
        namespace = self._state.namespaces.get(request.namespace_id)
        if namespace is None or request.request_id not in namespace.requests:
            raise InvalidRequestError(
                f"slab request {request.request_id} is not open: expected each to be answered exactly once"
            )
        return namespace

    def _create_ledger(self, namespace: Namespace) -> Ledger:
        plan = namespace.plan
        memory = self._state.create_ledger(plan.ledger_nbytes)
        namespace.ledger = Ledger(
            memory,
            namespace_id=namespace.namespace_id,
            slot_bytes=namespace.slot_bytes,
            slots_per_slab=plan.slab.slots,
            slabs=plan.max_slabs,
        )
        self._state.events.append(LedgerCreated(namespace.namespace_id, memory, namespace.ledger.records))
        return namespace.ledger

    def _grant(self, session: Session, namespace: Namespace, wanted: int) -> list[tuple[Slab, int]]:
        granted = []
        for slab, slots in self._supply.take(session, namespace, wanted):
            if session.maps:
                session.mapped.add(slab.slab_id)
            for slot in slots:
                session.slots[slab.slab_id, slot] = slab.generation(slot)
                granted.append((slab, slot))
        return granted

    def _announce(
        self, session: Session, namespace: Namespace, chain: list[bytes], granted: list[tuple[Slab, int]]
    ) -> tuple[list[ReserveStatus], list[int]]:
        """Registers as in flight what the caller is to write; says what others have or write."""
        statuses = []
        ages = []
        for position, digest in enumerate(chain):
            entry = namespace.in_flight.get(digest)
            age = 0
            if digest in namespace.index:
                status = ReserveStatus.COMMITTED
            elif entry is not None and entry.session is not session:
                status = ReserveStatus.IN_FLIGHT
                age = self._state.age_ms(entry.since)
            else:
                status = ReserveStatus.WRITE
                if position < len(granted):
                    slab, slot = granted[position]
                    if entry is None:
                        entry = namespace.in_flight[digest] = InFlight(session, self._state.clock())
                    entry.slots.add((slab.slab_id, slot))
                    slab.intents[slot] = digest
            statuses.append(status)
            ages.append(age)
        return statuses, ages

    def _check_entry(self, session: Session, namespace: Namespace, entry: CommitEntry) -> None:
        if len(entry.digest) != DIGEST_BYTES or len(entry.parent) != DIGEST_BYTES:
            raise InvalidRequestError(
                f"digest of {len(entry.digest)} and parent of {len(entry.parent)} bytes: expected {DIGEST_BYTES} each"
            )
        if entry.digest in (ROOT_DIGEST, entry.parent):
            raise InvalidRequestError(
                f"digest {entry.digest.hex()} with parent {entry.parent.hex()}: expected a digest that is neither zero "
                "nor its own parent"
            )
        if not 0 <= entry.checksum < _CHECKSUMS:
            raise InvalidRequestError(f"checksum {entry.checksum}: expected 64 bits")
        if not (math.isfinite(entry.error) and entry.error >= 0):
            raise InvalidRequestError(
                f"error {entry.error} of block {entry.digest.hex()}: expected a finite number from 0 on. Measure it "
                "with kvstore_kernels.noise"
            )
        slab = namespace.slabs.get(entry.slab_id)
        if slab is None or not 0 <= entry.slot < slab.slots:
            raise SlotNotOwnedError(
                f"slot {entry.slot} of slab {entry.slab_id} is not in namespace {namespace.namespace_id}: expected a "
                "slot that Reserve handed out. Keep the block local"
            )
        if entry.slot in slab.writes:
            raise InvalidRequestError(
                f"slot {entry.slot} of slab {entry.slab_id} is still being written: expected the answer of WriteBlocks "
                "before the commit"
            )
        node = slab.nodes[entry.slot]
        same = node is not None and (node.digest, node.generation) == (entry.digest, entry.generation)
        held = session.slots.get((entry.slab_id, entry.slot)) == entry.generation
        if not same and not (held and slab.slot_state(entry.slot) is SlotState.PRIVATE):
            raise SlotNotOwnedError(
                f"slot {entry.slot} of slab {entry.slab_id} at generation {entry.generation} is not private to this "
                f"session: it is {slab.slot_state(entry.slot).name.lower()} at generation "
                f"{slab.generation(entry.slot)}. Expected a private slot from Reserve. Keep the block local"
            )

    def _commit_one(self, session: Session, namespace: Namespace, entry: CommitEntry) -> bool:
        slab = namespace.slabs[entry.slab_id]
        node = slab.nodes[entry.slot]
        if node is not None:
            return node.indexed
        if entry.digest in namespace.index:
            self._state.counters.commit_losses += 1
            return False
        parent = namespace.index.get(entry.parent)
        if slab.state is not SlabState.LIVE or (parent is None and entry.parent != ROOT_DIGEST):
            return False
        node = Node(
            entry.digest,
            parent,
            slab,
            entry.slot,
            entry.generation,
            entry.checksum,
            session.name,
            next(self._state.ticks),
            entry.error,
        )
        # The writer goes on reading it in place until it gives the slot back.
        node.holds = 1
        slab.commit(node, entry.parent, namespace.spec.block_tokens)
        namespace.index.insert(node)
        if slab.intents.get(entry.slot) == entry.digest:
            del slab.intents[entry.slot]
        else:
            namespace.forget_intent(slab, entry.slot)
        namespace.settle(entry.digest, committed=True)
        self._state.counters.commits += 1
        return True
