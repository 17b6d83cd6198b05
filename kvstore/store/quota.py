"""Bytes: one hard budget for the device, a guarantee and a maximum for every namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from kvstore.store.namespace import Namespace
from kvstore.store.types import Quota, QuotaRule


class Budget:
    """The bytes of one device. Invariant: 0 <= used <= total, at every moment."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        """Bytes left."""
        return self.total - self.used

    def take(self, nbytes: int) -> None:
        """Counts bytes that are about to be allocated; whoever calls has checked `free`."""
        assert 0 <= nbytes <= self.free
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Bytes are free again."""
        assert 0 <= nbytes <= self.used
        self.used -= nbytes


def quota_for(rules: Sequence[QuotaRule], tenant: str, model: str) -> Quota:
    """The quota of the first rule whose patterns match; without one an equal share and no maximum."""
    for rule in rules:
        if fnmatchcase(tenant, rule.tenant) and fnmatchcase(model, rule.model):
            return rule.quota
    return Quota()


def maximum(namespace: Namespace, budget: Budget) -> int:
    """Most bytes a namespace may hold."""
    return min(namespace.quota.maximum or budget.total, budget.total)


def guarantee(namespace: Namespace, everyone: Iterable[Namespace], budget: Budget) -> int:
    """Bytes that nobody may take from a namespace.

    What its rule says; else an equal share of what the rules leave, among the namespaces that living sessions use (one
    without sessions has only a cache, which whoever needs the bytes may take).
    """
    if namespace.quota.guaranteed is not None:
        return namespace.quota.guaranteed
    if not namespace.sessions:
        return 0
    fixed = 0
    sharers = 0
    for other in everyone:
        if other.quota.guaranteed is not None:
            fixed += other.quota.guaranteed
        elif other.sessions:
            sharers += 1
    return max(0, budget.total - fixed) // max(1, sharers)


def available(namespace: Namespace, everyone: Iterable[Namespace], budget: Budget) -> int:
    """Free bytes of the budget that are not set aside for somebody else."""
    return budget.free - sum(other.claimed for other in everyone if other is not namespace)


def may_grow(namespace: Namespace, everyone: Sequence[Namespace], budget: Budget) -> bool:
    """Whether one more slab fits into budget, maximum and ledger."""
    need = namespace.next_slab_bytes
    return (
        len(namespace.ranges) > len(namespace.requests)
        and namespace.used_bytes + need <= maximum(namespace, budget)
        and available(namespace, everyone, budget) >= need
    )


def is_poor(namespace: Namespace, everyone: Sequence[Namespace], budget: Budget) -> bool:
    """Whether one more slab leaves it within its guarantee (or it has none at all), and within its maximum."""
    need = namespace.next_slab_bytes
    if namespace.used_bytes + need > maximum(namespace, budget) or len(namespace.ranges) <= len(namespace.requests):
        return False
    if not namespace.live_bytes - namespace.ledger_bytes:
        return True
    return namespace.live_bytes + need <= guarantee(namespace, everyone, budget)


def owed(namespace: Namespace, everyone: Sequence[Namespace], budget: Budget) -> int:
    """Bytes that the others still lack to what they are guaranteed, beyond what was claimed for them."""
    others = (other for other in everyone if other is not namespace)
    return sum(max(0, guarantee(other, everyone, budget) - other.live_bytes - other.claimed) for other in others)


def can_spare(namespace: Namespace, nbytes: int, everyone: Sequence[Namespace], budget: Budget) -> bool:
    """Whether it keeps its guarantee without a slab of `nbytes`."""
    return namespace.live_bytes - nbytes >= guarantee(namespace, everyone, budget)
