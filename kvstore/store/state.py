"""The state that the store's parts share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvstore.device.base import SlabMemory
from kvstore.errors import InvalidRequestError, LimitReachedError, NotHeldError, UnknownSessionError
from kvstore.store.events import Event
from kvstore.store.index import Node
from kvstore.store.namespace import Namespace
from kvstore.store.policy import EvictionPolicy
from kvstore.store.quota import Budget
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.stats import Counters
from kvstore.store.types import DIGEST_BYTES, StoreConfig


class StoreState:
    """All sessions, namespaces and slabs, the budget, and the events not yet taken.

    Ids (namespaces, slabs, leases, requests) start at 1 and are never used twice. `tick` orders uses for eviction.
    """

    def __init__(
        self,
        config: StoreConfig,
        create_ledger: Callable[[int], SlabMemory],
        clock: Callable[[], float],
        policy_factory: Callable[[], EvictionPolicy[Node]],
    ) -> None:
        self.config = config
        self.create_ledger = create_ledger
        self.clock = clock
        self.policy_factory = policy_factory
        self.sessions: dict[bytes, Session] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.slabs: dict[int, Slab] = {}
        self.budget = Budget(config.budget_bytes - config.fixed_bytes)
        self.counters = Counters()
        self.events: list[Event] = []
        self.ticks = count(1)
        self.namespace_ids = count(1)
        self.slab_ids = count(1)
        self.lease_ids = count(1)
        self.request_ids = count(1)

    def session(self, session_id: bytes) -> Session:
        """Raises UnknownSessionError."""
        session = self.sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"session {session_id.hex()} is not open here: expected the id from Welcome of this server. "
                "Open a session and register the model again"
            )
        return session

    def namespace(self, namespace_id: int) -> Namespace:
        """Raises NotHeldError."""
        namespace = self.namespaces.get(namespace_id)
        if namespace is None:
            raise NotHeldError(f"namespace {namespace_id} does not exist: expected one of {sorted(self.namespaces)}")
        return namespace

    @staticmethod
    def namespace_of(session: Session, namespace_id: int) -> Namespace:
        """A namespace that the session registered. Raises NotHeldError, the same for those of others and for none."""
        namespace = session.namespaces.get(namespace_id)
        if namespace is None:
            raise NotHeldError(
                f"namespace {namespace_id} is not registered by this session: expected one of "
                f"{sorted(session.namespaces)}. Register the model first"
            )
        return namespace

    def count(self, digests: bytes) -> int:
        """How many digests a `digests` field holds. Raises InvalidRequestError, LimitReachedError."""
        number, rest = divmod(len(digests), DIGEST_BYTES)
        if rest:
            raise InvalidRequestError(
                f"digests of {len(digests)} bytes: expected a whole number of {DIGEST_BYTES}-byte digests"
            )
        if number > self.config.max_query_digests:
            raise LimitReachedError(
                f"{number} digests in one query: at most {self.config.max_query_digests} are allowed. Ask for less"
            )
        return number

    def split(self, digests: bytes) -> list[bytes]:
        """The digests of a `digests` field. Raises as `count` does."""
        number = self.count(digests)
        return [digests[at : at + DIGEST_BYTES] for at in range(0, number * DIGEST_BYTES, DIGEST_BYTES)]

    def age_ms(self, since: float) -> int:
        """Milliseconds since a moment of the clock, as a uint32."""
        return min(max(0, int((self.clock() - since) * 1000)), 0xFFFFFFFF)
