"""The second launch of attention that was split over tokens: one program a query and head."""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import merged


@triton.jit
def merge_kernel(
    result,
    partials,
    stats,
    targets,
    sinks,
    length,
    splits,
    span,
    stats_half,
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    SKIPPED: tl.constexpr,
):
    """Grid [rows * kv heads * tiles, span]. SKIPPED: the row's queries begin behind its padding (prefill)."""
    number = tl.program_id(0)
    one = tl.program_id(1)
    head = ((number // tiles) % KV_HEADS).to(tl.int64)
    row = (number // (tiles * KV_HEADS)).to(tl.int64)
    which = (number % tiles) * COLUMNS + one
    skip = tl.zeros([], tl.int64)
    if SKIPPED:
        skip = tl.load(targets + row)
    if which < GROUP * (length - skip):
        q_number = head * GROUP + which % GROUP
        sink = -1e30
        if SINKS:
            sink = tl.load(sinks + q_number) * 1.4426950408889634
        first = number.to(tl.int64) * splits * span + one
        whole = merged(partials, stats, stats_half, first, span, splits, sink, V_DIM, V_PAD)
        dv = tl.arange(0, V_PAD)
        at = ((row * length + skip + which // GROUP) * (KV_HEADS * GROUP) + q_number) * V_DIM
        tl.store(result + at + dv, whole.to(result.dtype.element_ty), mask=dv < V_DIM)
