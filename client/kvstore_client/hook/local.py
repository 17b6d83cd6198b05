"""A request without a service: slots in this process's memory, nothing shared."""

# ruff: noqa: ARG002  the arguments are those of every request
from __future__ import annotations

from collections.abc import Sequence

import torch
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab

from kvstore_client.blocks import Block, CommitEntry, Match, Origin, RequestTraffic
from kvstore_client.device_work import Done
from kvstore_client.errors import LocalBudgetExceeded

_SLOTS = 8


class LocalRequest:
    """Hands out slots of its own slabs on one device, at most `max_blocks` at a time. One thread at a time."""

    def __init__(self, layout: BlockLayout, *, max_blocks: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._max_blocks = max_blocks
        self._free: list[tuple[Slab, int]] = []
        self._used: set[Block] = set()
        self._made = 0

    def match(self, chains: Sequence[bytes], wait_ms: int = 0, *, anonymous: int | None = None) -> list[Match]:
        """Nothing is ever held."""
        return [Match(reason="not-shared") for _ in chains]

    def reserve(self, chains: Sequence[bytes], anonymous: int = 0) -> list[str]:
        """Every digest may be written."""
        return ["write" for chain in chains for _ in range(len(chain) // 32)]

    def take(self, digest: bytes | None = None) -> Block:
        """A slot; LocalBudgetExceeded behind the last."""
        if not self._free:
            slots = min(_SLOTS, self._max_blocks - self._made)
            if slots <= 0:
                raise LocalBudgetExceeded(
                    f"{self._max_blocks} local blocks are in use; close caches or raise the limit"
                )
            slab = Slab.allocate(self._layout.block_bytes, slots, device=self._device)
            self._free = [(slab, slot) for slot in reversed(range(slots))]
            self._made += slots
        slab, slot = self._free.pop()
        block = Block(slab=slab, slot=slot, origin=Origin.LOCAL)
        self._used.add(block)
        return block

    def take_all(self, digests: Sequence[bytes | None]) -> list[Block]:
        """A slot for each; LocalBudgetExceeded and none of them if there are fewer."""
        blocks: list[Block] = []
        try:
            blocks.extend(map(self.take, digests))
        except LocalBudgetExceeded:
            for block in blocks:
                self.give_back(block)
            raise
        return blocks

    def ensure_ahead(self, count: int) -> None:
        """Slots are made when they are taken."""

    def release_ahead(self, after: Done | None = None) -> None:
        """None lie ready."""

    def commit(self, entries: Sequence[CommitEntry | tuple[Block, bytes, bytes]], after: Done | None = None) -> None:
        """Nobody else could read them."""

    def give_back(self, block: Block, after: Done | None = None) -> None:
        """The slot may be taken again: what is sent to its stream from here on comes behind what still reads it."""
        if block in self._used:
            self._used.discard(block)
            self._free.append((block.slab, block.slot))

    def close(self, after: Done | None = None) -> None:
        """Drops the memory, which torch hands out again only behind what still reads it."""
        self._used.clear()
        self._free.clear()

    def report(self) -> RequestTraffic:
        """All blocks are local."""
        return RequestTraffic(local_blocks=self._made)
