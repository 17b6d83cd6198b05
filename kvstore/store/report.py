"""Numbers for people, taken from the state."""

from __future__ import annotations

from dataclasses import replace

from kvstore.store.namespace import Namespace
from kvstore.store.quota import guarantee
from kvstore.store.sessions import Session
from kvstore.store.slots import SlabState, SlotState
from kvstore.store.state import StoreState
from kvstore.store.stats import DeviceStats, NamespaceStats, SessionStats, StoreStats


def store_stats(state: StoreState) -> StoreStats:
    """The whole store. Free slots are those of live slabs: nobody gets those of draining ones."""
    slabs = list(state.slabs.values())
    live = [slab for slab in slabs if slab.state is SlabState.LIVE]
    device = DeviceStats(
        device=state.config.device,
        budget_bytes=state.config.budget_bytes,
        used_bytes=state.budget.used + state.config.fixed_bytes,
        slots_free=sum(slab.free for slab in live),
        slots_private=sum(slab.private for slab in slabs),
        slots_committed=sum(slab.committed for slab in slabs),
        slots_condemned=sum(slab.condemned for slab in slabs),
        slabs_live=len(live),
        slabs_draining=len(slabs) - len(live),
        blocks_pinned=sum(len(namespace.protected()) for namespace in state.namespaces.values()),
    )
    leases = sum(len(session.leases) for session in state.sessions.values())
    counters = replace(state.counters, misses=dict(state.counters.misses))
    return StoreStats((device,), counters, leases, len(state.sessions))


def namespace_stats(state: StoreState, namespace: Namespace) -> NamespaceStats:
    """One namespace."""
    slabs = list(namespace.slabs.values())
    spec = namespace.spec
    errors = [node.error for node in namespace.index]
    return NamespaceStats(
        namespace_id=namespace.namespace_id,
        tenant=namespace.tenant,
        model_name=spec.model_name,
        fingerprint=spec.fingerprint,
        codec=spec.codec,
        block_bytes=spec.block_bytes,
        block_tokens=spec.block_tokens,
        committed=len(namespace.index),
        private=sum(slab.private for slab in slabs),
        condemned=sum(slab.condemned for slab in slabs),
        free=sum(slab.free for slab in namespace.live_slabs()),
        pinned_chains=len(namespace.pinned),
        slabs=len(slabs),
        slab_bytes=namespace.slab_bytes,
        max_bytes=namespace.quota.maximum,
        guaranteed_bytes=guarantee(namespace, list(state.namespaces.values()), state.budget),
        sessions=len(namespace.sessions),
        largest_error=max(errors, default=0.0),
        mean_error=sum(errors) / len(errors) if errors else 0.0,
        plan_name=spec.plan_name,
    )


def session_stats(state: StoreState, session: Session) -> SessionStats:
    """One session."""
    now = state.clock()
    oldest = next(iter(session.leases.values()), None)
    private = sum(state.slabs[slab_id].slot_state(slot) is SlotState.PRIVATE for slab_id, slot in session.slots)
    return SessionStats(
        session_id=session.session_id,
        name=session.name,
        tenant=session.tenant,
        transport=session.transport,
        transport_reason=session.transport_reason,
        process_watched=session.watched,
        leases=len(session.leases),
        private_slots=private,
        age_s=now - session.opened,
        oldest_lease_s=now - oldest.since if oldest is not None else 0.0,
        client_version=session.client_version,
    )
