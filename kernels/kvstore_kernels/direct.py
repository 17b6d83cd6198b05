"""Memory of this very process, found by the random id of its allocation.

A service inside a worker's process publishes its slabs here, and the worker's client uses them where they lie instead
of mapping them a second time (CUDA refuses to open a handle in the process that made it). Imports no torch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

ALLOCATION_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class DirectMemory:
    """`nbytes` bytes at `address` (of a device or of the host), there for as long as somebody refers to `owner`."""

    address: int
    nbytes: int
    owner: object


_lock = threading.Lock()
_published: dict[bytes, DirectMemory] = {}


def publish(allocation_id: bytes, address: int, nbytes: int, owner: object) -> None:
    """Makes memory known. `owner` frees it when it is referred to no more. ValueError for an id that is no id or known.

    Thread-safe, as all functions here.
    """
    if len(allocation_id) != ALLOCATION_ID_BYTES:
        raise ValueError(
            f"allocation id of {len(allocation_id)} bytes: expected {ALLOCATION_ID_BYTES} random bytes, draw a new one"
        )
    with _lock:
        if allocation_id in _published:
            raise ValueError(f"allocation {allocation_id.hex()} is published already: expected an id of its own")
        _published[allocation_id] = DirectMemory(address, nbytes, owner)


def withdraw(allocation_id: bytes) -> None:
    """Nobody finds the memory from now on; whoever found it before keeps it. Idempotent."""
    with _lock:
        # Outside of the lock: the last reference may go with it, and free gibibytes.
        kept = _published.pop(allocation_id, None)
    del kept


def find(allocation_id: bytes) -> DirectMemory | None:
    """The memory of an id, None when this process did not make it (any id may be asked for)."""
    with _lock:
        return _published.get(allocation_id)
