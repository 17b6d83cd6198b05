"""Attention of a few queries a row over the codes of its blocks, split over tokens.

Tokens are the 16-row operand of the matrix instruction and a program is one warp: softmax sums then stay inside it.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import as_half, block_offset, capped, merged


@triton.jit
def _tile(
    state,
    query,
    column_scale,
    bend,
    position,
    tokens,
    tile,
    table,
    anchor,
    scale_anchor,
    layer_offset,
    head_offset,
    cap,
    window,
    MASKED: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
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
    TILE: tl.constexpr,
):
    """One tile of TILE tokens into the running (maximum, sum, output, scale of the output)."""
    top, total, out, unit = state
    each = tl.arange(0, TILE)
    token = tile * TILE + each
    at = (tile % (BLOCK // TILE)) * TILE
    offset = block_offset(table, tile // (BLOCK // TILE), anchor, layer_offset, head_offset, FETCHED)
    codes = anchor + offset // ITEM
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    keys = codes + (at + each)[:, None] * K_DIM + dk[None, :]
    values = codes + V_CODES // ITEM + dv[:, None] * BLOCK + (at + each)[None, :]
    if K_PAD == K_DIM:
        k = tl.load(keys)
    else:
        k = tl.load(keys, mask=(dk < K_DIM)[None, :], other=0)
    if V_PAD == V_DIM:
        v = tl.load(values)
    else:
        v = tl.load(values, mask=(dv < V_DIM)[:, None], other=0)
    if SCALED:
        scales = scale_anchor + offset // 2 + at + each
        k_scale = tl.load(scales + K_SCALES // 2).to(tl.float32)
        v_scale = tl.load(scales + V_SCALES // 2).to(tl.float32)
        if MASKED:
            # A scale that nobody wrote may be NaN, and NaN times weight 0 is NaN.
            v_scale = tl.where(token < tokens, v_scale, 0.0)
        if PRECISE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        else:
            k = as_half(k, FAST)
            v = as_half(v, FAST)
    elif MASKED:
        v = tl.where((token < tokens)[None, :], v, 0.0)
    if PRECISE:
        scores = tl.dot(k, query, input_precision="ieee")
    else:
        scores = tl.dot(k, query)
    if SCALED:
        scores = scores * k_scale[:, None] * column_scale[None, :] + bend[None, :]
    else:
        scores = scores * column_scale[None, :]
    if SOFTCAP:
        scores = capped(scores, cap)
    if MASKED:
        seen = (token[:, None] <= position[None, :]) & (token < tokens)[:, None]
        if WINDOW:
            seen = seen & (token[:, None] > position[None, :] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[None, :])
    total = total * shrink + tl.sum(weight, axis=0)
    if SCALED:
        # Weights are kept within what float16 resolves, however small V is: the output counts in units of `unit`.
        larger = tl.maximum(unit, tl.max(v_scale, axis=0))
        weight = weight * (v_scale / larger)[:, None]
        shrink = shrink * (unit / larger)
        unit = larger
    out = out * shrink[None, :]
    if PRECISE:
        out = tl.dot(v, weight, out, input_precision="ieee")
    else:
        rounded = weight.to(v.dtype)
        out = tl.dot(v, rounded, out)
        if v.dtype == tl.bfloat16:
            # Weights of 8 bits would cost as much accuracy as the result's own rounding: their rest counts, too.
            out = tl.dot(v, (weight - rounded.to(tl.float32)).to(tl.bfloat16), out)
    return higher, total, out, unit


@triton.jit
def decode_kernel(
    query,
    result,
    partials,
    stats,
    arrivals,
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
    fused,
    span,
    stats_half,
    layer_offset,
    q_row,
    q_head,
    q_token,
    window,
    scaling,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    """Grid [rows * kv heads * column tiles, splits]; a column is one query of one query head of the kv head's group."""
    number = tl.program_id(0)
    split = tl.program_id(1)
    column_tiles = tl.cdiv(GROUP * length, COLUMNS)
    head = ((number // column_tiles) % KV_HEADS).to(tl.int64)
    row = (number // (column_tiles * KV_HEADS)).to(tl.int64)
    tokens = tl.load(targets + 2 * rows + row).to(tl.int32)
    local = tl.arange(0, COLUMNS)
    column = (number % column_tiles) * COLUMNS + local
    used = column < GROUP * length
    position = tokens - length + column // GROUP
    q_at = (head * GROUP + column % GROUP) * q_head + (column // GROUP).to(tl.int64) * q_token
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    q = tl.load(query + row * q_row + q_at[None, :] + dk[:, None], mask=used[None, :] & (dk < K_DIM)[:, None], other=0)
    bend = tl.zeros([COLUMNS], tl.float32)
    column_scale = tl.full([COLUMNS], 1.0, tl.float32) * scaling
    if SCALED:
        q = q.to(tl.float32)
        if SOFTCAP or SINKS:
            # The shift is the same for every token: the softmax doesn't see it, but a sink or a soft-cap does.
            mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
            bend = tl.sum(q * mu[:, None], axis=0) * scaling
        q = q * tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)[:, None]
        if not PRECISE:
            largest = tl.max(tl.abs(q), axis=0)
            largest = tl.where(largest > 0, largest, 1.0)
            q = (q / largest[None, :]).to(tl.float16)
            column_scale = largest * scaling
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(tokens - length + 1 - window, 0) // TILE
    last_tile = tl.cdiv(tokens, TILE)
    each = tl.cdiv(last_tile - first_tile, splits)
    begin = first_tile + split * each
    end = tl.minimum(begin + each, last_tile)
    # Tiles of tokens that every query sees need no mask.
    plain_end = begin
    if not WINDOW:
        plain_end = tl.maximum(tl.minimum(end, tl.maximum(tokens - length + 1, 0) // TILE), begin)
    own_table = table + row * width
    head_offset = head * HEAD_BYTES
    top = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    out = tl.zeros([V_PAD, COLUMNS], tl.float32)
    unit = tl.zeros([], tl.float32) + 5.960464477539063e-08
    for tile in range(begin, plain_end):
        top, total, out, unit = _tile(
            (top, total, out, unit), q, column_scale, bend, position, tokens, tile, own_table, anchor, scale_anchor,
            layer_offset, head_offset, cap, window, False, K_DIM, K_PAD, V_DIM, V_PAD, BLOCK, K_SCALES, V_CODES,
            V_SCALES, ITEM, SCALED, PRECISE, FAST, FETCHED, SOFTCAP, WINDOW, TILE,
        )  # fmt: skip
    for tile in range(plain_end, end):
        top, total, out, unit = _tile(
            (top, total, out, unit), q, column_scale, bend, position, tokens, tile, own_table, anchor, scale_anchor,
            layer_offset, head_offset, cap, window, True, K_DIM, K_PAD, V_DIM, V_PAD, BLOCK, K_SCALES, V_CODES,
            V_SCALES, ITEM, SCALED, PRECISE, FAST, FETCHED, SOFTCAP, WINDOW, TILE,
        )  # fmt: skip
    if SCALED:
        out = out * unit
    q_heads = KV_HEADS * GROUP
    result_at = ((row * length + column // GROUP) * q_heads + head * GROUP + column % GROUP) * V_DIM
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + head * GROUP + column % GROUP, mask=used, other=0.0) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
            out = out * tl.exp2(top - higher)[None, :]
        out = out / tl.where(total > 0, total, 1.0)[None, :]
        tl.store(
            result + result_at[None, :] + dv[:, None],
            out.to(result.dtype.element_ty),
            mask=used[None, :] & (dv < V_DIM)[:, None],
        )
    else:
        # A split without blocks writes a neutral partial: nothing, with weight 0.
        part = (number.to(tl.int64) * splits + split) * span + local
        tl.store(partials + part[None, :] * V_DIM + dv[:, None], out, mask=used[None, :] & (dv < V_DIM)[:, None])
        tl.store(stats + part, top, mask=used)
        tl.store(stats + stats_half + part, total, mask=used)
        if fused:
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + number, 1, sem="acq_rel")
            if arrived == splits - 1:
                tl.store(arrivals + number, 0)
                first = number.to(tl.int64) * splits * span
                for one in range(tl.minimum(span, GROUP * length - (number % column_tiles) * COLUMNS)):
                    which = (number % column_tiles) * COLUMNS + one
                    q_number = head * GROUP + which % GROUP
                    sink = -1e30
                    if SINKS:
                        sink = tl.load(sinks + q_number) * 1.4426950408889634
                    whole = merged(partials, stats, stats_half, first + one, span, splits, sink, V_DIM, V_PAD)
                    at = ((row * length + which // GROUP) * q_heads + q_number) * V_DIM
                    tl.store(result + at + dv, whole.to(result.dtype.element_ty), mask=dv < V_DIM)
