"""What the store asks its caller to carry out. `Store.take_events()` hands them over in order; carry them out before
answering the call that caused them, so that no client hears of a segment that the supervisor does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.device.base import SlabMemory


@dataclass(frozen=True, slots=True)
class LedgerCreated:
    """A namespace has a ledger now: hand it to the supervisor. `records` of ledger.RECORD_BYTES follow its header."""

    namespace_id: int
    memory: SlabMemory
    records: int


@dataclass(frozen=True, slots=True)
class LedgerGone:
    """A namespace is no more: let the supervisor drop the ledger, then close `memory`."""

    namespace_id: int
    memory: SlabMemory


@dataclass(frozen=True, slots=True)
class SlabAdded:
    """A slab is in use: hand it to the supervisor (its writer follows as WriterChanged)."""

    slab_id: int
    namespace_id: int
    memory: SlabMemory
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class SlabGone:
    """Nobody maps the slab, nothing of it is used, its bytes are free: let the supervisor drop it, close `memory`."""

    slab_id: int
    namespace_id: int
    memory: SlabMemory


@dataclass(frozen=True, slots=True)
class WriterChanged:
    """The slab has another writing session, or none."""

    slab_id: int
    session_id: bytes | None


@dataclass(frozen=True, slots=True)
class Granted:
    """The session may open the segments of the namespace. Also sent when a session id changed (superseded instance)."""

    session_id: bytes
    namespace_id: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is no more: revoke its grants, end its stream."""

    session_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class UnmapRequested:
    """Ask the session to drop its mapping of these slabs; it answers, and `Store.unmapped` takes the answer."""

    session_id: bytes
    slab_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DowngradeRequested:
    """Ask the session to map these slabs read-only; it answers, and `Store.downgraded` takes the answer."""

    session_id: bytes
    slab_ids: tuple[int, ...]


Event = (
    LedgerCreated
    | LedgerGone
    | SlabAdded
    | SlabGone
    | WriterChanged
    | Granted
    | SessionEnded
    | UnmapRequested
    | DowngradeRequested
)
