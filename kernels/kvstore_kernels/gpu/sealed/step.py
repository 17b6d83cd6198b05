"""What the CUDA kernels of whole-block codecs need to know of a table, kept between layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.gpu.launch import Pointer, pointer
from kvstore_kernels.gpu.sealed import attention
from kvstore_kernels.gpu.sealed.codec import sealed_device_codec
from kvstore_kernels.gpu.sealed.tails import DeviceTail
from kvstore_kernels.gpu.tablestep import TableStep, even_rows
from kvstore_kernels.table import BlockTable
from kvstore_kernels.tail import SHORT_WRITE

if TYPE_CHECKING:
    from kvstore_kernels.codecs.sealed import SealedCodec
    from kvstore_kernels.gpu.sealed.decoding import SealedDecodePlan
    from kvstore_kernels.gpu.tablestep import Targets


class SealedStep(TableStep):
    """A table of a codec that quantizes whole blocks, as the CUDA kernels read it, with its tail."""

    def __init__(self, codec: SealedCodec, rows: int, device: torch.device) -> None:
        super().__init__(codec, rows, device, torch.uint8)
        self.codec = codec
        self.on = sealed_device_codec(codec, device)
        self._tail = DeviceTail(self.on, rows)
        self.plan: SealedDecodePlan | None = None

    # -- what attention asks for --------------------------------------------------------------------------------

    @property
    def known(self) -> Pointer:
        """int32 [rows]: 1 where the row's first token is known exactly."""
        return self._tail.known

    def tail_pointers(self, layer: int) -> tuple[Pointer, Pointer, Pointer, Pointer]:
        """K and V of the tail [rows, kv_heads, capacity, dim], and of the first tokens [rows, kv_heads, dim]."""
        return self._tail.pointers(layer)

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
        if not self._is_aimed(table, targets, length):
            self._aim(table, targets, length)
        k, v = even_rows(k, v)
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

    # -- reading back ---------------------------------------------------------------------------------------------

    def decoded(
        self, table: BlockTable, row: int, layer: int, start: int, stop: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Tokens [start, stop) of sealed blocks into k [kv_heads, n, k_dim] and v, of which the first are used."""
        if stop <= start:
            return
        self._follow(table)
        line = self._line(row, layer)
        size, on = table.block_tokens, self.on
        on.gather(k.dtype, fetched=self.ring is not None)(
            ((stop - 1) // size - start // size + 1, self._layout.kv_heads, 1), self.stream(), pointer(k), pointer(v),
            on.factors[layer], on.shifts[layer], on.rotation_back, self.places.codes, self.places.scales, line, start,
            stop - start, k.shape[1], self._layout.layer_offset(layer),
        )  # fmt: skip
        if self.ring is not None:
            self.ring.release()
