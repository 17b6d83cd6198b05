"""How large the slabs of a namespace are, and how many of them and of ledger records its limit can hold."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from kvstore.errors import BudgetTooSmallError
from kvstore.store.ledger import ledger_bytes

GRANULE = 2 << 20  # allocation granularity of device memory; host slabs keep to it, so that numbers agree
BUDGET_SHARE = 16
# Among sizes with equally small unused ends: not more mappings than needed, not more memory than a small model fills.
COMFORTABLE_SLOTS = 64


@dataclass(frozen=True, slots=True)
class SlabSize:
    """Bytes of a slab and the slots in it."""

    nbytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class NamespacePlan:
    """Sizes of a namespace: its slabs, how many of them its limit holds, and the ledger for so many."""

    slab: SlabSize
    max_slabs: int
    ledger_nbytes: int


def slab_size(slot_bytes: int, budget_bytes: int, max_sessions: int) -> SlabSize:
    """A multiple of 2 MiB, at most 1/16 of the budget and budget / max_sessions, with the smallest unused end.

    Where no such multiple holds a slot, the smallest multiple that does.
    """
    limit = min(budget_bytes // BUDGET_SHARE, budget_bytes // max_sessions)
    least = -(-slot_bytes // GRANULE)
    most = max(limit // GRANULE, least)
    # The search is bounded: past 4096 multiples the unused end is far below a promille of the slab.
    choices = range(least, min(most, least + 4096) + 1)

    def rank(multiple: int) -> tuple[int, int]:
        nbytes = multiple * GRANULE
        slots = nbytes // slot_bytes
        return nbytes % slot_bytes, multiple if slots >= COMFORTABLE_SLOTS else most + 1 + (most - multiple)

    nbytes = min(choices, key=rank) * GRANULE
    return SlabSize(nbytes, nbytes // slot_bytes)


def plan_namespace(slot_bytes: int, limit_bytes: int, budget_bytes: int, max_sessions: int) -> NamespacePlan:
    """Sizes for slots of `slot_bytes` under a namespace limit. Raises BudgetTooSmallError below one slab and ledger."""
    slab = slab_size(slot_bytes, budget_bytes, max_sessions)

    def cost(slabs: int) -> int:
        return slabs * slab.nbytes + ledger_bytes(slabs, slab.slots)

    max_slabs = bisect_right(range(1, limit_bytes // slab.nbytes + 1), limit_bytes, key=cost)
    if max_slabs == 0:
        least = cost(1)
        raise BudgetTooSmallError(
            f"the budget of {limit_bytes} bytes is below one slot of this model: a block takes {slot_bytes} bytes, the "
            f"smallest slab with its ledger {least}. Raise the budget to {least} bytes or more (--budget), or choose a "
            "smaller codec"
        )
    return NamespacePlan(slab, max_slabs, ledger_bytes(max_slabs, slab.slots))
