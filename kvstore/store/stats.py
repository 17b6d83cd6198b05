"""Numbers for people: fields as in admin.proto, exact at the moment they are taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.store.types import MissReason


@dataclass(slots=True)
class Counters:
    """Sums since the store began.

    Invariants: lookups = found_all + found_part + found_none; misses by reason sum up to found_part + found_none.
    """

    lookups: int = 0
    found_all: int = 0
    found_part: int = 0
    found_none: int = 0
    misses: dict[MissReason, int] = field(
        default_factory=lambda: {reason: 0 for reason in MissReason if reason is not MissReason.COMPLETE}
    )
    lookup_blocks: int = 0
    lookup_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    commits: int = 0
    commit_losses: int = 0
    evictions: int = 0
    damaged: int = 0
    reserve_short: int = 0
    blocks_not_shared_error: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """One device. `used_bytes` = slabs (live, draining, being allocated) and ledgers."""

    device: str
    budget_bytes: int
    used_bytes: int
    slots_free: int
    slots_private: int
    slots_committed: int
    slots_condemned: int
    slabs_live: int
    slabs_draining: int
    blocks_pinned: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store at one moment."""

    devices: tuple[DeviceStats, ...]
    counters: Counters
    leases: int
    sessions: int


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace. `max_bytes` 0 = the whole budget. `sessions` counts the living ones that registered it. Errors are
    those of committed blocks, 0 without any.
    """

    namespace_id: int
    tenant: str
    model_name: str
    fingerprint: bytes
    codec: str
    block_bytes: int
    block_tokens: int
    committed: int
    private: int
    condemned: int
    free: int
    pinned_chains: int
    slabs: int
    slab_bytes: int
    max_bytes: int
    guaranteed_bytes: int
    sessions: int
    largest_error: float
    mean_error: float
    plan_name: str


@dataclass(frozen=True, slots=True)
class SessionStats:
    """One living session; times in seconds."""

    session_id: bytes
    name: str
    tenant: str
    transport: str
    transport_reason: str
    process_watched: bool
    leases: int
    private_slots: int
    age_s: float
    oldest_lease_s: float
    client_version: str
