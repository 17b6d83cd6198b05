"""How blocks and slabs go: eviction, damage, the end of leases and holds, draining."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.store.events import SlabGone, UnmapRequested, WriterChanged
from kvstore.store.index import Node
from kvstore.store.lease import Lease
from kvstore.store.namespace import Namespace
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.slots import SlabState, SlotState
from kvstore.store.state import StoreState


class Removal:
    """Takes things away, so that whoever reads them keeps them until he is done.

    A block that leaves the index is free at once if no lease covers it and its writer does not hold it, else condemned
    until both have ended. A draining slab is gone when nothing in it is used and no session maps it, unless freeing it
    could pull memory away from a process that nobody watches.
    """

    def __init__(self, state: StoreState, namespace_idle: Callable[[Namespace], None]) -> None:
        self._state = state
        self._namespace_idle = namespace_idle
        self._asking = 0  # sessions that are still to be asked again, over all slabs

    def remove(self, namespace: Namespace, top: Node) -> tuple[int, int]:
        """Takes a block and all that follow it out of the index. Returns (blocks freed, blocks condemned)."""
        nodes = namespace.index.remove_subtree(top)
        if len(nodes) > 1 or top.anchors:
            self._move_anchors(namespace, set(nodes))
        freed = 0
        for node in nodes:
            if node.pinned:
                node.pinned = False
                del namespace.pinned[node.digest]
            node.slab.condemn(node.slot)
            freed += self._reclaim_if_unused(node)
        return freed, len(nodes) - freed

    def remove_all(self, namespace: Namespace, keep: set[Node]) -> tuple[int, int]:
        """Takes every block out of the index except `keep`, which holds the ancestors of its members."""
        freed = condemned = 0
        tops = [node for node in namespace.index if node not in keep and (node.parent is None or node.parent in keep)]
        for top in tops:
            counts = self.remove(namespace, top)
            freed += counts[0]
            condemned += counts[1]
        return freed, condemned

    def evict_leaf(self, node: Node) -> None:
        """Frees a candidate for eviction: one step from choice to free slot."""
        freed, condemned = self.remove(node.slab.namespace, node)
        assert (freed, condemned) == (1, 0)
        self._state.counters.evictions += 1

    def end_lease(self, lease: Lease) -> None:
        """The session reads the chain no more."""
        namespace = lease.namespace
        del namespace.leases[lease.lease_id]
        del lease.session.leases[lease.lease_id]
        if lease.anchor is not None:
            lease.anchor.anchors -= 1
            namespace.index.refresh(lease.anchor)
        if lease.anchor is not lease.node:
            for node in lease.condemned_blocks():
                node.cover -= 1
                self._reclaim_if_unused(node)
        if self._asking:
            self._ask_again(lease.session)

    def end_hold(self, session: Session, slab: Slab, slot: int) -> None:
        """The session needs its slot no more: a private one is free, a committed block stays."""
        del session.slots[slab.slab_id, slot]
        if slab.slot_state(slot) is SlotState.PRIVATE:
            slab.namespace.forget_intent(slab, slot)
            if slot in slab.writes:
                slab.abandoned.add(slot)
            else:
                self.free_private(slab, slot)
        else:
            node = slab.nodes[slot]
            assert node is not None
            node.holds -= 1
            if node.indexed:
                slab.namespace.index.refresh(node)
            else:
                self._reclaim_if_unused(node)
        if self._asking:
            self._ask_again(session)

    def free_private(self, slab: Slab, slot: int) -> None:
        """A private slot that no session holds is free."""
        slab.abort(slot)
        if slab.state is SlabState.DRAINING and not slab.private and slab.writer is not None:
            self._set_writer(slab, None)
        self._vanish_if_unused(slab)

    def drain(self, slab: Slab) -> None:
        """Starts the end of a slab: its blocks leave the index, its importers are asked to unmap it."""
        slab.drain()
        slab.promised = None
        if not slab.private and slab.writer is not None:
            self._set_writer(slab, None)
        for session in self._state.sessions.values():
            if slab.slab_id in session.mapped:
                self._state.events.append(UnmapRequested(session.session_id, (slab.slab_id,)))
        for node in slab.nodes:
            if node is not None and node.indexed:
                freed, condemned = self.remove(slab.namespace, node)
                self._state.counters.evictions += freed + condemned
        self._vanish_if_unused(slab)

    def unmapped(self, session: Session, slab: Slab) -> None:
        """The session says that it dropped its mapping."""
        if session.uses(slab.slab_id):
            # A lease or a slot that the session still has may make it map the slab again: not gone yet.
            if slab.state is SlabState.DRAINING and session not in slab.ask_again:
                slab.ask_again.add(session)
                self._asking += 1
            return
        session.mapped.discard(slab.slab_id)
        if slab.writer is session and slab.state is SlabState.LIVE:
            self.hand_over(slab)
        self._vanish_if_unused(slab)

    def hand_over(self, slab: Slab) -> None:
        """The writer of a live slab gives it up: to the session it is promised to, else to whoever comes."""
        heir = slab.promised
        slab.promised = None
        self._set_writer(slab, heir if heir is not None and heir.alive else None)

    def forget_session(self, session: Session, may_be_alive: Iterable[int]) -> None:
        """Lets go of all that a session held. Slabs in `may_be_alive` may still be read by its process: they drain."""
        mapped, session.mapped = session.mapped, set()
        doubtful = [self._state.slabs[slab_id] for slab_id in sorted(may_be_alive) if slab_id in self._state.slabs]
        for slab in doubtful:
            slab.tainted = True
        for lease in list(session.leases.values()):
            self.end_lease(lease)
        for slab_id, slot in list(session.slots):
            self.end_hold(session, self._state.slabs[slab_id], slot)
        for slab in list(self._state.slabs.values()):
            if slab.promised is session:
                slab.promised = None
            if session in slab.ask_again:
                slab.ask_again.discard(session)
                self._asking -= 1
            if slab.writer is session:
                self.hand_over(slab)
        for slab in doubtful:
            if slab.state is SlabState.LIVE:
                self.drain(slab)
        for slab_id in mapped:
            remaining = self._state.slabs.get(slab_id)
            if remaining is not None:
                self._vanish_if_unused(remaining)

    def _move_anchors(self, namespace: Namespace, removed: set[Node]) -> None:
        for lease in namespace.leases.values():
            anchor = lease.anchor
            if anchor not in removed:
                continue
            step: Node | None = anchor
            while step is not None and step in removed:
                step.cover += 1
                step = step.parent
            assert anchor is not None
            anchor.anchors -= 1
            lease.anchor = step
            if step is not None:
                step.anchors += 1
                namespace.index.refresh(step)

    def _reclaim_if_unused(self, node: Node) -> bool:
        if node.cover or node.holds:
            return False
        node.slab.reclaim(node.slot)
        self._vanish_if_unused(node.slab)
        return True

    def _set_writer(self, slab: Slab, session: Session | None) -> None:
        slab.writer = session
        self._state.events.append(WriterChanged(slab.slab_id, session.session_id if session is not None else None))

    def _ask_again(self, session: Session) -> None:
        for slab_id in list(session.mapped):
            slab = self._state.slabs.get(slab_id)
            if slab is not None and session in slab.ask_again and not session.uses(slab_id):
                slab.ask_again.discard(session)
                self._asking -= 1
                self._state.events.append(UnmapRequested(session.session_id, (slab_id,)))

    def _vanish_if_unused(self, slab: Slab) -> None:
        if slab.state is not SlabState.DRAINING or slab.free != slab.slots or slab.never_freed:
            return
        if any(slab.slab_id in session.mapped for session in self._state.sessions.values()):
            return
        slab.vanish()
        namespace = slab.namespace
        del self._state.slabs[slab.slab_id]
        del namespace.slabs[slab.slab_id]
        namespace.ranges.append(slab.slab_range)
        if not slab.tainted:
            slab.memory.discard()
        self._state.budget.give_back(slab.nbytes)
        claimant = slab.claimant
        if claimant is not None and claimant.sessions:
            claimant.claimed += slab.nbytes
        self._state.events.append(SlabGone(slab.slab_id, namespace.namespace_id, slab.memory))
        self._namespace_idle(namespace)
