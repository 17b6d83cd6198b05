"""What the CUDA kernels need to know of a table, kept between layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.codecs.base import INPUT_DTYPES
from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.gpu.addresses import Addresses, upload
from kvstore_kernels.gpu.codec import DeviceCodec, device_codec, even, optional
from kvstore_kernels.gpu.copies import CudaCopies
from kvstore_kernels.gpu.fetch import FetchRing
from kvstore_kernels.gpu.launch import INTERPRETED, Pointer, current_stream, pointer
from kvstore_kernels.gpu.places import Places
from kvstore_kernels.gpu.split import LOG2_E, LONGEST, SPLIT_TILES, DecodePlan, Partials, kind_of
from kvstore_kernels.gpu.writing import AppendPlan
from kvstore_kernels.table import BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import RowTarget

    Targets = Sequence[RowTarget | tuple[int, int]]


class DeviceStep:
    """Addresses, counts and work buffers of one table as the CUDA kernels read them.

    Invariants: belongs to one table and one codec, so to one thread and stream at a time; `_aimed` and `_counts` say
    what the device's `targets` hold; nothing here waits for the device. The table keeps the step, so the step doesn't
    keep the table: a cycle would keep slabs mapped until a garbage collection.
    """

    def __init__(self, codec: TokenCodec, rows: int, device: torch.device) -> None:
        self.codec, self.device = codec, device
        self._on: DeviceCodec = device_codec(codec, device)
        self._rows = rows
        layout = codec.layout
        self._layout = layout
        self._offsets = [layout.layer_offset(layer) for layer in range(layout.layers)]
        self._anchor = torch.zeros(512, dtype=torch.uint8, device=device)
        self._addresses = Addresses(rows, device)
        # skip, start and tokens of each row; a prompt's padding and history have numbers of their own.
        self._numbers = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._prompt = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._prompt_targets = pointer(self._prompt)
        self._aimed: tuple[Targets, int, list[int]] | None = None
        self._skips_starts = np.zeros((2, rows), np.int64)
        self._counts: list[int] | None = None
        self._prompt_for: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._partials = Partials(device, layout.v_dim)
        self._ring: FetchRing | None = None
        self._ring_tables: list[Pointer] = []
        self._places = Places(
            codes=pointer(self._anchor.view(self._on.code_dtype)), scales=pointer(self._anchor.view(torch.float16)),
            targets=pointer(self._numbers), table=None, width=0, rows=rows,
        )  # fmt: skip
        self._append: AppendPlan | None = None
        self._decode: DecodePlan | None = None

    # -- append -----------------------------------------------------------------------------------------------

    def append(self, table: BlockTable, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Targets) -> None:
        """Stores k [rows, kv_heads, L, k_dim] and v, checked by Codec.write. Raises TableError past a row's blocks."""
        plan = self._append
        fits = plan is not None and plan.serves(k, v, self._places) and 0 <= layer < self._layout.layers
        if not fits:
            self.codec.checked_length(layer, k, v, table, targets)
        length = k.shape[2]
        aimed = self._aimed
        if (
            aimed is None
            or aimed[0] is not targets
            or aimed[1] != length
            or aimed[2] != table.versions
            or self._counts != table.token_counts
        ):
            self._aim(table, targets, length)
            fits = fits and plan is not None and plan.serves(k, v, self._places)
        if plan is None or not fits:
            if k.stride(3) != 1:
                k = k.contiguous()
            if v.stride(3) != 1:
                v = v.contiguous()
            if k.dtype != v.dtype:
                k, v = k.float(), v.float()
            plan = self._append = AppendPlan(self._on, self._places, k, v)
        plan.launch(layer, self._stream(), k, v)

    def _aim(self, table: BlockTable, targets: Targets, length: int) -> None:
        if self._addresses.made_for != table.versions:
            self._refresh(table)
        size = table.block_tokens
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

    def _refresh(self, table: BlockTable) -> None:
        addresses = self._addresses
        addresses.refresh(table)
        if bool(addresses.fetched) != (self._ring is not None):
            self._decode = None
        if not addresses.fetched:
            self._ring, self._ring_tables = None, []
            addresses.send()
        else:
            if self._ring is None:
                self._ring = FetchRing(self._layout, CudaCopies(self.device), self.codec.own_layers)
            self._ring_tables = addresses.send_fetched(self._ring.aim(addresses.fetched))
        places = self._places
        if places.table is not addresses.pointer and (INTERPRETED or places.table != addresses.pointer):
            places = places._replace(table=addresses.pointer)
        if places.width != addresses.width:
            places = places._replace(width=addresses.width)
        self._places = places

    # -- decode -----------------------------------------------------------------------------------------------

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
        """`decode_attention` on the device: checks what it is given for the first time."""
        plan = self._decode
        if softcap is None and sliding_window is None and sinks is None:
            if plan is None or query.shape != plan.q_shape or scaling != plan.scaling:
                self._checked(query, scaling, None, None, None)
            return self.decode(table, query, layer, scaling, None)
        options = self._checked(query, scaling, softcap, sliding_window, sinks)
        return self.decode(table, query, layer, scaling, None if options.plain(table.token_counts) else options)

    def _checked(
        self,
        query: torch.Tensor,
        scaling: float,
        softcap: float | None,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
    ) -> Options:
        if query.dim() == 4 and query.shape[0] != self._rows:
            raise LayoutError(f"query of {query.shape[0]} rows on a table of {self._rows}")
        if query.dtype not in INPUT_DTYPES or (not self._on.scaled and query.dtype != self._on.code_dtype):
            raise LayoutError(f"query is {query.dtype}: blocks of this layout are attended in {self._layout.dtype}")
        return Options.checked(query, self._layout, scaling, softcap, sliding_window, sinks)

    def decode(
        self, table: BlockTable, query: torch.Tensor, layer: int, scaling: float, options: Options | None
    ) -> torch.Tensor:
        """Query [rows, q_heads, L, k_dim] at the end of each row -> [rows, L, q_heads, v_dim] in its dtype.

        `options` None: a plain softmax over all tokens.
        """
        if self._addresses.made_for != table.versions:
            self._refresh(table)
        plan = self._decode
        if self._counts != table.token_counts:
            self._send_counts(table)
            if plan is not None and not plan.keeps_split(max(table.token_counts)):
                plan = None
        if query.stride(3) != 1 or query.data_ptr() & 15:
            query = query.clone(memory_format=torch.contiguous_format)
        ring = self._ring
        if plan is None or options is not None or not plan.serves(query, scaling, self._places):
            plan = DecodePlan(
                self._on, self._places, self._partials, query, max(table.token_counts), scaling, options,
                fetched=ring is not None,
            )  # fmt: skip
            # Plans with options are used once: they hold a tensor of the model's.
            self._decode = None if options is not None else plan
        result = query.new_empty(plan.shape)
        stream = self._stream()
        if ring is None:
            plan.launch(layer, stream, query, result, self._places.table)
        else:
            plan.launch(layer, stream, query, result, self._ring_tables[ring.acquire(layer)])
            ring.release()
        plan.merge(stream, result)
        return result

    # -- prompts ----------------------------------------------------------------------------------------------

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
        rows, query_heads, length, _ = query.shape
        if self._addresses.made_for != table.versions:
            self._refresh(table)
        wanted = (tuple(begins), tuple(pasts))
        if wanted != self._prompt_for:
            upload(np.array([*wanted, [p + length - b for b, p in zip(*wanted, strict=True)]], np.int64), self._prompt)
            self._prompt_for = wanted
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise LayoutError(f"key is {key.dtype} and value is {value.dtype}: expected the query's {query.dtype}")
        make = torch.zeros if any(begins) else torch.empty
        result = make((rows, length, query_heads, self._layout.v_dim), dtype=query.dtype, device=query.device)
        on, dtype, group, kind = self._on, query.dtype, options.group, kind_of(options)
        queries, tile = on.queries(dtype), on.tile(dtype)
        q_tiles = -(-group * length // queries)
        programs = rows * self._layout.kv_heads * q_tiles
        most = -(-(max(pasts) + length) // tile)
        splits = max(1, min(2 * on.processors // programs, most // (2 * SPLIT_TILES)))
        if splits > 1:
            self._partials.fit(programs * splits * queries, 1)
        partials, ring, places = self._partials, self._ring if any(pasts) else None, self._places
        sinks = optional(options.sinks, on.nothing)
        table_at = self._places.table if ring is None else self._ring_tables[ring.acquire(layer)]
        launch = on.prefill(group, dtype, kind, fetched=ring is not None, aligned=even(query, key, value))
        stream, out = self._stream(), pointer(result)
        launch(
            (programs, splits, 1), stream, pointer(query), pointer(key), pointer(value), out, partials.out,
            partials.stats, table_at, self._prompt_targets, on.factors[layer], on.shifts[layer], sinks,
            places.codes, places.scales, rows, places.width, length, splits, partials.half, self._offsets[layer],
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            min(options.sliding_window or 0, LONGEST), options.scaling * LOG2_E, (options.softcap or 0.0) * LOG2_E,
        )  # fmt: skip
        if ring is not None:
            ring.release()
        if splits > 1:
            merge = on.merge(group, queries, dtype, sinks=kind.sinks, skipped=True)
            merge(
                (programs, queries, 1), stream, out, partials.out, partials.stats, self._prompt_targets, sinks,
                length, splits, queries, partials.half, q_tiles,
            )  # fmt: skip
        return result

    # -- reading back -----------------------------------------------------------------------------------------

    def read(
        self, table: BlockTable, row: int, layer: int, start: int, tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's tokens [start, start + tokens), dequantized: [kv_heads, tokens, k_dim] and [.., v_dim]."""
        layout, on = self._layout, self._on
        if start < 0 or tokens < 0 or start + tokens > table.capacity(row):
            raise TableError(f"tokens {start} to {start + tokens} of row {row}: its blocks hold {table.capacity(row)}")
        if self._addresses.made_for != table.versions:
            self._refresh(table)
        k = torch.empty(layout.kv_heads, tokens, layout.k_dim, dtype=dtype, device=self.device)
        v = torch.empty(layout.kv_heads, tokens, layout.v_dim, dtype=dtype, device=self.device)
        if not tokens:
            return k, v
        ring = self._ring
        buffer = 0 if ring is None else ring.acquire(layer)
        line = self._addresses.row_pointer(row, buffer)
        launch = on.gather(dtype, fetched=ring is not None)
        launch(
            ((start + tokens - 1) // 64 - start // 64 + 1, layout.kv_heads, 1), self._stream(), pointer(k),
            pointer(v), on.factors[layer], on.shifts[layer], self._places.codes, self._places.scales, line, start,
            tokens, self._offsets[layer],
        )  # fmt: skip
        if ring is not None:
            ring.release()
        return k, v

    def _stream(self) -> int:
        return current_stream(self.device)
