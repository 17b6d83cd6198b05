"""The second launch of attention over sealed blocks: parts that are rotated, and one that isn't, into the result."""

import triton
import triton.language as tl


@triton.jit
def sealed_merge_kernel(
    result,
    partials,
    stats,
    sinks,
    rotation_back,
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
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid [rows * kv heads * tiles, span], a program a query and head: `splits` rotated parts, then an exact one.

    rotation_back float32 [V_PAD, V_PAD]: rotated numbers times it are the plain ones.
    """
    number = tl.program_id(0)
    one = tl.program_id(1)
    head = ((number // tiles) % KV_HEADS).to(tl.int64)
    row = (number // (tiles * KV_HEADS)).to(tl.int64)
    which = (number % tiles) * COLUMNS + one
    if which < GROUP * length:
        q_number = head * GROUP + which % GROUP
        first = number.to(tl.int64) * (splits + 1) * span + one
        exact = first + splits.to(tl.int64) * span
        d = tl.arange(0, V_PAD)
        each = tl.arange(0, PARTS)
        exact_top = tl.load(stats + exact)
        top = exact_top
        if SINKS:
            sink = tl.load(sinks + q_number) * 1.4426950408889634
            top = tl.maximum(top, sink)
        for begin in range(0, splits, PARTS):
            split = begin + each
            tops = tl.load(stats + first + split.to(tl.int64) * span, mask=split < splits, other=-1e30)
            top = tl.maximum(top, tl.max(tops, axis=0))
        weight = tl.exp2(exact_top - top)
        total = weight * tl.load(stats + stats_half + exact)
        if SINKS:
            total += tl.exp2(sink - top)
        for begin in range(0, splits, PARTS):
            split = begin + each
            part = first + split.to(tl.int64) * span
            tops = tl.load(stats + part, mask=split < splits, other=-1e30)
            sums = tl.load(stats + stats_half + part, mask=split < splits, other=0.0)
            total += tl.sum(sums * tl.exp2(tops - top), axis=0)
        out = weight * tl.load(partials + exact * V_DIM + d, mask=d < V_DIM, other=0.0)
        turned = tl.zeros([CHUNK, V_PAD], tl.float32)
        for chunk in tl.static_range(0, V_PAD, CHUNK):
            e = chunk + tl.arange(0, CHUNK)
            back = tl.load(rotation_back + e[:, None] * V_PAD + d[None, :])
            rotated = tl.zeros([CHUNK], tl.float32)
            for begin in range(0, splits, PARTS):
                split = begin + each
                live = split < splits
                part = first + split.to(tl.int64) * span
                tops = tl.load(stats + part, mask=live, other=-1e30)
                numbers = tl.load(
                    partials + part[:, None] * V_DIM + e[None, :], mask=live[:, None] & (e < V_DIM)[None, :], other=0.0
                )
                rotated += tl.sum(numbers * tl.exp2(tops - top)[:, None], axis=0)
            turned += back * rotated[:, None]
        out += tl.sum(turned, axis=0)
        at = ((row * length + which // GROUP) * (KV_HEADS * GROUP) + q_number) * V_DIM
        out = out / tl.where(total > 0, total, 1.0)
        tl.store(result + at + d, out.to(result.dtype.element_ty), mask=d < V_DIM)
