"""Attention of many fresh tokens over the codes of a history and over themselves, in tiles of queries.

Codes are dequantized tile by tile inside the loop: no scratch grows with the history, whatever the chunk.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import as_half, block_offset, capped


@triton.jit
def _weighed(state, scores, values, value_scale, SCALED: tl.constexpr, PRECISE: tl.constexpr):
    """A tile's scores [Q, T] (log2, -inf: hidden) and values [T, V] into the running (maximum, sum, output, unit)."""
    top, total, out, unit = state
    higher = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    if SCALED:
        # Weights are kept within what float16 resolves, however small V is: the output counts in units of `unit`.
        larger = tl.maximum(unit, tl.max(value_scale, axis=0))
        weight = weight * (value_scale / larger)[None, :]
        shrink = shrink * (unit / larger)
        unit = larger
    out = out * shrink[:, None]
    if PRECISE:
        out = tl.dot(weight, values, out, input_precision="ieee")
    else:
        rounded = weight.to(values.dtype)
        out = tl.dot(rounded, values, out)
        if values.dtype == tl.bfloat16:
            # See decode: the rest of the weights.
            out = tl.dot((weight - rounded.to(tl.float32)).to(tl.bfloat16), values, out)
    return higher, total, out, unit


@triton.jit
def prefill_kernel(
    query,
    key,
    value,
    result,
    partials,
    stats,
    table,
    targets,
    factor,
    shift,
    sinks,
    anchor,
    scale_anchor,
    rows,
    width,
    length,
    splits,
    stats_half,
    layer_offset,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    window,
    scaling,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ITEM: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISE: tl.constexpr,
    FAST: tl.constexpr,
    FETCHED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid [rows * kv heads * query tiles, splits]; a query tile is QUERIES (token, head of the group) pairs."""
    number = tl.program_id(0)
    split = tl.program_id(1)
    tiles = tl.cdiv(GROUP * length, QUERIES)
    q_tile = number % tiles
    head = ((number // tiles) % KV_HEADS).to(tl.int64)
    row = (number // (tiles * KV_HEADS)).to(tl.int64)
    skip = tl.load(targets + row).to(tl.int32)
    past = tl.load(targets + rows + row).to(tl.int32)
    fresh = length - skip
    local = tl.arange(0, QUERIES)
    pair = q_tile * QUERIES + local
    own = pair // GROUP
    used = own < fresh
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    each = tl.arange(0, TILE)
    q_at = (head * GROUP + pair % GROUP) * q_head + (skip + own).to(tl.int64) * q_token
    q = tl.load(query + row * q_row + q_at[:, None] + dk[None, :], mask=used[:, None] & (dk < K_DIM)[None, :], other=0)
    bend = tl.zeros([QUERIES], tl.float32)
    scale = tl.full([QUERIES], 1.0, tl.float32) * scaling
    folded = q
    if SCALED:
        plain = q.to(tl.float32)
        # Beside exact keys the shift counts: it drops out only where all keys are codes.
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        bend = tl.sum(plain * mu[None, :], axis=1) * scaling
        folded = plain * tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)[None, :]
        if not PRECISE:
            largest = tl.max(tl.abs(folded), axis=1)
            largest = tl.where(largest > 0, largest, 1.0)
            folded = (folded / largest[:, None]).to(tl.float16)
            scale = largest * scaling
    # Tiles of the history, then of the fresh tokens, are shared out among the splits.
    old_tiles = tl.cdiv(past, TILE)
    last_own = tl.minimum((q_tile * QUERIES + QUERIES - 1) // GROUP, fresh - 1)
    new_tiles = tl.cdiv(last_own + 1, TILE)
    first = 0
    if WINDOW:
        oldest = tl.maximum(past + (q_tile * QUERIES) // GROUP - window + 1, 0)
        first = tl.where(oldest < past, oldest // TILE, old_tiles + (oldest - past) // TILE)
    share = tl.cdiv(tl.maximum(old_tiles + new_tiles - first, 0), splits)
    begin = first + split * share
    end = tl.minimum(begin + share, old_tiles + new_tiles)
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, V_PAD], tl.float32)
    unit = tl.zeros([], tl.float32) + 5.960464477539063e-08
    one = tl.full([TILE], 1.0, tl.float32)
    for tile in range(begin, tl.minimum(end, old_tiles)):
        token = tile * TILE + each
        at = (tile % (BLOCK // TILE)) * TILE
        offset = block_offset(
            table + row * width, tile // (BLOCK // TILE), anchor, layer_offset, head * HEAD_BYTES, FETCHED
        )
        codes = anchor + offset // ITEM
        k = tl.load(codes + (at + each)[:, None] * K_DIM + dk[None, :], mask=(dk < K_DIM)[None, :], other=0)
        v = tl.load(
            codes + V_CODES // ITEM + dv[:, None] * BLOCK + (at + each)[None, :], mask=(dv < V_DIM)[:, None], other=0
        )
        live = token < past
        v_scale = one
        if SCALED:
            scales = scale_anchor + offset // 2 + at + each
            k_scale = tl.load(scales + K_SCALES // 2).to(tl.float32)
            # A scale that nobody wrote may be NaN, and NaN times weight 0 is NaN.
            v_scale = tl.where(live, tl.load(scales + V_SCALES // 2).to(tl.float32), 0.0)
            if PRECISE:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            else:
                k = as_half(k, FAST)
                v = as_half(v, FAST)
        else:
            v = tl.where(live[None, :], v, 0.0)
        if PRECISE:
            scores = tl.dot(folded, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(folded, tl.trans(k))
        if SCALED:
            scores = scores * k_scale[None, :] * scale[:, None] + bend[:, None]
        else:
            scores = scores * scaling
        if SOFTCAP:
            scores = capped(scores, cap)
        seen = live[None, :] & used[:, None]
        if WINDOW:
            seen = seen & (token[None, :] > past + own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top, total, out, unit = _weighed((top, total, out, unit), scores, tl.trans(v), v_scale, SCALED, PRECISE)
    if SCALED:
        out = out * unit
    for tile in range(tl.maximum(begin, old_tiles) - old_tiles, end - old_tiles):
        token = tile * TILE + each
        at = (skip + token).to(tl.int64)
        live = token < fresh
        k = tl.load(
            key + row * k_row + head * k_head + at[:, None] * k_token + dk[None, :],
            mask=live[:, None] & (dk < K_DIM)[None, :],
            other=0,
        )
        v = tl.load(
            value + row * v_row + head * v_head + at[:, None] * v_token + dv[None, :],
            mask=live[:, None] & (dv < V_DIM)[None, :],
            other=0,
        )
        if PRECISE:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        scores = scores * scaling
        if SOFTCAP:
            scores = capped(scores, cap)
        seen = (token[None, :] <= own[:, None]) & used[:, None]
        if WINDOW:
            seen = seen & (token[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top, total, out, unit = _weighed((top, total, out, unit), scores, v, one, False, PRECISE)
    q_number = head * GROUP + pair % GROUP
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + q_number, mask=used, other=0.0) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
            out = out * tl.exp2(top - higher)[:, None]
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        at = ((row * length + skip + own) * (KV_HEADS * GROUP) + q_number) * V_DIM
        tl.store(
            result + at[:, None] + dv[None, :],
            out.to(result.dtype.element_ty),
            mask=used[:, None] & (dv < V_DIM)[None, :],
        )
    else:
        part = (number.to(tl.int64) * splits + split) * QUERIES + local
        tl.store(partials + part[:, None] * V_DIM + dv[None, :], out, mask=used[:, None] & (dv < V_DIM)[None, :])
        tl.store(stats + part, top, mask=used)
        tl.store(stats + stats_half + part, total, mask=used)
