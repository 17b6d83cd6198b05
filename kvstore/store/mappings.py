"""Who maps which slab, and how."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import AccessDeniedError, NotHeldError
from kvstore.store.events import UnmapRequested
from kvstore.store.removal import Removal
from kvstore.store.sessions import Session
from kvstore.store.slab import Slab
from kvstore.store.slots import SlabState
from kvstore.store.state import StoreState


class Mappings:
    """What sessions say of their mappings. Invariant: a slab of a foreign namespace looks like one that isn't there."""

    def __init__(self, state: StoreState, removal: Removal) -> None:
        self._state = state
        self._removal = removal

    def open(self, session: Session, slab_id: int, *, writable: bool) -> Slab:
        """See Store.open_slab."""
        slab = self._own(session, slab_id)
        # Raises for memory without handles, before anything is noted.
        slab.memory.ipc_handle()
        if writable and slab.writer is not session:
            raise AccessDeniedError(
                f"slab {slab_id} is not this session's to write. Expected a slab that Reserve named to it: open it "
                "with writable=false, or reserve slots"
            )
        self.mapped(session, slab_id)
        return slab

    def mapped(self, session: Session, slab_id: int) -> None:
        """See Store.mapped."""
        slab = self._own(session, slab_id)
        session.mapped.add(slab_id)
        if slab.state is SlabState.DRAINING and not session.uses(slab_id):
            # It said before that it unmapped it, and is late: ask once more.
            self._state.events.append(UnmapRequested(session.session_id, (slab_id,)))

    def unmapped(self, session: Session, slab_ids: Sequence[int]) -> None:
        """See Store.unmapped."""
        for slab_id in slab_ids:
            slab = self._state.slabs.get(slab_id)
            if slab is not None and slab_id in session.mapped:
                self._removal.unmapped(session, slab)

    def downgraded(self, session: Session, slab_ids: Sequence[int]) -> None:
        """See Store.downgraded."""
        for slab_id in slab_ids:
            slab = self._state.slabs.get(slab_id)
            if slab is not None and slab.writer is session and not slab.private:
                self._removal.hand_over(slab)

    def _own(self, session: Session, slab_id: int) -> Slab:
        slab = self._state.slabs.get(slab_id)
        if slab is None or slab.namespace.namespace_id not in session.namespaces:
            raise NotHeldError(f"slab {slab_id} is not in a namespace of this session: expected one that a reply named")
        return slab
