"""What a request holds and what it is told: blocks, matches, traffic."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_kernels.slab import Slab

DIGEST_BYTES = 32
NO_PARENT = bytes(DIGEST_BYTES)
"""Parent digest of the first block of a sequence."""


class Origin(enum.Enum):
    """Whose memory a block lies in."""

    LEASED = "leased"
    """Committed by somebody, leased by this request: read only."""
    PRIVATE = "private"
    """A slot of the service that only this session reads and writes."""
    LOCAL = "local"
    """A slot of this process. Nobody else can read it."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One slot that a request may use, in mapped memory, until the request gives it back or closes.

    Blocks compare by identity. `slab` keeps the memory mapped for as long as the block, the slab or a tensor made from
    it is alive, so a block that is kept too long reads stale bytes at worst, never unmapped memory.
    """

    slab: Slab
    slot: int
    origin: Origin
    slab_id: int = 0
    """The service's number of the slab; 0 for LOCAL."""
    generation: int = 0
    """The slot's generation when it was handed out; 0 for LOCAL."""
    epoch: int = 0
    """Which attachment to a service handed it out; 0 for LOCAL."""

    @property
    def address(self) -> int:
        """Address of the block's first byte in this process."""
        return self.slab.address(self.slot)

    @property
    def writable(self) -> bool:
        """Whether this request may write it."""
        return self.origin is not Origin.LEASED


@dataclass(frozen=True, slots=True)
class Match:
    """The held prefix of one chain.

    `blocks` are the leading blocks, all readable; `writers` says who wrote them, run by run, in order, as
    (session name, number of blocks). `reason` says in one word why there are no more: "" (the whole chain is held),
    "not-found", "in-flight", "damaged", "fidelity", "service-away", "error", "local-budget", "unmapped", "not-shared".
    """

    blocks: list[Block] = field(default_factory=list)
    writers: list[tuple[str, int]] = field(default_factory=list)
    reason: str = ""
    in_flight_age_ms: int = 0
    """With "in-flight": how long its writer has been at it."""


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """A full block to make visible under `digest`, after the block `parent` (NO_PARENT for the first)."""

    block: Block
    digest: bytes
    parent: bytes


@dataclass(slots=True)
class RequestTraffic:
    """What one request cost and why it got no more. Counters only grow."""

    rpcs: int = 0
    rpc_ms: float = 0.0
    """Time the request's own thread waited for the service."""
    verify_ms: float = 0.0
    """Time its own thread spent on checksums of leased blocks."""
    blocks_leased: int = 0
    blocks_committed: int = 0
    commits_lost: int = 0
    """Another worker's commit of the same digest came first."""
    commits_dropped: int = 0
    """Not committed: queue full, service away or short of room."""
    blocks_not_shared_error: int = 0
    """Not committed: their error misses the bound of the codec plan, or that of a block before them does."""
    bytes_sent: int = 0
    bytes_received: int = 0
    local_blocks: int = 0
    """Slots taken from this process because the service had none ready."""
    damaged_blocks: int = 0
    short_reasons: list[str] = field(default_factory=list)
    """Distinct reasons for which slots, blocks or commits fell short, first one first."""

    def note(self, reason: str) -> None:
        """Records a reason once."""
        if reason and reason not in self.short_reasons and len(self.short_reasons) < 16:
            self.short_reasons.append(reason)
