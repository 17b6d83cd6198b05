"""How attention is split over the tokens of a row, and where the parts wait to be merged."""

from __future__ import annotations

import math

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.gpu.codec import PLAIN, DeviceCodec, Kind, optional
from kvstore_kernels.gpu.launch import pointer

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
        self._kept = [out, stats, arrivals]
        self.out, self.stats, self.arrivals = pointer(out), pointer(stats), pointer(arrivals)


class DecodePlan:
    """A decode step's launches, the same for every layer: grid, kernels and the arguments that don't change."""

    def __init__(
        self,
        on: DeviceCodec,
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
        self.shape = (rows, length, query_heads, layout.v_dim)
        self.length = length
        columns = on.columns(group * length)
        self.column_tiles = -(-group * length // columns)
        self.span = columns if self.column_tiles > 1 else group * length
        self.programs = rows * layout.kv_heads * self.column_tiles
        if options is not None and options.sliding_window is not None:
            tokens = min(tokens, options.sliding_window + length)
        self.splits = split_count(self.programs, -(-tokens // on.decode_tile(query.dtype)), on.processors)
        self.fused = int(self.splits * self.span <= _FUSED_PARTS)
        partials.fit(self.programs * self.splits * self.span, self.programs)
        self._sinks = None if options is None else options.sinks
        self.sinks = optional(self._sinks, on.nothing)
        self.launch = on.decode(group, columns, query.dtype, kind, fetched=fetched)
        self.merge = None
        if self.splits > 1 and not self.fused:
            self.merge = on.merge(group, columns, query.dtype, sinks=kind.sinks, skipped=False)
        window = min(options.sliding_window or 0, LONGEST) if options is not None else 0
        cap = (options.softcap or 0.0) if options is not None else 0.0
        self.rest = (*query.stride()[:3], window, scaling * LOG2_E, cap * LOG2_E)


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
