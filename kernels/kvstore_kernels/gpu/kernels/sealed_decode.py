"""Attention of a few queries a row over its sealed blocks, split over blocks, and over what the tail holds exactly.

As in decode, tokens are the 16-row operand of the matrix instruction and a program is one warp.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import block_offset, capped
from kvstore_kernels.gpu.kernels.sealed_tile import KEY_UNIT, key_tile, tokens_of, value_tile

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    state,
    query,
    column_scale,
    bend,
    position,
    block,
    first_token,
    odds,
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
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    PRECISE: tl.constexpr,
    FAST: tl.constexpr,
    FETCHED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One block into the running (maximum, sum, output, scale of the output, what is added to all its channels)."""
    top, total, out, unit, level = state
    offset = block_offset(table, block, anchor, layer_offset, head_offset, FETCHED)
    codes = anchor + offset
    each = tokens_of(BLOCK, BLOCK, V_BITS)
    k_scales = scale_anchor + offset // 2 + K_SCALES // 2
    v_scales = scale_anchor + offset // 2 + V_SCALES // 2 + each
    k = key_tile(codes + K_CODES, k_scales, K_DIM, K_PAD, BLOCK, K_BITS, V_BITS, PRECISE, FAST)
    v = value_tile(codes + V_CODES, codes + V_HIGH, odds, V_DIM, V_PAD, BLOCK, V_BITS, PRECISE, FAST)
    v_scale = tl.load(v_scales).to(tl.float32)
    if PRECISE:
        scores = tl.dot(k, query, input_precision="ieee")
    else:
        scores = tl.dot(k, query)
    if K_BITS == 8:
        scores = scores * tl.load(k_scales + each).to(tl.float32)[:, None]
    scores = scores * column_scale[None, :] + bend[None, :]
    if SOFTCAP:
        scores = capped(scores, cap)
    if MASKED:
        # A query sees its own block exactly, so not here.
        token = block * BLOCK + each
        seen = (token[:, None] < (position // BLOCK * BLOCK)[None, :]) & (token >= first_token)[:, None]
        if WINDOW:
            seen = seen & (token[:, None] > position[None, :] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[None, :])
    total = total * shrink + tl.sum(weight, axis=0)
    if V_BITS == 4:
        # Codes are taken less 8: what the middle of a token's values adds is the same for all channels.
        middle = tl.load(v_scales + BLOCK).to(tl.float32) + 8 * v_scale
        level = level * shrink + tl.sum(weight * middle[:, None], axis=0)
    # Weights are kept within what float16 resolves, however small V is: the output counts in units of `unit`.
    larger = tl.maximum(unit, tl.max(v_scale, axis=0))
    weight = weight * (v_scale / larger)[:, None]
    out = out * (shrink * (unit / larger))[None, :]
    if PRECISE:
        out = tl.dot(v, weight, out, input_precision="ieee")
    else:
        out = tl.dot(v, weight.to(tl.float16), out)
    return higher, total, out, larger, level


@triton.jit
def _exact_tile(
    state,
    query,
    scaling,
    position,
    token,
    tokens,
    keys,
    values,
    cap,
    window,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Tokens [T] whose exact K and V lie at keys [T] and values [T] (rows) into the running (maximum, sum, output)."""
    top, total, out = state
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    live = (token < tokens)[:, None]
    k = tl.load(keys[:, None] + dk[None, :], mask=live & (dk < K_DIM)[None, :], other=0.0).to(query.dtype)
    v = tl.load(values[:, None] + dv[None, :], mask=live & (dv < V_DIM)[None, :], other=0.0).to(query.dtype)
    v = tl.trans(v)
    if PRECISE:
        scores = tl.dot(k, query, input_precision="ieee") * scaling
    else:
        scores = tl.dot(k, query) * scaling
    if SOFTCAP:
        scores = capped(scores, cap)
    seen = (token[:, None] >= (position // BLOCK * BLOCK)[None, :]) & (token[:, None] <= position[None, :]) & live
    if WINDOW:
        seen = seen & (token[:, None] > position[None, :] - window)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[None, :])
    total = total * shrink + tl.sum(weight, axis=0)
    out = out * shrink[None, :]
    if PRECISE:
        out = tl.dot(v, weight, out, input_precision="ieee")
    else:
        rounded = weight.to(v.dtype)
        out = tl.dot(v, rounded, out)
        if v.dtype == tl.bfloat16:
            # See decode: the rest of the weights.
            out = tl.dot(v, (weight - rounded.to(tl.float32)).to(tl.bfloat16), out)
    return higher, total, out


@triton.jit
def sealed_decode_kernel(
    query,
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
    tail_k,
    tail_v,
    first_k,
    first_v,
    known,
    odds,
    rows,
    width,
    length,
    splits,
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
    CAPACITY: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    PRECISE: tl.constexpr,
    FAST: tl.constexpr,
    FETCHED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid [rows * kv heads * column tiles, splits + 1]; a column is a query of a query head of the kv head's group.

    The last program takes what is exact, and gives the result where there is nothing else (splits 0); the others
    leave rotated sums.
    """
    number = tl.program_id(0)
    split = tl.program_id(1)
    column_tiles = tl.cdiv(GROUP * length, COLUMNS)
    head = ((number // column_tiles) % KV_HEADS).to(tl.int64)
    row = (number // (column_tiles * KV_HEADS)).to(tl.int64)
    tokens = tl.load(targets + 2 * rows + row).to(tl.int32)
    first_known = tl.load(known + row)
    local = tl.arange(0, COLUMNS)
    column = (number % column_tiles) * COLUMNS + local
    used = column < GROUP * length
    oldest = tokens - length
    position = oldest + column // GROUP
    q_at = (head * GROUP + column % GROUP) * q_head + (column // GROUP).to(tl.int64) * q_token
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    q = tl.load(query + row * q_row + q_at[None, :] + dk[:, None], mask=used[None, :] & (dk < K_DIM)[:, None], other=0)
    top = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    out = tl.zeros([V_PAD, COLUMNS], tl.float32)
    if split < splits:
        folded = q.to(tl.float32)
        # Beside exact keys the shift counts: it drops out only where all keys are codes.
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        bend = tl.sum(folded * mu[:, None], axis=0) * scaling
        folded = folded * tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)[:, None]
        column_scale = tl.full([COLUMNS], 1.0, tl.float32) * scaling
        if not PRECISE:
            largest = tl.max(tl.abs(folded), axis=0)
            largest = tl.where(largest > 0, largest, 1.0)
            folded = (folded / largest[None, :]).to(tl.float16)
            column_scale = largest * scaling
        if K_BITS == 4:
            column_scale = column_scale * KEY_UNIT
        first_block = 0
        if WINDOW:
            first_block = tl.maximum(oldest + 1 - window, 0) // BLOCK
        blocks = tl.maximum(tokens - 1, 0) // BLOCK
        share = tl.cdiv(tl.maximum(blocks - first_block, 0), splits)
        begin = first_block + split * share
        end = tl.minimum(begin + share, blocks)
        # Blocks that every query sees whole need no mask.
        plain, plain_end = begin, begin
        if not WINDOW:
            plain_end = tl.maximum(tl.minimum(end, tl.maximum(oldest, 0) // BLOCK), begin)
            plain = tl.minimum(begin + tl.where(begin == 0, first_known, 0), plain_end)
        own_table = table + row * width
        head_offset = head * HEAD_BYTES
        unit = tl.zeros([], tl.float32) + 5.960464477539063e-08
        level = tl.zeros([COLUMNS], tl.float32)
        for block in tl.range(plain, plain_end, num_stages=STAGES):
            top, total, out, unit, level = _tile(
                (top, total, out, unit, level), folded, column_scale, bend, position, block, first_known, odds,
                own_table, anchor, scale_anchor, layer_offset, head_offset, cap, window, False, K_DIM, K_PAD, V_DIM,
                V_PAD, BLOCK, K_CODES, K_SCALES, V_CODES, V_HIGH, V_SCALES, K_BITS, V_BITS, PRECISE, FAST, FETCHED,
                SOFTCAP, WINDOW,
            )  # fmt: skip
        before = plain - begin
        for index in tl.range(0, before + tl.maximum(end - plain_end, 0), num_stages=STAGES):
            block = tl.where(index < before, begin + index, plain_end + index - before)
            top, total, out, unit, level = _tile(
                (top, total, out, unit, level), folded, column_scale, bend, position, block, first_known, odds,
                own_table, anchor, scale_anchor, layer_offset, head_offset, cap, window, True, K_DIM, K_PAD, V_DIM,
                V_PAD, BLOCK, K_CODES, K_SCALES, V_CODES, V_HIGH, V_SCALES, K_BITS, V_BITS, PRECISE, FAST, FETCHED,
                SOFTCAP, WINDOW,
            )  # fmt: skip
        out = out * unit + level[None, :]
    else:
        place = row * KV_HEADS + head
        # The first token, where it isn't in the query's own block.
        one_k = tl.load(first_k + place * K_DIM + dk, mask=dk < K_DIM, other=0.0).to(tl.float32)
        one_v = tl.load(first_v + place * V_DIM + dv, mask=dv < V_DIM, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * one_k[:, None], axis=0) * scaling
        if SOFTCAP:
            score = capped(score, cap)
        seen = (position >= BLOCK) & (first_known > 0)
        if WINDOW:
            seen = seen & (position < window)
        top = tl.where(seen, score, top)
        total = tl.where(seen, 1.0, total)
        out = tl.where(seen[None, :], one_v[:, None], out)
        base = tl.maximum(oldest, 0) // BLOCK * BLOCK
        each = tl.arange(0, 16)
        # Few tiles: loads on their way would only take registers from the loop above.
        for start in tl.range(base, tokens, 16, num_stages=1):
            token = start + each
            at = place * CAPACITY + token - base
            top, total, out = _exact_tile(
                (top, total, out), q, scaling, position, token, tokens, tail_k + at * K_DIM, tail_v + at * V_DIM, cap,
                window, K_DIM, K_PAD, V_DIM, V_PAD, BLOCK, PRECISE, SOFTCAP, WINDOW,
            )  # fmt: skip
    if splits == 0:
        q_number = head * GROUP + column % GROUP
        if SINKS:
            sink = tl.load(sinks + q_number, mask=used, other=0.0) * _LOG2_E
            higher = tl.maximum(top, sink)
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
            out = out * tl.exp2(top - higher)[None, :]
        out = out / tl.where(total > 0, total, 1.0)[None, :]
        at = ((row * length + column // GROUP) * (KV_HEADS * GROUP) + q_number) * V_DIM
        tl.store(
            result + at[None, :] + dv[:, None],
            out.to(result.dtype.element_ty),
            mask=used[None, :] & (dv < V_DIM)[:, None],
        )
    else:
        # A split without blocks writes a neutral partial: nothing, with weight 0.
        part = (number.to(tl.int64) * (splits + 1) + split) * span + local
        tl.store(partials + part[None, :] * V_DIM + dv[:, None], out, mask=used[None, :] & (dv < V_DIM)[:, None])
        tl.store(stats + part, top, mask=used)
        tl.store(stats + stats_half + part, total, mask=used)
