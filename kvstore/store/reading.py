"""Look-ups and leases: the hot path of a request."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import LimitReachedError
from kvstore.store.index import Prefix
from kvstore.store.lease import Lease
from kvstore.store.namespace import Namespace
from kvstore.store.sessions import Session
from kvstore.store.state import StoreState
from kvstore.store.types import DIGEST_BYTES, LeaseResult, MatchResult, MissReason

Query = tuple[int, bytes]


class Reading:
    """Finds and leases prefixes. A call with several queries is one step: nothing is evicted between them."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def lookup(self, session_id: bytes, queries: Sequence[Query]) -> list[MatchResult]:
        """See Store.lookup."""
        session = self._state.session(session_id)
        results = []
        for namespace, digests in self._prepare(session, queries):
            blocks = len(namespace.index.walk(digests)[1])
            results.append(MatchResult(blocks, *self._why(session, namespace, digests, blocks)))
        return results

    def lookup_and_lease(self, session_id: bytes, queries: Sequence[Query]) -> list[LeaseResult]:
        """See Store.lookup_and_lease."""
        session = self._state.session(session_id)
        prepared = self._prepare(session, queries)
        most = self._state.config.max_leases_per_session
        if len(session.leases) + len(queries) > most:
            raise LimitReachedError(
                f"session {session.name!r} has {len(session.leases)} leases and asks for {len(queries)} more: at most "
                f"{most} are allowed. Release leases when a request is over"
            )
        counters = self._state.counters
        results = []
        for namespace, digests in prepared:
            prefix = namespace.index.prefix(digests)
            held = prefix.deepest.depth if prefix is not None else 0
            reason, age = self._why(session, namespace, digests, held)
            asked = len(digests) // DIGEST_BYTES
            counters.lookups += 1
            counters.lookup_blocks += asked
            counters.hit_blocks += held
            counters.lookup_tokens += asked * namespace.spec.block_tokens
            counters.hit_tokens += held * namespace.spec.block_tokens
            if prefix is None:
                results.append(LeaseResult(0, [], [], [], [], [], reason, age))
            else:
                results.append(self._lease(session, namespace, prefix, reason, age))
        return results

    def in_flight_digest(self, session_id: bytes, namespace_id: int, digests: bytes) -> bytes | None:
        """See Store.in_flight_digest."""
        session = self._state.session(session_id)
        namespace = self._state.namespace_of(session, namespace_id)
        self._state.count(digests)
        blocks = len(namespace.index.walk(digests)[1])
        reason, _ = self._why(session, namespace, digests, blocks)
        return _digest(digests, blocks) if reason is MissReason.IN_FLIGHT else None

    def _prepare(self, session: Session, queries: Sequence[Query]) -> list[tuple[Namespace, bytes]]:
        """Checks everything before anything is leased."""
        most = self._state.config.max_queries
        if len(queries) > most:
            raise LimitReachedError(f"{len(queries)} queries in one call: at most {most} are allowed. Make more calls")
        prepared = []
        for namespace_id, digests in queries:
            self._state.count(digests)
            prepared.append((self._state.namespace_of(session, namespace_id), digests))
        return prepared

    def _lease(
        self, session: Session, namespace: Namespace, prefix: Prefix, reason: MissReason, age: int
    ) -> LeaseResult:
        deepest = prefix.deepest
        lease = Lease(next(self._state.lease_ids), session, namespace, deepest, prefix.slabs, self._state.clock())
        namespace.leases[lease.lease_id] = lease
        session.leases[lease.lease_id] = lease
        if session.maps:
            session.mapped |= prefix.slabs
        # Ancestors are used as well, but need no mark: they inherit it when this block goes.
        deepest.last_used = next(self._state.ticks)
        deepest.anchors += 1
        namespace.index.refresh(deepest)
        return LeaseResult(
            lease.lease_id,
            prefix.slab_ids,
            prefix.slots,
            prefix.generations,
            prefix.checksums,
            prefix.writers,
            reason,
            age,
            prefix,
        )

    def _why(self, session: Session, namespace: Namespace, digests: bytes, blocks: int) -> tuple[MissReason, int]:
        """Why the prefix is not longer than `blocks`, and the age in milliseconds of what is in flight."""
        if blocks * DIGEST_BYTES == len(digests):
            return MissReason.COMPLETE, 0
        missing = _digest(digests, blocks)
        entry = namespace.in_flight.get(missing)
        if entry is not None and entry.session is not session:
            return MissReason.IN_FLIGHT, self._state.age_ms(entry.since)
        if namespace.was_damaged(missing):
            return MissReason.DAMAGED, 0
        return MissReason.NOT_FOUND, 0


def _digest(digests: bytes, position: int) -> bytes:
    return digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]
