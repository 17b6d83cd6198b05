"""Who leaves first. A policy orders the *candidates*: blocks that may go at this moment (leaves that nobody uses)."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable
from itertools import count
from typing import Generic, Protocol, TypeVar


class Evictable(Hashable, Protocol):
    """What a policy orders. `last_used` is a number that only grows."""

    last_used: int


Item = TypeVar("Item", bound=Evictable)


class EvictionPolicy(ABC, Generic[Item]):
    """The candidates of one slab."""

    @abstractmethod
    def add(self, item: Item) -> None:
        """Makes it a candidate. Idempotent."""

    @abstractmethod
    def remove(self, item: Item) -> None:
        """It is no candidate any more. Idempotent."""

    @abstractmethod
    def victim(self) -> Item | None:
        """The candidate that should go next, still a candidate; None without candidates."""

    @abstractmethod
    def __contains__(self, item: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...


class LeastRecentlyUsed(EvictionPolicy[Item]):
    """The candidate with the smallest `last_used`.

    A heap with lazy entries: using an item costs nothing here, `victim` corrects what has changed. Invariants: every
    candidate has exactly one heap entry, whose stamp is at most its `last_used`; entries of former candidates are
    dropped when they surface or when they outnumber the others. add and victim are O(log n) amortized, remove O(1).
    """

    def __init__(self) -> None:
        self._candidates: set[Item] = set()
        self._queued: set[Item] = set()
        self._heap: list[tuple[int, int, Item]] = []
        self._order = count()

    def add(self, item: Item) -> None:
        """See the base class."""
        self._candidates.add(item)
        if item not in self._queued:
            self._queued.add(item)
            heapq.heappush(self._heap, (item.last_used, next(self._order), item))

    def remove(self, item: Item) -> None:
        """See the base class."""
        self._candidates.discard(item)
        if len(self._heap) > 2 * len(self._candidates) + 64:
            self._heap = [(item.last_used, next(self._order), item) for item in self._candidates]
            heapq.heapify(self._heap)
            self._queued = set(self._candidates)

    def victim(self) -> Item | None:
        """See the base class."""
        while self._heap:
            stamp, _, item = self._heap[0]
            if item not in self._candidates:
                heapq.heappop(self._heap)
                self._queued.discard(item)
            elif item.last_used != stamp:
                heapq.heapreplace(self._heap, (item.last_used, next(self._order), item))
            else:
                return item
        return None

    def __contains__(self, item: object) -> bool:
        return item in self._candidates

    def __len__(self) -> int:
        return len(self._candidates)
