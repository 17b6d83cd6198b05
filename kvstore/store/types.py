"""What callers hand to the store and get back. Plain values: no behaviour; all but a LeaseResult's prefix
hold no references into the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvstore.store.index import Prefix

DIGEST_BYTES = 32
INSTANCE_BYTES = 16
SESSION_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # parent of the first block of a sequence


class MissReason(IntEnum):
    """Why a prefix is not longer. Values as in blocks.proto."""

    COMPLETE = 0
    NOT_FOUND = 1
    IN_FLIGHT = 2
    DAMAGED = 3
    FIDELITY = 4


class ReserveStatus(IntEnum):
    """State of a digest that a session wants to write. Values as in blocks.proto."""

    WRITE = 0
    COMMITTED = 1
    IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes of one namespace. `guaranteed` None = an equal share among those in use; `maximum` 0 = the whole budget."""

    guaranteed: int | None = None
    maximum: int = 0


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """Gives `quota` to namespaces whose tenant and model name match the shell-style patterns."""

    tenant: str = "*"
    model: str = "*"
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Limits of a store, all hard. `budget_bytes` covers slabs (live, draining, being allocated), ledgers, and the
    `fixed_bytes` that the service itself takes on the device.
    """

    budget_bytes: int
    device: str = "cpu"
    fixed_bytes: int = 0
    max_sessions: int = 32
    max_namespaces: int = 64
    max_leases_per_session: int = 4096
    max_queries: int = 256
    max_query_digests: int = 16384  # 1 Mi tokens in blocks of 64
    max_damage_reports: int = 256
    max_plan_bytes: int = 64 << 20  # of one model
    max_plan_bytes_total: int = 256 << 20
    slab_retry_s: float = 5.0  # after a failed allocation nothing is allocated for so long
    quotas: tuple[QuotaRule, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One layer group of one shard of one model, as a worker registers it (RegisterModelRequest, flattened)."""

    fingerprint: bytes
    model_name: str
    codec: str
    codec_plan: bytes
    layer_group: str
    first_kv_head: int
    total_kv_heads: int
    kv_heads: int
    layers: int
    k_dim: int
    v_dim: int
    dtype: str
    block_tokens: int
    block_bytes: int
    layout_digest: bytes
    plan_name: str = ""

    @property
    def plan_key(self) -> str:
        """What its codec plan is kept under, beside tenant and fingerprint."""
        return self.plan_name or self.codec


@dataclass(frozen=True, slots=True)
class Registration:
    """The namespace of a registered model. `codec_plan` is the one kept; `codec_plan_kept`: it is the caller's."""

    namespace_id: int
    codec_plan: bytes
    codec_plan_kept: bool
    max_bytes: int


class Query(NamedTuple):
    """The chain of one sequence in one namespace; blocks with an error above `max_error` count as not held."""

    namespace_id: int
    digests: bytes
    max_error: float = math.inf


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Held prefix of one query, nothing pinned."""

    blocks: int
    miss_reason: MissReason
    in_flight_age_ms: int = 0


@dataclass(slots=True)
class LeaseResult:
    """A leased prefix. The four lists run parallel, one entry a block; `writers` are runs (session name, blocks).

    `lease_id` is 0 and the lists are empty when not a single block was found.
    """

    lease_id: int
    slab_ids: list[int]
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    writers: list[tuple[str, int]]
    miss_reason: MissReason
    in_flight_age_ms: int = 0
    # Shared by all leases of the same prefix, None without blocks; its `wire` is the caller's.
    prefix: Prefix | None = None

    @property
    def blocks(self) -> int:
        """Number of leased blocks."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class SlabRequest:
    """Memory that the store wants. The caller allocates `nbytes` (outside the event loop) and answers with
    `Store.add_slab` or `Store.slab_failed`, exactly once per `request_id`; its bytes are in the budget from now on.
    `session_id` is empty for a slab ahead: whoever reserves next writes it.
    """

    request_id: int
    session_id: bytes
    namespace_id: int
    nbytes: int
    slots: int
    slot_bytes: int


@dataclass(slots=True)
class Reservation:
    """Slots granted (those for digests first), and the state of every digest asked for.

    With `needs_slab` nothing was granted and nothing registered: allocate it and reserve again (or reserve with
    `grow=False` to be served from what is there). Several calls may get the *same* request (same `request_id`) while
    it is being allocated. `short_reason` is empty when all slots were granted.
    """

    slab_ids: list[int]
    slots: list[int]
    generations: list[int]
    statuses: list[ReserveStatus]
    in_flight_age_ms: list[int]
    short_reason: str = ""
    needs_slab: SlabRequest | None = None


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One slot at one generation."""

    slab_id: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """A written private slot that is to become visible. `parent` is ROOT_DIGEST for the first block of a sequence;
    `error` the block's rounding error, relative to what it holds.
    """

    slab_id: int
    slot: int
    generation: int
    digest: bytes
    parent: bytes
    checksum: int
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class EvictResult:
    """Blocks freed now, blocks freed when their last lease ends, blocks left because a pin covers them."""

    freed: int
    condemned: int
    pinned: int
