"""What all CUDA kernels need to know of a table, kept between layers and steps: addresses, counts, who fetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.gpu.addresses import Addresses, upload
from kvstore_kernels.gpu.copies import CudaCopies
from kvstore_kernels.gpu.fetch import FetchRing
from kvstore_kernels.gpu.launch import INTERPRETED, Pointer, current_stream, pointer
from kvstore_kernels.gpu.places import Places
from kvstore_kernels.gpu.split import Partials
from kvstore_kernels.table import BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import Codec, RowTarget

    Targets = Sequence[RowTarget | tuple[int, int]]


class TableStep:
    """Addresses, counts and work buffers of one table as the CUDA kernels read them.

    Invariants: belongs to one table and one codec, so to one thread and stream at a time; `_aimed` and `_counts` say
    what the device's `targets` hold; nothing here waits for the device. The table keeps the step, so the step doesn't
    keep the table: a cycle would keep slabs mapped until a garbage collection.
    """

    def __init__(self, codec: Codec, rows: int, device: torch.device, code_dtype: torch.dtype) -> None:
        """`code_dtype` is what the kernels take the blocks' bytes for."""
        self.device = device
        self._own_layers = codec.own_layers
        self._rows = rows
        self._layout = codec.layout
        self._anchor = torch.zeros(512, dtype=torch.uint8, device=device)
        self._addresses = Addresses(rows, device)
        # skip, start and tokens of each row; a prompt's padding and history have numbers of their own.
        self._numbers = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._prompt = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._prompt_pointer = pointer(self._prompt)
        self._prompt_for: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._aimed: tuple[Targets, int, list[int]] | None = None
        self._skips_starts = np.zeros((2, rows), np.int64)
        self._counts: list[int] | None = None
        # Blocks that some row of the pass may complete.
        self._complete = 0
        self.partials = Partials(device, codec.layout.v_dim)
        self.ring: FetchRing | None = None
        self._ring_tables: list[Pointer] = []
        self.places = Places(
            codes=pointer(self._anchor.view(code_dtype)), scales=pointer(self._anchor.view(torch.float16)),
            targets=pointer(self._numbers), table=None, width=0, rows=rows,
        )  # fmt: skip

    def stream(self) -> int:
        """The calling thread's stream. TableError where another device is current."""
        return current_stream(self.device)

    def table_for(self, layer: int) -> Pointer:
        """The block addresses for this layer, fetched where they must be: `ring.release` follows its last reader."""
        return self.places.table if self.ring is None else self._ring_tables[self.ring.acquire(layer)]

    def prompt_targets(self, begins: Sequence[int], pasts: Sequence[int], length: int) -> Pointer:
        """int64 [3, rows]: padding, tokens before the prompt, and with it."""
        wanted = (tuple(begins), tuple(pasts))
        if wanted != self._prompt_for:
            ends = [past + length - begin for begin, past in zip(*wanted, strict=True)]
            upload(np.array([*wanted, ends], np.int64), self._prompt)
            self._prompt_for = wanted
        return self._prompt_pointer

    def _line(self, row: int, layer: int) -> Pointer:
        """The block addresses of one row, as `table_for`."""
        return self._addresses.row_pointer(row, 0 if self.ring is None else self.ring.acquire(layer))

    def _is_aimed(self, table: BlockTable, targets: Targets, length: int) -> bool:
        """Whether the device knows where this write goes."""
        aimed = self._aimed
        return (
            aimed is not None
            and aimed[0] is targets
            and aimed[1] == length
            and aimed[2] == table.versions
            and self._counts == table.token_counts
        )

    def _aim(self, table: BlockTable, targets: Targets, length: int) -> None:
        """Tells the device where a write goes. TableError past a row's blocks, and on memory that it can't write."""
        self._follow(table)
        size = table.block_tokens
        # What is refused below must not pass for what the device was told before.
        self._aimed, self._complete = None, 0
        for row, (skip, start) in enumerate(targets):
            if skip < 0:
                raise TableError(f"row {row} skips {skip} positions: expected 0 or more")
            self._skips_starts[0, row], self._skips_starts[1, row] = skip, start
            end = start + length - skip
            if skip >= length:
                continue
            if start < 0 or end > table.capacity(row):
                raise TableError(
                    f"tokens {start} to {end} of row {row}: its blocks hold {table.capacity(row)} tokens; "
                    "append blocks first"
                )
            self._complete = max(self._complete, end // size - start // size)
            for block in range(start // size, -(-end // size)):
                slab, slot = table.entry(row, block)
                slab.check_writable()
                if slab.device != self.device:
                    raise TableError(
                        f"block {block} of row {row} (slot {slot}) lies on {slab.device}: what {self.device} writes "
                        "goes into slots on it; take a slot there, and copy the block when it is full"
                    )
        self._send_counts(table)
        self._aimed = (targets, length, list(table.versions))

    def _send_counts(self, table: BlockTable) -> None:
        self._counts = list(table.token_counts)
        numbers = np.empty((3, self._rows), np.int64)
        numbers[:2] = self._skips_starts
        numbers[2] = self._counts
        upload(numbers, self._numbers)

    def _follow(self, table: BlockTable) -> None:
        """Brings the device's addresses up to the table's blocks."""
        addresses = self._addresses
        if addresses.made_for == table.versions:
            return
        addresses.refresh(table)
        if not addresses.fetched:
            self.ring, self._ring_tables = None, []
            addresses.send()
        else:
            if self.ring is None:
                self.ring = FetchRing(self._layout, CudaCopies(self.device), self._own_layers)
            self._ring_tables = addresses.send_fetched(self.ring.aim(addresses.fetched))
        places = self.places
        if places.table is not addresses.pointer and (INTERPRETED or places.table != addresses.pointer):
            places = places._replace(table=addresses.pointer)
        if places.width != addresses.width:
            places = places._replace(width=addresses.width)
        self.places = places


def even_rows(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the kernels read them: head dims without gaps, one dtype."""
    k = k if k.stride(3) == 1 else k.contiguous()
    v = v if v.stride(3) == 1 else v.contiguous()
    return (k, v) if k.dtype == v.dtype else (k.float(), v.float())
