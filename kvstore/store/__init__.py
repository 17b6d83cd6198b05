"""The state of the service: which block lies where, who may read it, who may write, who has to leave."""

from kvstore.store.store import Store
from kvstore.store.types import (
    CommitEntry,
    EvictResult,
    LeaseResult,
    MatchResult,
    MissReason,
    ModelSpec,
    Quota,
    QuotaRule,
    Registration,
    Reservation,
    ReserveStatus,
    SlabRequest,
    SlotRef,
    StoreConfig,
)

__all__ = [
    "CommitEntry",
    "EvictResult",
    "LeaseResult",
    "MatchResult",
    "MissReason",
    "ModelSpec",
    "Quota",
    "QuotaRule",
    "Registration",
    "Reservation",
    "ReserveStatus",
    "SlabRequest",
    "SlotRef",
    "Store",
    "StoreConfig",
]
