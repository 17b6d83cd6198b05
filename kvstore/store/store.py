"""The rules of the service: one object, single-threaded, no I/O. Called on the server's event loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from kvstore.device.base import SlabMemory
from kvstore.errors import NotHeldError
from kvstore.store.events import Event
from kvstore.store.index import Node
from kvstore.store.integrity import integrity_problems
from kvstore.store.mappings import Mappings
from kvstore.store.namespace import Namespace
from kvstore.store.payloads import Payloads
from kvstore.store.policy import EvictionPolicy, LeastRecentlyUsed
from kvstore.store.reading import QueryLike, Reading
from kvstore.store.registry import Registry
from kvstore.store.removal import Removal
from kvstore.store.report import namespace_stats, session_stats, store_stats
from kvstore.store.session_table import SessionTable
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.state import StoreState
from kvstore.store.stats import NamespaceStats, SessionStats, StoreStats
from kvstore.store.supply import Supply
from kvstore.store.types import (
    CommitEntry,
    EvictResult,
    LeaseResult,
    MatchResult,
    ModelSpec,
    Registration,
    Reservation,
    SlabRequest,
    SlotRef,
    StoreConfig,
)
from kvstore.store.writing import Writing


class Store:
    """Everything the service knows about blocks. After every call: `take_events()` and carry them out.

    Holds on slots: whoever got a slot from `reserve` keeps it until `abort` or the end of the session. `commit` makes
    the block visible but does not end the hold, because the writer goes on reading the block in place; a client calls
    `abort` for *every* slot it took when its request is over, committed or not.

    Parts: `Reading` (look-ups), `Writing` (reserve, commit), `Supply` (where slots come from), `Removal` (how things
    go), `Registry` (models), `SessionTable`, `Mappings`, `Payloads` (bytes; `payloads` is for memory that is slow to
    reach); they share a `StoreState`. A call that raises has changed nothing. All calls that take a session id raise
    UnknownSessionError, those with a namespace id NotHeldError.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        create_ledger: Callable[[int], SlabMemory],
        clock: Callable[[], float],
        policy_factory: Callable[[], EvictionPolicy[Node]] = LeastRecentlyUsed,
    ) -> None:
        """`create_ledger(nbytes)` makes zeroed shared memory; `clock` gives seconds and never goes back."""
        self._state = StoreState(config, create_ledger, clock, policy_factory)
        self._registry = Registry(self._state)
        self._removal = Removal(self._state, self._registry.drop_if_idle)
        self._supply = Supply(self._state, self._removal)
        self._sessions = SessionTable(self._state, self._removal)
        self._reading = Reading(self._state)
        self._writing = Writing(self._state, self._supply, self._removal)
        self._mappings = Mappings(self._state, self._removal)
        self.payloads = Payloads(self._state, self._removal)

    def open_session(
        self,
        *,
        session_id: bytes,
        instance_id: bytes,
        tenant: str,
        name: str,
        transport: str,
        transport_reason: str,
        watched: bool,
        client_version: str,
    ) -> str:
        """Opens a session and returns its name (made from the instance id when empty).

        The same `instance_id` again supersedes: the new id takes over leases, slots and mappings, SessionEnded names
        the old id and every Granted is sent again. Raises LimitReachedError, InvalidRequestError, AccessDeniedError
        (another tenant's instance).
        """
        return self._sessions.open(
            session_id=session_id,
            instance_id=instance_id,
            tenant=tenant,
            name=name,
            transport=transport,
            transport_reason=transport_reason,
            watched=watched,
            client_version=client_version,
        )

    def close_session(self, session_id: bytes, reason: str) -> None:
        """Ends a watched session whose process is dead: leases end, private slots return. Idempotent.

        For a session that nobody watches it is `end_lease_grace`: its process may live.
        """
        session = self._state.sessions.get(session_id)
        self._sessions.close(session_id, reason, process_dead=session is not None and session.watched)

    def stream_ended(self, session_id: bytes) -> bool:
        """The session's stream broke. True: it held nothing and is closed.

        False: a watched session lives on until its process dies; for one that is not watched, wait the grace period
        and call `end_lease_grace`.
        """
        return self._sessions.stream_ended(session_id)

    def end_lease_grace(self, session_id: bytes, reason: str) -> None:
        """Ends a session that nobody watches: leases end, every slab it mapped drains, never to be reused. Idempotent.

        Does nothing for a watched session: only the death of its process ends that.
        """
        session = self._state.sessions.get(session_id)
        if session is not None and not session.watched:
            self._sessions.close(session_id, reason, process_dead=False)

    def codec_plan(self, session_id: bytes, fingerprint: bytes, codec: str) -> bytes | None:
        """The plan kept for a model of the session's tenant."""
        return self._registry.plan(self._state.session(session_id).tenant, fingerprint, codec)

    def register_model(self, session_id: bytes, spec: ModelSpec) -> Registration:
        """The namespace of a model's blocks, new or known. Idempotent.

        Raises LayoutConflictError, BudgetTooSmallError, InvalidRequestError, LimitReachedError.
        """
        return self._registry.register(self._state.session(session_id), spec, self._removal)

    def prepare_slab(self, session_id: bytes, namespace_id: int) -> SlabRequest | None:
        """A slab to allocate ahead if the session could not write a block without one (call after registering)."""
        session, namespace = self._place(session_id, namespace_id)
        if self._supply.could_write(session, namespace):
            return None
        return self._supply.request(session, namespace)

    def slab_ahead(self, session_id: bytes, namespace_id: int) -> SlabRequest | None:
        """A slab to allocate while nobody waits, so that the next reservation finds slots (call after `reserve`).

        Evicts nothing, drains nothing, and leaves what other namespaces are guaranteed. Its slab has no writer: whoever
        reserves next gets it, and until then it gives way to a namespace that is short.
        """
        session, namespace = self._place(session_id, namespace_id)
        return self._supply.request_ahead(session, namespace)

    def lookup(self, session_id: bytes, queries: Sequence[QueryLike]) -> list[MatchResult]:
        """Held prefix of each Query (or its first two); pins nothing, touches nothing."""
        return self._reading.lookup(session_id, queries)

    def lookup_and_lease(self, session_id: bytes, queries: Sequence[QueryLike]) -> list[LeaseResult]:
        """Leases the longest held prefix of each Query (or its first two) in one step. Raises LimitReachedError."""
        return self._reading.lookup_and_lease(session_id, queries)

    def in_flight_digest(
        self, session_id: bytes, namespace_id: int, digests: bytes, max_error: float = math.inf
    ) -> bytes | None:
        """The first digest of the query that is not held, if another session is writing it."""
        return self._reading.in_flight_digest(session_id, namespace_id, digests, max_error)

    def watch_digest(self, namespace_id: int, digest: bytes, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Calls `callback(committed)` once: True when the digest is committed, False when its writer gives up.

        It is called from inside a later store call (or at once if the digest is not in flight) and must only set a
        flag. Returns a function that cancels (idempotent).
        """
        namespace = self._state.namespace(namespace_id)
        if digest not in namespace.in_flight:
            callback(digest in namespace.index)
            return lambda: None
        return namespace.watch(digest, callback)

    def reserve(
        self, session_id: bytes, namespace_id: int, digests: bytes, anonymous: int, *, grow: bool = True
    ) -> Reservation:
        """Hands out private slots; see Reservation. Never waits, never raises because memory is short."""
        session, namespace = self._place(session_id, namespace_id)
        return self._writing.reserve(session, namespace, digests, anonymous, grow=grow)

    def add_slab(self, request: SlabRequest, memory: SlabMemory) -> int:
        """Takes the memory of a request into use and returns the slab id. The store owns `memory` until SlabGone.

        Raises OutOfMemoryError when the namespace's ledger can't be made; the request is over then and the memory still
        the caller's.
        """
        return self._writing.add_slab(request, memory)

    def slab_failed(self, request: SlabRequest, error: str) -> None:
        """The memory can't be had; nothing is requested for a while."""
        self._writing.slab_failed(request, error)

    def commit(self, session_id: bytes, namespace_id: int, entries: Sequence[CommitEntry]) -> list[bool]:
        """Makes private blocks visible; whether each slot is the committed one.

        False: another commit of the digest came first, its parent is gone, or its slab drains; the slot stays private.
        A repeat answers as the first call did. Raises SlotNotOwnedError, InvalidRequestError, LimitReachedError.
        """
        session, namespace = self._place(session_id, namespace_id)
        return self._writing.commit(session, namespace, entries)

    def note_not_shared(self, blocks: int) -> None:
        """A writer kept so many blocks to itself, because their error misses the bound."""
        self._state.counters.blocks_not_shared_error += blocks

    def abort(self, session_id: bytes, slots: Sequence[SlotRef]) -> int:
        """Ends the caller's hold on slots, private (free then) or committed. Number ended; others are skipped."""
        return self._writing.abort(self._state.session(session_id), slots)

    def release(self, session_id: bytes, lease_ids: Sequence[int]) -> int:
        """Ends leases; number ended now, those ended before are skipped."""
        session = self._state.session(session_id)
        leases = [session.leases[lease_id] for lease_id in dict.fromkeys(lease_ids) if lease_id in session.leases]
        for lease in leases:
            self._removal.end_lease(lease)
        return len(leases)

    def pin(self, session_id: bytes, namespace_id: int, digest: bytes, pinned: bool) -> int:
        """Keeps the chain that ends with `digest` from eviction, or lets it go. Its length. Raises NotHeldError."""
        _, namespace = self._place(session_id, namespace_id)
        return self._pin(namespace, digest, pinned)

    def report_damage(self, session_id: bytes, namespace_id: int, digests: bytes) -> int:
        """Checks the bytes of each block and condemns the damaged ones with all that follow them. Number condemned."""
        checks = self.payloads.damage_checks(session_id, namespace_id, digests)
        return sum(self.payloads.checked(check, check.is_sound()) for check in checks)

    def read_payload(self, session_id: bytes, lease_id: int, block: int, offset: int, nbytes: int) -> bytes:
        """Bytes of one leased block; cheap enough for a call a chunk. Raises NotHeldError, InvalidRequestError."""
        return self.payloads.leased_span(session_id, lease_id, block, offset, nbytes).read()

    def write_payload(self, session_id: bytes, slot: SlotRef, offset: int, data: bytes) -> None:
        """Writes into the caller's private slot. Raises SlotNotOwnedError, InvalidRequestError."""
        span = self.payloads.begin_write(session_id, slot, offset, len(data))
        try:
            span.write(data)
        finally:
            self.payloads.end_write(slot)

    def open_slab(self, session_id: bytes, slab_id: int, *, writable: bool) -> Slab:
        """A slab for a session that opens it by a handle; it counts as mapped.

        Raises NotHeldError, AccessDeniedError (not its writer), ConflictError (its memory has no handle).
        """
        return self._mappings.open(self._state.session(session_id), slab_id, writable=writable)

    def check_session(self, session_id: bytes) -> None:
        """Raises UnknownSessionError for an id of no living session."""
        self._state.session(session_id)

    def mapped(self, session_id: bytes, slab_id: int) -> None:
        """The session maps the slab.

        Optional: a slab counts as mapped by a session of transport "fd" from the first reply naming it.
        """
        self._mappings.mapped(self._state.session(session_id), slab_id)

    def unmapped(self, session_id: bytes, slab_ids: Sequence[int]) -> None:
        """The session has dropped its mappings. Unknown slabs are skipped."""
        self._mappings.unmapped(self._state.session(session_id), slab_ids)

    def downgraded(self, session_id: bytes, slab_ids: Sequence[int]) -> None:
        """The session's mappings are read-only now. Slabs that it does not write, or writes into, are skipped."""
        self._mappings.downgraded(self._state.session(session_id), slab_ids)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        events, self._state.events = self._state.events, []
        return events

    def evict(self, namespace_id: int, *, include_pinned: bool) -> EvictResult:
        """Takes all blocks of a namespace out of the index. Raises NotHeldError."""
        namespace = self._state.namespace(namespace_id)
        keep = set() if include_pinned else namespace.protected()
        freed, condemned = self._removal.remove_all(namespace, keep)
        self._state.counters.evictions += freed + condemned
        return EvictResult(freed, condemned, len(keep))

    def pin_chain(self, namespace_id: int, digest: bytes, pinned: bool) -> int:
        """Like `pin`, for operators."""
        return self._pin(self._state.namespace(namespace_id), digest, pinned)

    def memories(self) -> list[SlabMemory]:
        """All memory that the store owns: slabs and ledgers. For the end: the store must not be used afterwards."""
        ledgers = [namespace.ledger for namespace in self._state.namespaces.values() if namespace.ledger is not None]
        for ledger in ledgers:
            ledger.release()
        return [slab.memory for slab in self._state.slabs.values()] + [ledger.memory for ledger in ledgers]

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        return store_stats(self._state)

    def namespaces(self) -> list[NamespaceStats]:
        """In the order of their ids."""
        return [namespace_stats(self._state, namespace) for _, namespace in sorted(self._state.namespaces.items())]

    def sessions(self) -> list[SessionStats]:
        """In the order they came."""
        return [session_stats(self._state, session) for session in self._state.sessions.values()]

    def check_integrity(self) -> list[str]:
        """Broken invariants in words; empty = clean."""
        return integrity_problems(self._state)

    def verify_payloads(self) -> Iterator[bool]:
        """Reads every committed block against its checksum, one a step.

        True = sound, False = it was condemned, with all that follow it. Between two steps other calls are allowed;
        blocks that are gone by then are skipped.
        """
        for check in self.payloads.checks():
            sound = check.is_sound()
            self.payloads.checked(check, sound)
            yield sound

    def _place(self, session_id: bytes, namespace_id: int) -> tuple[Session, Namespace]:
        session = self._state.session(session_id)
        return session, self._state.namespace_of(session, namespace_id)

    @staticmethod
    def _pin(namespace: Namespace, digest: bytes, pinned: bool) -> int:
        node = namespace.index.get(digest)
        if node is None:
            raise NotHeldError(
                f"chain {digest.hex()} is not held in namespace {namespace.namespace_id}: expected the digest of a "
                "committed block. Prewarm the text first"
            )
        node.pinned = pinned
        if pinned:
            namespace.pinned[digest] = node
        else:
            namespace.pinned.pop(digest, None)
        namespace.index.refresh(node)
        return node.depth
