"""A decode step's launches over sealed blocks, prepared once for all steps that look alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.gpu.codec import PLAIN, optional
from kvstore_kernels.gpu.launch import Call, Pointer, pointer
from kvstore_kernels.gpu.places import Places
from kvstore_kernels.gpu.sealed.launches import launches
from kvstore_kernels.gpu.split import LOG2_E, LONGEST, Partials, kind_of, split_count

if TYPE_CHECKING:
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec


class SealedDecodePlan:
    """The launches of a decode step: one for each layer, made when a layer first needs it, and the merge.

    Invariant: serves queries of the shape, strides and dtype it was made for, with the same scaling and options, while
    `places` and `partials` are where they were and the sealed blocks are split into as many parts.
    """

    def __init__(
        self,
        on: SealedDeviceCodec,
        places: Places,
        partials: Partials,
        known: Pointer,
        query: torch.Tensor,
        tokens: int,
        scaling: float,
        options: Options | None,
        *,
        fetched: bool,
    ) -> None:
        """For queries like `query` over rows of at most `tokens` tokens; makes room in `partials`."""
        rows, query_heads, length, _ = query.shape
        layout = on.layout
        group = query_heads // layout.kv_heads
        kind = PLAIN if options is None else kind_of(options)
        self._on, self._places, self._known = on, places, known
        self.q_shape, self._q_stride, self._dtype = query.shape, query.stride(), query.dtype
        self.scaling, self._fetched = scaling, fetched
        self.shape = (rows, length, query_heads, layout.v_dim)
        made = launches(on)
        columns = made.columns(group * length)
        column_tiles = -(-group * length // columns)
        span = columns if column_tiles > 1 else group * length
        self._programs = rows * layout.kv_heads * column_tiles
        self._window = None
        if options is not None and options.sliding_window is not None:
            self._window = options.sliding_window + length
        splits = self._splits = self._split(tokens)
        partials.fit(self._programs * (splits + 1) * span, 1)
        # Kept: a launch may still read them when larger ones have taken their place.
        self._partials, self._buffers = partials, partials.kept
        kernel = made.decode(group, columns, query.dtype, kind, fetched=fetched)
        sinks = optional(None if options is None else options.sinks, on.nothing)
        window = min(options.sliding_window or 0, LONGEST) if options is not None else 0
        cap = (options.softcap or 0.0) if options is not None else 0.0
        rest = (*query.stride()[:3], window, scaling * LOG2_E, cap * LOG2_E)

        def prepare(layer: int, given: tuple[Pointer, Pointer, Pointer], tail: tuple[Pointer, ...]) -> Call:
            query_at, out, table = given
            arguments = (
                query_at, out, partials.out, partials.stats, table, places.targets, on.factors[layer],
                on.shifts[layer], sinks, places.codes, places.scales, *tail, known, made.odds, rows, places.width,
                length, splits, span, partials.half, layout.layer_offset(layer), *rest,
            )  # fmt: skip
            return kernel.prepared((self._programs, splits + 1, 1), arguments, (0, 1, 4, 11, 12, 13, 14))

        self._prepare = prepare
        self._calls: list[Call | None] = [None] * layout.layers
        self._merge: Call | None = None
        if splits:
            merge = made.merge(group, columns, query.dtype, sinks=kind.sinks)
            self._merge = merge.prepared(
                (self._programs, span, 1),
                (pointer(query), partials.out, partials.stats, sinks, on.rotation_back, length, splits, span,
                 partials.half, column_tiles),
                (0,),
            )  # fmt: skip

    def serves(self, query: torch.Tensor, scaling: float, places: Places, known: Pointer, *, fetched: bool) -> bool:
        """Whether a query is like the one it was made for; `keeps_split` must hold, too."""
        return (
            query.shape == self.q_shape
            and query.stride() == self._q_stride
            and query.dtype is self._dtype
            and scaling == self.scaling
            and places is self._places
            and known is self._known
            and fetched == self._fetched
            and self._partials.kept is self._buffers
        )

    def keeps_split(self, tokens: int) -> bool:
        """Whether rows of at most `tokens` tokens are split as those it was made for."""
        return self._split(tokens) == self._splits

    def launch(
        self,
        layer: int,
        stream: int,
        query: torch.Tensor,
        out: torch.Tensor,
        table: Pointer,
        tail: tuple[Pointer, Pointer, Pointer, Pointer],
    ) -> None:
        """Attention of one layer into `out`: block addresses from `table`, what is exact from `tail`."""
        given = (pointer(query), pointer(out), table)
        call = self._calls[layer]
        if call is None:
            call = self._calls[layer] = self._prepare(layer, given, tail)
        call(stream, *given, *tail)

    def merge(self, stream: int, out: torch.Tensor) -> None:
        """The second launch, where one is needed."""
        if self._merge is not None:
            self._merge(stream, pointer(out))

    def _split(self, tokens: int) -> int:
        size = self._on.layout.block_tokens
        blocks = max(tokens - 1, 0) // size
        if self._window is not None:
            blocks = min(blocks, self._window // size + 1)
        return split_count(self._programs, blocks, self._on.processors) if blocks else 0
