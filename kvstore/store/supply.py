"""Where free slots come from, in order:

1. free slots of slabs that the session writes, or that nobody living writes (it becomes their writer);
2. a new slab, if budget, maximum and guarantees allow; if the namespace is below its guarantee, the budget for it is
   taken from one that is above: whole slabs, fewest leases first;
3. the least recently used leaves of those slabs;
4. a slab of another session of the namespace without private slots: its writer is asked to downgrade, this reservation
   is short meanwhile.

Growing comes before evicting (design 3.5 names the leaves first): a store that evicts while its budget is not used up
would never hold more than one slab a session.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvstore.store.events import DowngradeRequested, WriterChanged
from kvstore.store.index import Node
from kvstore.store.namespace import Namespace
from kvstore.store.quota import available, can_spare, is_poor, may_grow, owed
from kvstore.store.removal import Removal
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.slots import SlabState
from kvstore.store.state import StoreState
from kvstore.store.types import SlabRequest

# The session of a slab that is allocated ahead.
NOBODY = b""
# A reservation of unusual size is forgotten by an eighth with each that follows.
_FORGET = 8


class Supply:
    """Finds slots for sessions.

    Invariants: a session gets slots only from live slabs of its namespace of which it is the writer and that are not
    promised to another; at most one slab request of a session and namespace is open at a time, and at most one ahead
    in each namespace.
    """

    def __init__(self, state: StoreState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self._no_requests_before = float("-inf")
        self._failure = ""

    def find(self, session: Session, namespace: Namespace, wanted: int, *, grow: bool) -> SlabRequest | str:
        """Makes `wanted` free slots available to the session, as far as that goes at once.

        Returns a slab to allocate first, or why it is less ("" when it is enough).
        """
        namespace.usual = max(wanted, namespace.usual - namespace.usual // _FORGET)
        if self._free(session, namespace) < wanted:
            self._adopt(session, namespace, wanted, lambda slab: slab.free)
        if self._free(session, namespace) >= wanted:
            return ""
        request = self.request(session, namespace) if grow else None
        if request is not None:
            return request
        if self._evict(session, namespace, wanted):
            return ""
        self._ask_writers(session, namespace, wanted)
        return "" if self._free(session, namespace) >= wanted else self._shortage(namespace)

    def take(self, session: Session, namespace: Namespace, wanted: int) -> list[tuple[Slab, list[int]]]:
        """Makes up to `wanted` free slots private to the session, in long ascending runs."""
        slabs = self._own(session, namespace)
        # A slab that has them all side by side comes first: a client reads a run of slots in one go.
        slabs.sort(key=lambda slab: (not slab.longest_run(wanted), slab.slab_id))
        taken = []
        for slab in slabs:
            if wanted == 0:
                break
            slots = slab.take(wanted, session.instance_id)
            if slots:
                taken.append((slab, slots))
                wanted -= len(slots)
        return taken

    def request(self, session: Session, namespace: Namespace) -> SlabRequest | None:
        """A new slab for the session, the one already under way, or None when there can't be one."""
        for request in namespace.requests.values():
            if request.session_id in (session.session_id, NOBODY):
                return request
        if self._state.clock() < self._no_requests_before:
            return None
        everyone = list(self._state.namespaces.values())
        if not may_grow(namespace, everyone, self._state.budget):
            self._claim(namespace, everyone)
            if not may_grow(namespace, everyone, self._state.budget):
                return None
        return self._open(session.session_id, namespace)

    def request_ahead(self, session: Session, namespace: Namespace) -> SlabRequest | None:
        """A slab that nobody waits for, if the session has fewer slots ready than a reservation takes.

        None when something is being allocated in the namespace, and when the bytes would come from somebody's
        guarantee, from an eviction, or from beyond a limit.
        """
        orphans = sum(slab.free for slab in namespace.live_slabs() if slab.writer is None)
        enough = max(namespace.plan.slab.slots, namespace.usual)
        if namespace.requests or self._free(session, namespace) + orphans >= enough:
            return None
        everyone = list(self._state.namespaces.values())
        if self._state.clock() < self._no_requests_before or not may_grow(namespace, everyone, self._state.budget):
            return None
        if available(namespace, everyone, self._state.budget) - namespace.next_slab_bytes < owed(
            namespace, everyone, self._state.budget
        ):
            return None
        return self._open(NOBODY, namespace)

    def _open(self, session_id: bytes, namespace: Namespace) -> SlabRequest:
        need = namespace.next_slab_bytes
        slab = namespace.plan.slab
        request = SlabRequest(
            next(self._state.request_ids),
            session_id,
            namespace.namespace_id,
            slab.nbytes,
            slab.slots,
            namespace.slot_bytes,
        )
        self._state.budget.take(need)
        namespace.claimed = max(0, namespace.claimed - need)
        namespace.requests[request.request_id] = request
        return request

    def allocation_failed(self, error: str) -> None:
        """Requests nothing for a while."""
        self._no_requests_before = self._state.clock() + self._state.config.slab_retry_s
        self._failure = error

    def could_write(self, session: Session, namespace: Namespace) -> bool:
        """Whether a reservation would find a slab without a new one."""
        return any(slab.free or len(slab.policy) for slab in namespace.live_slabs() if slab.writer in (None, session))

    @staticmethod
    def _own(session: Session, namespace: Namespace) -> list[Slab]:
        return [slab for slab in namespace.live_slabs() if slab.writer is session and slab.promised is None]

    def _free(self, session: Session, namespace: Namespace) -> int:
        return sum(slab.free for slab in self._own(session, namespace))

    def _set_writer(self, slab: Slab, session: Session) -> None:
        slab.writer = session
        slab.promised = None
        self._state.events.append(WriterChanged(slab.slab_id, session.session_id))

    def _adopt(self, session: Session, namespace: Namespace, wanted: int, worth: Callable[[Slab], int]) -> None:
        """Takes over slabs without a writer, the most worthy first, until there is enough."""
        orphans = [slab for slab in namespace.live_slabs() if slab.writer is None and worth(slab)]
        orphans.sort(key=worth, reverse=True)
        for slab in orphans:
            if self._free(session, namespace) >= wanted:
                return
            self._set_writer(slab, session)

    def _evict(self, session: Session, namespace: Namespace, wanted: int) -> bool:
        """Evicts the oldest leaves of the slabs the session may write until `wanted` slots are free."""
        missing = wanted - self._free(session, namespace)
        slabs = [slab for slab in namespace.live_slabs() if slab.writer in (None, session) and slab.promised is None]
        oldest = _OldestFirst(slabs)
        while missing > 0:
            victim = oldest.victim()
            if victim is None:
                return False
            slab, parent = victim.slab, victim.parent
            if slab.writer is None:
                missing -= slab.free
                self._set_writer(slab, session)
            self._removal.evict_leaf(victim)
            missing -= 1
            oldest.look_again(slab)
            # Its parent may be a leaf now, and lie in another slab.
            if parent is not None and parent.slab is not slab:
                oldest.look_again(parent.slab)
        return True

    def _ask_writers(self, session: Session, namespace: Namespace, wanted: int) -> None:
        """Asks another writer for one slab. One at a time, and never from one who has hardly more slabs."""
        slabs = namespace.live_slabs()
        if any(slab.promised is session for slab in slabs):
            return
        written: dict[Session, int] = {}
        for slab in slabs:
            if slab.writer is not None:
                written[slab.writer] = written.get(slab.writer, 0) + 1
        mine = written.get(session, 0)
        choices = [
            slab
            for slab in slabs
            if slab.writer is not None
            and slab.writer is not session
            and slab.promised is None
            and not slab.private
            and (slab.free or len(slab.policy))
            and (mine == 0 or written[slab.writer] > mine + 1)
        ]
        if not choices:
            return
        slab = max(choices, key=lambda slab: (written[_writer(slab)], slab.free, len(slab.policy)))
        writer = _writer(slab)
        if slab.slab_id in writer.mapped:
            slab.promised = session
            self._state.events.append(DowngradeRequested(writer.session_id, (slab.slab_id,)))
        else:
            self._set_writer(slab, session)
            self._evict(session, namespace, wanted)

    def _claim(self, namespace: Namespace, everyone: list[Namespace]) -> None:
        """Drains slabs of namespaces above their guarantee until what comes free is enough for one more slab here."""
        if not is_poor(namespace, everyone, self._state.budget):
            return
        missing = namespace.next_slab_bytes - available(namespace, everyone, self._state.budget)
        missing -= sum(slab.nbytes for slab in self._state.slabs.values() if slab.claimant is namespace)
        while missing > 0:
            slab = self._cheapest_slab(namespace, everyone)
            if slab is None:
                return
            slab.claimant = namespace
            missing -= slab.nbytes
            self._removal.drain(slab)

    def _cheapest_slab(self, beneficiary: Namespace, everyone: list[Namespace]) -> Slab | None:
        best: tuple[int, int, int] | None = None
        found: Slab | None = None
        for namespace in everyone:
            if namespace is beneficiary:
                continue
            pinned = {node.slab_id for node in namespace.protected()}
            leases: dict[int, int] = {}
            for lease in namespace.leases.values():
                for slab_id in lease.slab_ids:
                    leases[slab_id] = leases.get(slab_id, 0) + 1
            for slab in namespace.live_slabs():
                if slab.private or slab.slab_id in pinned:
                    continue
                if not can_spare(namespace, slab.nbytes, everyone, self._state.budget):
                    break
                nodes = [node for node in slab.nodes if node is not None]
                held = sum(node.holds for node in nodes)
                newest = max((node.last_used for node in nodes), default=0)
                rank = (leases.get(slab.slab_id, 0) + held, newest, slab.slab_id)
                if best is None or rank < best:
                    best, found = rank, slab
        return found

    def _shortage(self, namespace: Namespace) -> str:
        if any(slab.state is SlabState.DRAINING and slab.claimant is namespace for slab in self._state.slabs.values()):
            return "budget is being moved from another namespace: try again"
        if self._state.clock() < self._no_requests_before:
            return f"no memory for another slab: {self._failure}"
        if any(slab.promised is not None for slab in namespace.live_slabs()):
            return "a slab is being handed over by another writer: try again"
        limit = namespace.quota.maximum
        if limit and namespace.used_bytes + namespace.next_slab_bytes > limit:
            return f"the namespace's maximum of {limit} bytes is used up by blocks in use"
        return f"the budget of {self._state.budget.total} bytes is used up by blocks in use"


class _OldestFirst:
    """Merges the candidates of several slabs. Invariant: every slab with candidates has an entry that is not newer."""

    def __init__(self, slabs: list[Slab]) -> None:
        self._slabs = {slab.slab_id: slab for slab in slabs}
        self._heap: list[tuple[int, int]] = []
        for slab in slabs:
            self.look_again(slab)

    def victim(self) -> Node | None:
        """The oldest candidate of all slabs."""
        while self._heap:
            stamp, slab_id = heapq.heappop(self._heap)
            node = self._slabs[slab_id].policy.victim()
            if node is not None and node.last_used == stamp:
                return node
        return None

    def look_again(self, slab: Slab) -> None:
        """The candidates of a slab have changed."""
        node = slab.policy.victim() if slab.slab_id in self._slabs else None
        if node is not None:
            heapq.heappush(self._heap, (node.last_used, slab.slab_id))


def _writer(slab: Slab) -> Session:
    assert slab.writer is not None
    return slab.writer
