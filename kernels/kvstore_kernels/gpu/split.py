"""How attention is split over the tokens of a row, and where the parts wait to be merged."""

from __future__ import annotations

import math

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.gpu.codec import PLAIN, DeviceCodec, Kind, optional
from kvstore_kernels.gpu.launch import Call, Pointer, pointer
from kvstore_kernels.gpu.places import Places

LOG2_E = math.log2(math.e)
# Programs of one warp that a multiprocessor should have; more only cost more to merge.
PROGRAMS = 16
# Tiles that a split has at the least, unless that would leave multiprocessors idle.
SPLIT_TILES = 4
# Partial results (queries times splits) that the last program to arrive merges alone; above, two launches are quicker.
_FUSED_PARTS = 64
# Stands for a window that nothing leaves.
LONGEST = 1 << 30


class Partials:
    """Work buffers of split attention. Invariant: `arrivals` is zero between launches."""

    def __init__(self, device: torch.device, v_dim: int) -> None:
        self._device, self._v_dim = device, v_dim
        self._parts = self._programs = 0
        self.fit(1, 1)

    def fit(self, parts: int, programs: int) -> None:
        """Makes room for so many partial results and programs; reuses what is large enough."""
        if parts <= self._parts and programs <= self._programs:
            return
        self._parts, self._programs = max(parts, self._parts), max(programs, self._programs)
        with torch.inference_mode(False):
            out = torch.empty(self._parts * self._v_dim, dtype=torch.float32, device=self._device)
            stats = torch.empty(2 * self._parts, dtype=torch.float32, device=self._device)
            arrivals = torch.zeros(self._programs, dtype=torch.int32, device=self._device)
        self.half = self._parts
        self.kept = [out, stats, arrivals]
        self.out, self.stats, self.arrivals = pointer(out), pointer(stats), pointer(arrivals)


class DecodePlan:
    """A decode step's launches: one for each layer, made when a layer first needs it.

    Invariant: serves queries of the shape, strides and dtype it was made for, with the same scaling and options, while
    `places` and `partials` are where they were and the tokens are split into as many parts.
    """

    def __init__(
        self,
        on: DeviceCodec,
        places: Places,
        partials: Partials,
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
        self._on, self._places = on, places
        self.q_shape, self._q_stride, self._dtype = query.shape, query.stride(), query.dtype
        self.scaling = scaling
        self.shape = (rows, length, query_heads, layout.v_dim)
        columns = on.columns(group * length)
        column_tiles = -(-group * length // columns)
        span = columns if column_tiles > 1 else group * length
        self._programs = rows * layout.kv_heads * column_tiles
        self._tile, self._window = on.decode_tile(query.dtype), None
        if options is not None and options.sliding_window is not None:
            self._window = options.sliding_window + length
        splits = self._splits = self._split(tokens)
        fused = int(splits * span <= _FUSED_PARTS)
        partials.fit(self._programs * splits * span, self._programs)
        # Kept: a launch may still read them when larger ones have taken their place.
        self._partials, self._buffers = partials, partials.kept
        kernel = on.decode(group, columns, query.dtype, kind, fetched=fetched)
        sinks = optional(None if options is None else options.sinks, on.nothing)
        window = min(options.sliding_window or 0, LONGEST) if options is not None else 0
        cap = (options.softcap or 0.0) if options is not None else 0.0
        rest = (*query.stride()[:3], window, scaling * LOG2_E, cap * LOG2_E)

        def prepare(layer: int) -> Call:
            arguments = (
                pointer(query), pointer(query), partials.out, partials.stats, partials.arrivals, places.table,
                places.targets, on.factors[layer], on.shifts[layer], sinks, places.codes, places.scales, rows,
                places.width, length, splits, fused, span, partials.half, layout.layer_offset(layer), *rest,
            )  # fmt: skip
            return kernel.prepared((self._programs, splits, 1), arguments, (0, 1, 5))

        self._prepare = prepare
        self._calls: list[Call | None] = [None] * layout.layers
        self._merge: Call | None = None
        if splits > 1 and not fused:
            merge = on.merge(group, columns, query.dtype, sinks=kind.sinks, skipped=False)
            self._merge = merge.prepared(
                (self._programs, span, 1),
                (pointer(query), partials.out, partials.stats, places.targets, sinks, length, splits, span,
                 partials.half, column_tiles),
                (0,),
            )  # fmt: skip

    def serves(self, query: torch.Tensor, scaling: float, places: Places) -> bool:
        """Whether a query is like the one it was made for; `keeps_split` must hold, too."""
        return (
            query.shape == self.q_shape
            and query.stride() == self._q_stride
            and query.dtype is self._dtype
            and scaling == self.scaling
            and places is self._places
            and self._partials.kept is self._buffers
        )

    def keeps_split(self, tokens: int) -> bool:
        """Whether rows of at most `tokens` tokens are split as those it was made for."""
        return self._split(tokens) == self._splits

    def launch(self, layer: int, stream: int, query: torch.Tensor, out: torch.Tensor, table: Pointer) -> None:
        """Attention of one layer into `out`, block addresses from `table`."""
        call = self._calls[layer]
        if call is None:
            call = self._calls[layer] = self._prepare(layer)
        call(stream, pointer(query), pointer(out), table)

    def merge(self, stream: int, out: torch.Tensor) -> None:
        """The second launch, where one is needed."""
        if self._merge is not None:
            self._merge(stream, pointer(out))

    def _split(self, tokens: int) -> int:
        if self._window is not None:
            tokens = min(tokens, self._window)
        return split_count(self._programs, -(-tokens // self._tile), self._on.processors)


def split_count(programs: int, tiles: int, processors: int) -> int:
    """Into how many parts the tokens of each program are split: the fewest that fill the device."""
    most = max(1, PROGRAMS * processors // programs)
    wanted = max(1, tiles // SPLIT_TILES)
    if wanted * programs < 2 * processors:
        # Little work: better a short tile loop on every multiprocessor than a long one on some.
        wanted = min(-(-tiles // 2), -(-2 * processors // programs))
    return max(1, min(most, wanted))


def kind_of(options: Options) -> Kind:
    return Kind(options.softcap is not None, options.sliding_window is not None, options.sinks is not None)
