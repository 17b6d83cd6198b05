"""A namespace: tenant x model x codec plan x shard. Blocks are shared inside it, never across."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.store.index import ChainIndex, Node
from kvstore.store.lease import Lease
from kvstore.store.ledger import Ledger
from kvstore.store.sessions import Session
from kvstore.store.sizing import NamespacePlan
from kvstore.store.slab import Slab
from kvstore.store.slots import SlabState
from kvstore.store.types import ModelSpec, Quota, SlabRequest

_DAMAGED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """Identity of a namespace."""

    tenant: str
    fingerprint: bytes
    plan_key: str
    plan_digest: bytes
    layer_group: str
    first_kv_head: int
    total_kv_heads: int
    kv_heads: int


@dataclass(slots=True)
class InFlight:
    """A digest that `session` is writing, in these (slab id, slot), since a moment of the store's clock."""

    session: Session
    since: float
    slots: set[tuple[int, int]] = field(default_factory=set)


class Namespace:
    """State of one namespace.

    Invariants: `slabs` are its live and draining slabs, each with a ledger range of its own, the others in `ranges`;
    `requests` are slabs being allocated, their bytes are in the budget; `claimed` are free bytes of the budget that
    were taken from another namespace for this one.
    """

    def __init__(
        self, namespace_id: int, key: NamespaceKey, spec: ModelSpec, plan: NamespacePlan, quota: Quota
    ) -> None:
        self.namespace_id = namespace_id
        self.key = key
        self.spec = spec
        self.plan = plan
        self.quota = quota
        self.index = ChainIndex()
        self.ledger: Ledger | None = None
        self.slabs: dict[int, Slab] = {}
        self.ranges = list(range(plan.max_slabs - 1, -1, -1))
        self.requests: dict[int, SlabRequest] = {}
        self.claimed = 0
        # Slots that reservations of late asked for: so many are worth having ready.
        self.usual = 0
        self.sessions: set[Session] = set()
        self.leases: dict[int, Lease] = {}
        self.in_flight: dict[bytes, InFlight] = {}
        self.pinned: dict[bytes, Node] = {}
        self.last_used = 0.0
        self._damaged: OrderedDict[bytes, None] = OrderedDict()
        self._watchers: dict[bytes, list[Callable[[bool], None]]] = {}

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.key.tenant

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return self.spec.block_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of its slabs, live and draining."""
        return sum(slab.nbytes for slab in self.slabs.values())

    @property
    def live_bytes(self) -> int:
        """Bytes of what it has for good: live slabs, slabs being allocated, ledger."""
        live = sum(slab.nbytes for slab in self.slabs.values() if slab.state is SlabState.LIVE)
        return live + sum(request.nbytes for request in self.requests.values()) + self.ledger_bytes

    @property
    def used_bytes(self) -> int:
        """All its bytes in the budget."""
        return self.slab_bytes + sum(request.nbytes for request in self.requests.values()) + self.ledger_bytes

    @property
    def ledger_bytes(self) -> int:
        """Bytes of the ledger, from the first slab request on."""
        return self.plan.ledger_nbytes if self.ledger is not None or self.requests else 0

    @property
    def next_slab_bytes(self) -> int:
        """What one more slab costs, the ledger included if it is the first."""
        return self.plan.slab.nbytes + (0 if self.ledger_bytes else self.plan.ledger_nbytes)

    def live_slabs(self) -> list[Slab]:
        """Slabs that may hand out slots."""
        return [slab for slab in self.slabs.values() if slab.state is SlabState.LIVE]

    def note_damage(self, digest: bytes) -> None:
        """Remembers, for a while, that a block was found damaged."""
        self._damaged[digest] = None
        if len(self._damaged) > _DAMAGED_KEPT:
            self._damaged.popitem(last=False)

    def was_damaged(self, digest: bytes) -> bool:
        """Whether the block was condemned for damage and not written again since."""
        return digest in self._damaged

    def watch(self, digest: bytes, callback: Callable[[bool], None]) -> Callable[[], None]:
        """See Store.watch_digest."""
        self._watchers.setdefault(digest, []).append(callback)

        def cancel() -> None:
            callbacks = self._watchers.get(digest)
            if callbacks is not None and callback in callbacks:
                callbacks.remove(callback)
                if not callbacks:
                    del self._watchers[digest]

        return cancel

    def settle(self, digest: bytes, committed: bool) -> None:
        """The digest is in flight no more: tells everybody who waits for it."""
        self.in_flight.pop(digest, None)
        if committed:
            self._damaged.pop(digest, None)
        for callback in self._watchers.pop(digest, ()):
            callback(committed)

    def forget_intent(self, slab: Slab, slot: int) -> None:
        """A slot will not be committed under the digest it was reserved for."""
        digest = slab.intents.pop(slot, None)
        entry = self.in_flight.get(digest) if digest is not None else None
        if digest is None or entry is None:
            return
        entry.slots.discard((slab.slab_id, slot))
        if not entry.slots:
            self.settle(digest, committed=False)

    def protected(self) -> set[Node]:
        """Pinned blocks and their ancestors."""
        found: set[Node] = set()
        for pinned in self.pinned.values():
            step: Node | None = pinned
            while step is not None and step not in found:
                found.add(step)
                step = step.parent
        return found
