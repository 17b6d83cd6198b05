"""The life of a slot and of a slab, as tables. What is not in a table raises IllegalTransitionError."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from kvstore.errors import IllegalTransitionError


class SlotState(IntEnum):
    """State of a slot, as the ledger stores it."""

    FREE = 0
    PRIVATE = 1
    COMMITTED = 2
    CONDEMNED = 3


class SlotEvent(Enum):
    """What can happen to a slot."""

    RESERVE = "reserve"  # a session gets it
    ABORT = "abort"  # its session gives it back unwritten, or dies
    COMMIT = "commit"  # its block becomes visible
    CONDEMN = "condemn"  # its block leaves the index: evicted or damaged
    RECLAIM = "reclaim"  # nobody reads it any more


class SlabState(IntEnum):
    """State of a slab."""

    LIVE = 0
    DRAINING = 1
    GONE = 2


class SlabEvent(Enum):
    """What can happen to a slab."""

    DRAIN = "drain"  # it is to go: no new slots, importers are asked to unmap
    VANISH = "vanish"  # nobody maps it, nothing in it is used


@dataclass(frozen=True, slots=True)
class SlotTransition:
    """One allowed step of a slot."""

    event: SlotEvent
    source: SlotState
    target: SlotState


@dataclass(frozen=True, slots=True)
class SlabTransition:
    """One allowed step of a slab."""

    event: SlabEvent
    source: SlabState
    target: SlabState


SLOT_TRANSITIONS = (
    SlotTransition(SlotEvent.RESERVE, SlotState.FREE, SlotState.PRIVATE),
    SlotTransition(SlotEvent.ABORT, SlotState.PRIVATE, SlotState.FREE),
    SlotTransition(SlotEvent.COMMIT, SlotState.PRIVATE, SlotState.COMMITTED),
    SlotTransition(SlotEvent.CONDEMN, SlotState.COMMITTED, SlotState.CONDEMNED),
    SlotTransition(SlotEvent.RECLAIM, SlotState.CONDEMNED, SlotState.FREE),
)

SLAB_TRANSITIONS = (
    SlabTransition(SlabEvent.DRAIN, SlabState.LIVE, SlabState.DRAINING),
    SlabTransition(SlabEvent.VANISH, SlabState.DRAINING, SlabState.GONE),
)

_SLOT_TABLE = {(step.event, step.source): step.target for step in SLOT_TRANSITIONS}
_SLAB_TABLE = {(step.event, step.source): step.target for step in SLAB_TRANSITIONS}


def next_slot_state(state: SlotState, event: SlotEvent, slab_id: int, slot: int) -> SlotState:
    """State after `event`. Raises IllegalTransitionError; `slab_id` and `slot` are for its text."""
    target = _SLOT_TABLE.get((event, state))
    if target is None:
        raise IllegalTransitionError(event.value, state.name.lower(), f"slot {slot} of slab {slab_id}")
    return target


def next_slab_state(state: SlabState, event: SlabEvent, slab_id: int) -> SlabState:
    """State after `event`. Raises IllegalTransitionError."""
    target = _SLAB_TABLE.get((event, state))
    if target is None:
        raise IllegalTransitionError(event.value, state.name.lower(), f"slab {slab_id}")
    return target
