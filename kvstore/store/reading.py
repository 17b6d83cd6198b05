"""Look-ups and leases: the hot path of a request."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidRequestError, LimitReachedError
from kvstore.store.index import Prefix, chain_of
from kvstore.store.lease import Lease
from kvstore.store.namespace import Namespace
from kvstore.store.sessions import Session
from kvstore.store.state import StoreState
from kvstore.store.types import DIGEST_BYTES, LeaseResult, MatchResult, MissReason, Query

# What callers pass: a Query, or its first two.
QueryLike = tuple[int, bytes] | Query


class Reading:
    """Finds and leases prefixes. A call with several queries is one step: nothing is evicted between them."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def lookup(self, session_id: bytes, queries: Sequence[QueryLike]) -> list[MatchResult]:
        """See Store.lookup."""
        session = self._state.session(session_id)
        results = []
        for namespace, digests, bound in self._prepare(session, queries):
            blocks = _held(namespace, digests, bound)
            results.append(MatchResult(blocks, *self._why(session, namespace, digests, blocks, bound)))
        return results

    def lookup_and_lease(self, session_id: bytes, queries: Sequence[QueryLike]) -> list[LeaseResult]:
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
        for namespace, digests, bound in prepared:
            prefix = namespace.index.prefix_within(digests, bound)
            held = prefix.deepest.depth if prefix is not None else 0
            reason, age = self._why(session, namespace, digests, held, bound)
            asked = len(digests) // DIGEST_BYTES
            counters.lookups += 1
            if reason is MissReason.COMPLETE:
                counters.found_all += 1
            else:
                counters.misses[reason] += 1
                if held:
                    counters.found_part += 1
                else:
                    counters.found_none += 1
            counters.lookup_blocks += asked
            counters.hit_blocks += held
            counters.lookup_tokens += asked * namespace.spec.block_tokens
            counters.hit_tokens += held * namespace.spec.block_tokens
            if prefix is None:
                results.append(LeaseResult(0, [], [], [], [], [], reason, age))
            else:
                results.append(self._lease(session, namespace, prefix, reason, age))
        return results

    def in_flight_digest(self, session_id: bytes, namespace_id: int, digests: bytes, max_error: float) -> bytes | None:
        """See Store.in_flight_digest."""
        session = self._state.session(session_id)
        namespace = self._state.namespace_of(session, namespace_id)
        self._state.count(digests)
        blocks = _held(namespace, digests, max_error)
        reason, _ = self._why(session, namespace, digests, blocks, max_error)
        return _digest(digests, blocks) if reason is MissReason.IN_FLIGHT else None

    def _prepare(self, session: Session, queries: Sequence[QueryLike]) -> list[tuple[Namespace, bytes, float]]:
        """Checks everything before anything is leased."""
        most = self._state.config.max_queries
        if len(queries) > most:
            raise LimitReachedError(f"{len(queries)} queries in one call: at most {most} are allowed. Make more calls")
        prepared = []
        for query in queries:
            namespace_id, digests, bound = Query(*query)
            self._state.count(digests)
            if not bound >= 0:
                raise InvalidRequestError(f"max_block_error is {bound}: expected a number from 0 on, or none")
            prepared.append((self._state.namespace_of(session, namespace_id), digests, bound))
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

    def _why(
        self, session: Session, namespace: Namespace, digests: bytes, blocks: int, max_error: float
    ) -> tuple[MissReason, int]:
        """Why the prefix is not longer than `blocks`, and the age in milliseconds of what is in flight."""
        if blocks * DIGEST_BYTES == len(digests):
            return MissReason.COMPLETE, 0
        missing = _digest(digests, blocks)
        node = namespace.index.get(missing)
        if node is not None and node.worst > max_error and node.depth == blocks + 1:
            return MissReason.FIDELITY, 0
        entry = namespace.in_flight.get(missing)
        if entry is not None and entry.session is not session:
            return MissReason.IN_FLIGHT, self._state.age_ms(entry.since)
        if namespace.was_damaged(missing):
            return MissReason.DAMAGED, 0
        return MissReason.NOT_FOUND, 0


def _held(namespace: Namespace, digests: bytes, max_error: float) -> int:
    deepest, places = namespace.index.walk(digests)
    if deepest is None or deepest.worst <= max_error:
        return len(places)
    return sum(node.worst <= max_error for node in chain_of(deepest))


def _digest(digests: bytes, position: int) -> bytes:
    return digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]
