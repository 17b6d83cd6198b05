"""Attention over sealed blocks and a tail on a CUDA device: what decode_attention and prefill_attention call there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_kernels.attention.options import Options
from kvstore_kernels.codecs.base import INPUT_DTYPES
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.gpu.codec import even, optional
from kvstore_kernels.gpu.fetch import FetchRing
from kvstore_kernels.gpu.launch import Pointer, pointer
from kvstore_kernels.gpu.places import Places
from kvstore_kernels.gpu.sealed.decoding import SealedDecodePlan
from kvstore_kernels.gpu.sealed.launches import launches
from kvstore_kernels.gpu.split import LOG2_E, LONGEST, SPLIT_TILES, Partials, kind_of
from kvstore_kernels.table import BlockTable
from kvstore_kernels.tail import SHORT_WRITE

if TYPE_CHECKING:
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec


class Step(Protocol):
    """What attention needs of a table's step; addresses and counts on the device are those of the table."""

    plan: SealedDecodePlan | None
    ring: FetchRing | None

    @property
    def on(self) -> SealedDeviceCodec: ...

    @property
    def places(self) -> Places: ...

    @property
    def partials(self) -> Partials: ...

    @property
    def known(self) -> Pointer:
        """int32 [rows]: 1 where the row's first token is known exactly."""

    def stream(self) -> int: ...

    def tail_pointers(self, layer: int) -> tuple[Pointer, Pointer, Pointer, Pointer]:
        """K and V of the tail [rows, kv_heads, capacity, dim], and of the first tokens [rows, kv_heads, dim]."""

    def prompt_targets(self, begins: Sequence[int], pasts: Sequence[int], length: int) -> Pointer:
        """int64 [3, rows]: a prompt's padding, history, and tokens together."""

    def table_for(self, layer: int) -> Pointer:
        """The block addresses for this layer, fetched where they must be: `ring.release` follows its last reader."""


def attend(
    step: Step,
    table: BlockTable,
    query: torch.Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`decode_attention` on the device, of at most 32 queries a row that were just written: checks what it is given
    for the first time.
    """
    plan, options = step.plan, None
    if softcap is not None or sliding_window is not None or sinks is not None:
        options = _checked(step, table, query, scaling, softcap, sliding_window, sinks)
        if options.plain(table.token_counts):
            options = None
    elif plan is None or query.shape != plan.q_shape or scaling != plan.scaling:
        _checked(step, table, query, scaling, None, None, None)
    if query.stride(3) != 1 or query.data_ptr() & 15:
        query = query.clone(memory_format=torch.contiguous_format)
    ring, known, tokens = step.ring, step.known, max(table.token_counts)
    if (
        plan is None
        or options is not None
        or not plan.serves(query, scaling, step.places, known, fetched=ring is not None)
        or not plan.keeps_split(tokens)
    ):
        plan = SealedDecodePlan(
            step.on, step.places, step.partials, known, query, tokens, scaling, options, fetched=ring is not None
        )
        # Plans with options are used once: they hold a tensor of the model's.
        step.plan = None if options is not None else plan
    result = query.new_empty(plan.shape)
    stream = step.stream()
    plan.launch(layer, stream, query, result, step.table_for(layer), step.tail_pointers(layer))
    if ring is not None:
        ring.release()
    plan.merge(stream, result)
    return result


def prefill(
    step: Step,
    table: BlockTable,  # noqa: ARG001  as a step is called; its blocks are in `places`
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
    on, places, dtype, kind = step.on, step.places, query.dtype, kind_of(options)
    layout, made, group = on.layout, launches(on), options.group
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    if key.dtype != dtype or value.dtype != dtype:
        raise LayoutError(f"key is {key.dtype} and value is {value.dtype}: expected the query's {dtype}")
    make = torch.zeros if any(begins) else torch.empty
    result = make((rows, length, query_heads, layout.v_dim), dtype=dtype, device=query.device)
    queries, tile = made.queries(dtype), made.tile(dtype)
    q_tiles = -(-group * length // queries)
    programs = rows * layout.kv_heads * q_tiles
    most = -(-(max(pasts) + length) // tile)
    splits = max(1, min(2 * on.processors // programs, most // (2 * SPLIT_TILES)))
    partials = step.partials
    if splits > 1:
        partials.fit(programs * splits * queries, 1)
    sinks, targets = optional(options.sinks, on.nothing), step.prompt_targets(begins, pasts, length)
    ring = step.ring if any(pasts) else None
    table_at = places.table if ring is None else step.table_for(layer)
    launch = made.prefill(group, dtype, kind, fetched=ring is not None, aligned=even(query, key, value))
    stream, out = step.stream(), pointer(result)
    launch(
        (programs, splits, 1), stream, pointer(query), pointer(key), pointer(value), out, partials.out,
        partials.stats, table_at, targets, on.factors[layer], on.shifts[layer], made.turn, sinks, places.codes,
        places.scales, *step.tail_pointers(layer), step.known, made.odds, rows, places.width, length, splits,
        partials.half, layout.layer_offset(layer), *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        min(options.sliding_window or 0, LONGEST), options.scaling * LOG2_E, (options.softcap or 0.0) * LOG2_E,
    )  # fmt: skip
    if ring is not None:
        ring.release()
    if splits > 1:
        made.join(group, dtype, sinks=kind.sinks)(
            (programs, queries, 1), stream, out, partials.out, partials.stats, targets, sinks, length, splits,
            queries, partials.half, q_tiles,
        )  # fmt: skip
    return result


def _checked(
    step: Step,
    table: BlockTable,
    query: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> Options:
    if query.dim() == 4 and query.shape[0] != table.rows:
        raise LayoutError(f"query of {query.shape[0]} rows on a table of {table.rows}")
    if query.dim() == 4 and query.shape[2] > SHORT_WRITE:
        raise LayoutError(f"{query.shape[2]} queries a row: a tail keeps what up to {SHORT_WRITE} see exactly")
    if query.dtype not in INPUT_DTYPES:
        raise LayoutError(f"query is {query.dtype}: expected one of {', '.join(map(str, INPUT_DTYPES))}")
    return Options.checked(query, step.on.layout, scaling, softcap, sliding_window, sinks)
