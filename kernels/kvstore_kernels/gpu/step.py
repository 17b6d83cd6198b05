"""What the CUDA kernels need to know of a table, kept between layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.codecs.base import INPUT_DTYPES
from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.gpu.codec import DeviceCodec, device_codec, even, optional
from kvstore_kernels.gpu.launch import pointer
from kvstore_kernels.gpu.split import LOG2_E, LONGEST, SPLIT_TILES, DecodePlan, kind_of
from kvstore_kernels.gpu.tablestep import TableStep, even_rows
from kvstore_kernels.gpu.writing import AppendPlan
from kvstore_kernels.table import BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.gpu.tablestep import Targets


class DeviceStep(TableStep):
    """A table of a token-wise codec, as the CUDA kernels read it."""

    def __init__(self, codec: TokenCodec, rows: int, device: torch.device) -> None:
        self.codec = codec
        self._on: DeviceCodec = device_codec(codec, device)
        super().__init__(codec, rows, device, self._on.code_dtype)
        self._offsets = [codec.layout.layer_offset(layer) for layer in range(codec.layout.layers)]
        self._append: AppendPlan | None = None
        self._decode: DecodePlan | None = None

    # -- append -----------------------------------------------------------------------------------------------

    def append(self, table: BlockTable, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Targets) -> None:
        """Stores k [rows, kv_heads, L, k_dim] and v, checked by Codec.write. Raises TableError past a row's blocks."""
        plan = self._append
        fits = plan is not None and plan.serves(k, v, self.places) and 0 <= layer < self._layout.layers
        if not fits:
            self.codec.checked_length(layer, k, v, table, targets)
        length = k.shape[2]
        if not self._is_aimed(table, targets, length):
            self._aim(table, targets, length)
            fits = fits and plan is not None and plan.serves(k, v, self.places)
        if plan is None or not fits:
            k, v = even_rows(k, v)
            plan = self._append = AppendPlan(self._on, self.places, k, v)
        plan.launch(layer, self.stream(), k, v)

    def _follow(self, table: BlockTable) -> None:
        fetched = self.ring is not None
        super()._follow(table)
        if fetched != (self.ring is not None):
            self._decode = None

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
            self._follow(table)
        plan = self._decode
        if self._counts != table.token_counts:
            self._send_counts(table)
            if plan is not None and not plan.keeps_split(max(table.token_counts)):
                plan = None
        if query.stride(3) != 1 or query.data_ptr() & 15:
            query = query.clone(memory_format=torch.contiguous_format)
        ring = self.ring
        if plan is None or options is not None or not plan.serves(query, scaling, self.places):
            plan = DecodePlan(
                self._on, self.places, self.partials, query, max(table.token_counts), scaling, options,
                fetched=ring is not None,
            )  # fmt: skip
            # Plans with options are used once: they hold a tensor of the model's.
            self._decode = None if options is not None else plan
        result = query.new_empty(plan.shape)
        stream = self.stream()
        plan.launch(layer, stream, query, result, self.table_for(layer))
        if ring is not None:
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
            self._follow(table)
        targets = self.prompt_targets(begins, pasts, length)
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
            self.partials.fit(programs * splits * queries, 1)
        partials, ring, places = self.partials, self.ring if any(pasts) else None, self.places
        sinks = optional(options.sinks, on.nothing)
        table_at = self.places.table if ring is None else self.table_for(layer)
        launch = on.prefill(group, dtype, kind, fetched=ring is not None, aligned=even(query, key, value))
        stream, out = self.stream(), pointer(result)
        launch(
            (programs, splits, 1), stream, pointer(query), pointer(key), pointer(value), out, partials.out,
            partials.stats, table_at, targets, on.factors[layer], on.shifts[layer], sinks,
            places.codes, places.scales, rows, places.width, length, splits, partials.half, self._offsets[layer],
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            min(options.sliding_window or 0, LONGEST), options.scaling * LOG2_E, (options.softcap or 0.0) * LOG2_E,
        )  # fmt: skip
        if ring is not None:
            ring.release()
        if splits > 1:
            merge = on.merge(group, queries, dtype, sinks=kind.sinks, skipped=True)
            merge(
                (programs, queries, 1), stream, out, partials.out, partials.stats, targets, sinks,
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
            self._follow(table)
        k = torch.empty(layout.kv_heads, tokens, layout.k_dim, dtype=dtype, device=self.device)
        v = torch.empty(layout.kv_heads, tokens, layout.v_dim, dtype=dtype, device=self.device)
        if not tokens:
            return k, v
        ring, line = self.ring, self._line(row, layer)
        launch = on.gather(dtype, fetched=ring is not None)
        launch(
            ((start + tokens - 1) // 64 - start // 64 + 1, layout.kv_heads, 1), self.stream(), pointer(k),
            pointer(v), on.factors[layer], on.shifts[layer], self.places.codes, self.places.scales, line, start,
            tokens, self._offsets[layer],
        )  # fmt: skip
        if ring is not None:
            ring.release()
        return k, v
