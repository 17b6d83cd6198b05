"""What the CUDA kernels of whole-block codecs need to know of a table, kept between layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.errors import TableError
from kvstore_kernels.gpu.addresses import Addresses, upload
from kvstore_kernels.gpu.copies import CudaCopies
from kvstore_kernels.gpu.fetch import FetchRing
from kvstore_kernels.gpu.launch import INTERPRETED, Pointer, current_stream, pointer
from kvstore_kernels.gpu.places import Places
from kvstore_kernels.gpu.sealed import attention
from kvstore_kernels.gpu.sealed.codec import sealed_device_codec
from kvstore_kernels.gpu.sealed.tails import DeviceTail
from kvstore_kernels.gpu.split import Partials
from kvstore_kernels.table import BlockTable
from kvstore_kernels.tail import SHORT_WRITE

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import RowTarget
    from kvstore_kernels.codecs.sealed import SealedCodec
    from kvstore_kernels.gpu.sealed.decoding import SealedDecodePlan

    Targets = Sequence[RowTarget | tuple[int, int]]


class SealedStep:
    """Addresses, counts, tail and work buffers of one table as the CUDA kernels read them.

    Invariants: belongs to one table and one codec, so to one thread and stream at a time; `_aimed` and `_counts` say
    what the device's `targets` hold; nothing here waits for the device. The table keeps the step, so the step doesn't
    keep the table: a cycle would keep slabs mapped until a garbage collection.
    """

    def __init__(self, codec: SealedCodec, rows: int, device: torch.device) -> None:
        self.codec, self.device = codec, device
        self.on = sealed_device_codec(codec, device)
        self._rows = rows
        layout = self._layout = codec.layout
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
        self._tail = DeviceTail(self.on, rows)
        self.partials = Partials(device, layout.v_dim)
        self.plan: SealedDecodePlan | None = None
        self.ring: FetchRing | None = None
        self._ring_tables: list[Pointer] = []
        self.places = Places(
            codes=pointer(self._anchor), scales=pointer(self._anchor.view(torch.float16)),
            targets=pointer(self._numbers), table=None, width=0, rows=rows,
        )  # fmt: skip

    # -- what attention asks for --------------------------------------------------------------------------------

    @property
    def known(self) -> Pointer:
        """int32 [rows]: 1 where the row's first token is known exactly."""
        return self._tail.known

    def stream(self) -> int:
        """The calling thread's stream. TableError where another device is current."""
        return current_stream(self.device)

    def tail_pointers(self, layer: int) -> tuple[Pointer, Pointer, Pointer, Pointer]:
        """K and V of the tail [rows, kv_heads, capacity, dim], and of the first tokens [rows, kv_heads, dim]."""
        return self._tail.pointers(layer)

    def table_for(self, layer: int) -> Pointer:
        """The block addresses for this layer, fetched where they must be."""
        return self.places.table if self.ring is None else self._ring_tables[self.ring.acquire(layer)]

    def prompt_targets(self, begins: Sequence[int], pasts: Sequence[int], length: int) -> Pointer:
        """int64 [3, rows]: padding, tokens before the prompt, and with it."""
        wanted = (tuple(begins), tuple(pasts))
        if wanted != self._prompt_for:
            ends = [past + length - begin for begin, past in zip(*wanted, strict=True)]
            upload(np.array([*wanted, ends], np.int64), self._prompt)
            self._prompt_for = wanted
        return self._prompt_pointer

    def attend(
        self,
        table: BlockTable,
        query: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`decode_attention` on the device."""
        self._follow(table)
        if self._counts != table.token_counts:
            self._send_counts(table)
        self._tail.follow(table, layer)
        return attention.attend(self, table, query, layer, scaling, softcap, sliding_window, sinks)

    def prefill(
        self,
        table: BlockTable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        options: Options,
        begins: Sequence[int],
        pasts: Sequence[int],
    ) -> torch.Tensor:
        """Fresh tokens over the first pasts[r] tokens of each row and over themselves -> [rows, L, q_heads, v_dim]."""
        self._follow(table)
        self._tail.follow(table, layer)
        return attention.prefill(self, table, query, key, value, layer, options, begins, pasts)

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, table: BlockTable, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Targets) -> None:
        """Stores k [rows, kv_heads, L, k_dim] and v. Raises TableError past a row's blocks."""
        length = self.codec.checked_length(layer, k, v, table, targets)
        aimed = self._aimed
        if (
            aimed is None
            or aimed[0] is not targets
            or aimed[1] != length
            or aimed[2] != table.versions
            or self._counts != table.token_counts
        ):
            self._aim(table, targets, length)
        k = k if k.stride(3) == 1 else k.contiguous()
        v = v if v.stride(3) == 1 else v.contiguous()
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        tail, on, places = self._tail, self.on, self.places
        tail.follow(table, layer)
        for row, (skip, start) in enumerate(targets):
            if skip < length:
                self._rewind(table, layer, row, start)
        tail.begin_again(layer, [row for row, (skip, start) in enumerate(targets) if skip < length and start == 0])
        stream = self.stream()
        k_at, v_at = pointer(k), pointer(v)
        tail_k, tail_v, first_k, first_v = tail.pointers(layer)
        strides = (*k.stride()[:3], *v.stride()[:3])
        if self._complete:
            on.seal(k.dtype)(
                (self._complete, self._layout.kv_heads, self._rows), stream, k_at, v_at, on.shifts[layer],
                on.inverses[layer], on.rotation, places.codes, places.scales, tail_k, tail_v, places.table,
                places.targets, on.counter, self._rows, places.width, layer, length,
                self._layout.layer_offset(layer), *strides,
            )  # fmt: skip
        tile = 1 if length == 1 else 32
        tiles = -(-min(length, table.block_tokens + SHORT_WRITE) // tile)
        on.keep(k.dtype, tile)(
            (tiles, self._layout.kv_heads, self._rows), stream, k_at, v_at, on.shifts[layer], tail_k, tail_v, first_k,
            first_v, places.targets, on.counter, self._rows, layer, length, *strides,
        )  # fmt: skip
        for row, (skip, start) in enumerate(targets):
            if skip < length:
                tail.wrote(table, layer, row, start, start + length - skip)

    def _rewind(self, table: BlockTable, layer: int, row: int, start: int) -> None:
        """Makes the row's tail begin with the block of token `start` and end there."""
        held = self._tail
        base, end, begin = held.base(table, layer, row), held.end(table, layer, row), start // table.block_tokens
        begin *= table.block_tokens
        if start < end and base <= begin:
            end = start
        if start == end:
            if base != begin and start > begin:
                held.move(layer, row, begin - base, start - begin)
        elif start > begin:
            self.decoded(table, row, layer, begin, start, *held.front(layer, row))

    def _aim(self, table: BlockTable, targets: Targets, length: int) -> None:
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
        addresses = self._addresses
        if addresses.made_for == table.versions:
            return
        addresses.refresh(table)
        if not addresses.fetched:
            self.ring, self._ring_tables = None, []
            addresses.send()
        else:
            if self.ring is None:
                self.ring = FetchRing(self._layout, CudaCopies(self.device), self.codec.own_layers)
            self._ring_tables = addresses.send_fetched(self.ring.aim(addresses.fetched))
        places = self.places
        if places.table is not addresses.pointer and (INTERPRETED or places.table != addresses.pointer):
            places = places._replace(table=addresses.pointer)
        if places.width != addresses.width:
            places = places._replace(width=addresses.width)
        self.places = places

    # -- reading back ---------------------------------------------------------------------------------------------

    def decoded(
        self, table: BlockTable, row: int, layer: int, start: int, stop: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Tokens [start, stop) of sealed blocks into k [kv_heads, n, k_dim] and v, of which the first are used."""
        if stop <= start:
            return
        self._follow(table)
        buffer = 0 if self.ring is None else self.ring.acquire(layer)
        line = self._addresses.row_pointer(row, buffer)
        size, on = table.block_tokens, self.on
        on.gather(k.dtype, fetched=self.ring is not None)(
            ((stop - 1) // size - start // size + 1, self._layout.kv_heads, 1), self.stream(), pointer(k), pointer(v),
            on.factors[layer], on.shifts[layer], on.rotation_back, self.places.codes, self.places.scales, line, start,
            stop - start, k.shape[1], self._layout.layer_offset(layer),
        )  # fmt: skip
        if self.ring is not None:
            self.ring.release()
