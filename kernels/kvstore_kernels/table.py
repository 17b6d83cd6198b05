"""Which blocks hold a batch's tokens: rows of (slab, slot) and how many tokens each row has."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.layout import BLOCK_TOKENS
from kvstore_kernels.slab import Slab
from kvstore_kernels.tail import Tail

# Keys of BlockTable.view_cache that stand for no layer, or for no row.
ROW_PLAN = -1
APPEND_VIEWS = -2
COMPILED_STEP = -3
DEVICE_STEP = -4
ALL_ROWS = -1


class BlockPlace(Protocol):
    """Anything that says where a block lies."""

    @property
    def slab(self) -> Slab: ...

    @property
    def slot(self) -> int: ...


class Entry(NamedTuple):
    """One block of a row."""

    slab: Slab
    slot: int


class Run(NamedTuple):
    """Neighbouring slots of one slab that hold neighbouring blocks: `start` is the row's token index of the first."""

    slab: Slab
    first_slot: int
    blocks: int
    start: int


class BlockTable:
    """The blocks of each row, in token order, for all layers of one layer group.

    Invariants: token t of a row lies in its block t // block_tokens at t % block_tokens; so every block but the last
    one in use is full, and blocks behind it (reserved ahead) have count 0; 0 <= tokens(row) <= capacity(row).
    Not locked: one thread at a time.
    """

    def __init__(self, rows: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        if rows < 1:
            raise TableError(f"a table of {rows} rows: expected at least 1")
        self.rows = rows
        self.block_tokens = block_tokens
        self._entries: list[list[Entry]] = [[] for _ in range(rows)]
        self._tokens = [0] * rows
        self._runs: list[list[Run]] = [[] for _ in range(rows)]
        # A row's version grows whenever its blocks (not its token count) change.
        self._versions = [0] * rows
        # How often a row's blocks changed otherwise than by one more at its end.
        self._rebuilds = [0] * rows
        # Of codecs that quantize whole blocks: what isn't quantized yet.
        self.tail: Tail | None = None
        # (row or ALL_ROWS, layer or one of the keys above) -> what it was made for, and what was made.
        self.view_cache: dict[tuple[int, int], tuple[Hashable, Any]] = {}

    def append_block(self, row: int, slab: Slab, slot: int, count: int = 0) -> None:
        """Adds a block with `count` tokens in use behind the row's blocks.

        A count above 0 needs every earlier block full. Raises TableError otherwise.
        """
        slab.check_slot(slot)
        entries = self._entries[row]
        if not 0 <= count <= self.block_tokens:
            raise TableError(f"count {count} in row {row}: expected 0 to {self.block_tokens}")
        if count and self._tokens[row] != len(entries) * self.block_tokens:
            raise TableError(
                f"block with {count} tokens behind row {row}'s {self._tokens[row]} tokens in {len(entries)} blocks: "
                "fill the earlier blocks first (set_tokens)"
            )
        runs = self._runs[row]
        last = runs[-1] if runs else None
        if last is not None and last.slab is slab and last.first_slot + last.blocks == slot:
            runs[-1] = last._replace(blocks=last.blocks + 1)
        else:
            runs.append(Run(slab, slot, 1, len(entries) * self.block_tokens))
        entries.append(Entry(slab, slot))
        self._tokens[row] += count
        self._versions[row] += 1

    def append_blocks(self, row: int, places: Iterable[BlockPlace]) -> None:
        """Adds blocks without tokens behind the row's blocks, in one go."""
        entries, runs = self._entries[row], self._runs[row]
        new = [Entry(place.slab, place.slot) for place in places]
        for slab, slot in new:
            slab.check_slot(slot)
        # Every run begins where the slot before it isn't its neighbour.
        before = entries[-1] if entries else None
        starts = [
            index for index, (last, entry) in enumerate(zip([before, *new], new, strict=False))
            if last is None or last.slab is not entry.slab or last.slot + 1 != entry.slot
        ]  # fmt: skip
        lengths = [end - start for start, end in pairwise([*starts, len(new)])]
        leading = starts[0] if starts else len(new)
        if leading:
            runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + leading)
        runs += [
            Run(*new[start], blocks, (len(entries) + start) * self.block_tokens)
            for start, blocks in zip(starts, lengths, strict=True)
        ]
        entries += new
        self._versions[row] += len(new)

    def set_count(self, row: int, count: int) -> None:
        """Sets how many tokens of the row's last block are in use; the blocks before it count as full."""
        if not self._entries[row]:
            raise TableError(f"row {row} has no block: append one before setting its count")
        if not 0 <= count <= self.block_tokens:
            raise TableError(f"count {count} in row {row}: expected 0 to {self.block_tokens}")
        self.set_tokens(row, (len(self._entries[row]) - 1) * self.block_tokens + count)

    def set_tokens(self, row: int, tokens: int) -> None:
        """Sets how many tokens the row holds, from its first block on. Raises TableError past its capacity."""
        if not 0 <= tokens <= self.capacity(row):
            raise TableError(f"{tokens} tokens in row {row}: expected 0 to {self.capacity(row)}; append blocks first")
        self._tokens[row] = tokens

    def replace_block(self, row: int, index: int, slab: Slab, slot: int) -> Entry:
        """Puts another block with the same content in place of the row's block `index`; returns the old one."""
        slab.check_slot(slot)
        entries = self._entries[row]
        if not 0 <= index < len(entries):
            raise TableError(f"block {index} of row {row}: expected 0 to {len(entries) - 1}")
        old = entries[index]
        self._rebuild(row, [*entries[:index], Entry(slab, slot), *entries[index + 1 :]])
        return old

    def drop_blocks(self, row: int, keep: int) -> list[Entry]:
        """Takes all blocks behind the first `keep` out of the row and returns them; its tokens shrink with them."""
        entries = self._entries[row]
        if not 0 <= keep <= len(entries):
            raise TableError(f"keep {keep} blocks of row {row}: expected 0 to {len(entries)}")
        dropped = entries[keep:]
        if dropped:
            self._rebuild(row, entries[:keep])
        self._tokens[row] = min(self._tokens[row], self.capacity(row))
        return dropped

    def select_rows(self, rows: Iterable[int]) -> BlockTable:
        """A new table with these rows of this one, in that order; rows may repeat (they share blocks)."""
        chosen = list(rows)
        table = BlockTable(len(chosen), block_tokens=self.block_tokens)
        for new, old in enumerate(chosen):
            table._rebuild(new, list(self._entries[old]))
            table._tokens[new] = self._tokens[old]
        if self.tail is not None:
            table.tail = self.tail.select(chosen)
        return table

    def tokens(self, row: int) -> int:
        """Tokens in use in the row."""
        return self._tokens[row]

    def capacity(self, row: int) -> int:
        """Tokens that the row's blocks can hold."""
        return len(self._entries[row]) * self.block_tokens

    def blocks(self, row: int) -> tuple[Entry, ...]:
        """The row's blocks in token order, those reserved ahead too."""
        return tuple(self._entries[row])

    def entry(self, row: int, index: int) -> Entry:
        """The row's block `index`."""
        return self._entries[row][index]

    def count(self, row: int, index: int) -> int:
        """Tokens in use in the row's block `index`."""
        return max(0, min(self.block_tokens, self._tokens[row] - index * self.block_tokens))

    def version(self, row: int) -> int:
        """Grows whenever the row's blocks, not only its token count, change."""
        return self._versions[row]

    @property
    def versions(self) -> list[int]:
        """`version` of every row; don't change the list."""
        return self._versions

    @property
    def rebuilds(self) -> list[int]:
        """How often each row's blocks changed otherwise than by appending; don't change the list."""
        return self._rebuilds

    @property
    def token_counts(self) -> list[int]:
        """`tokens` of every row; don't change the list."""
        return self._tokens

    @property
    def device(self) -> torch.device:
        """The device of the table's blocks; where some were put elsewhere, the CUDA device that computes on them."""
        found = torch.device("cpu")
        for runs in self._runs:
            # What is written lies on the compute device, and what is written last comes last.
            for run in reversed(runs):
                if run.slab.device.type != "cpu":
                    found = run.slab.device
                    break
        return found

    def runs(self, row: int) -> list[Run]:
        """Maximal runs of consecutive slots in one slab, in token order; don't change the list."""
        return self._runs[row]

    def addresses(self) -> torch.Tensor:
        """int64 [rows, most blocks]: address of each block, 0 where a row has no more."""
        widest = max(len(entries) for entries in self._entries)
        return torch.tensor(
            [[e.slab.address(e.slot) for e in es] + [0] * (widest - len(es)) for es in self._entries],
            dtype=torch.int64,
        ).reshape(self.rows, widest)

    def row_addresses(self, row: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [blocks]: address of each of the row's blocks."""
        entries = self._entries[row]
        return np.fromiter((e.slab.address(e.slot) for e in entries), np.int64, len(entries))

    def counts(self) -> torch.Tensor:
        """int32 [rows, most blocks]: tokens in use in each block."""
        widest = max(len(entries) for entries in self._entries)
        return torch.tensor(
            [[self.count(row, index) for index in range(widest)] for row in range(self.rows)], dtype=torch.int32
        ).reshape(self.rows, widest)

    def _rebuild(self, row: int, entries: list[Entry]) -> None:
        tokens = self._tokens[row]
        # Views keep a slab's mapping alive: those of blocks that leave must go with them.
        for key in [key for key in self.view_cache if key[0] == row]:
            del self.view_cache[key]
        self._entries[row], self._runs[row], self._tokens[row] = [], [], 0
        self.append_blocks(row, entries)
        self._tokens[row] = min(tokens, self.capacity(row))
        self._versions[row] += 1
        self._rebuilds[row] += 1
