"""Attention of many fresh tokens over sealed blocks, a tail and themselves, in tiles of queries.

As in prefill, codes become numbers tile by tile inside the loop. What sealed blocks give is rotated back once for each
tile of queries, in registers: everything after that is exact and plain.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import block_offset, capped
from kvstore_kernels.gpu.kernels.sealed_tile import KEY_UNIT, key_tile, tokens_of, value_tile


@triton.jit
def _turned_part(high, low, turn, first, V_PAD: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr):
    row = tl.arange(0, V_PAD)
    at = turn + row[:, None] * V_PAD + first + tl.arange(0, N)[None, :]
    matrix = tl.load(at)
    rest = tl.dot(low, matrix)
    if not EXACT:
        rest = tl.dot(high, tl.load(at + V_PAD * V_PAD), rest)
    return tl.dot(high, matrix, rest * (1.0 / 2048.0))


@triton.jit
def _turned(out, turn, V_PAD: tl.constexpr, EXACT: tl.constexpr):
    """Float32 [Q, V_PAD] times the matrix at `turn`, which is float16 [V_PAD, V_PAD] and, if not EXACT, 2048 times what
    that leaves out. So are the rows, over their largest number: products keep 22 bits.
    """
    largest = tl.max(tl.abs(out), axis=1)
    largest = tl.where(largest > 0, largest, 1.0)
    out = out / largest[:, None]
    high = out.to(tl.float16)
    low = ((out - high.to(tl.float32)) * 2048.0).to(tl.float16)
    if V_PAD > 128:
        # The whole matrix would take too much shared memory.
        left = _turned_part(high, low, turn, 0, V_PAD, V_PAD // 2, EXACT)
        right = _turned_part(high, low, turn, V_PAD // 2, V_PAD, V_PAD // 2, EXACT)
        out = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (out.shape[0], V_PAD))
    else:
        out = _turned_part(high, low, turn, 0, V_PAD, V_PAD, EXACT)
    return out * largest[:, None]


@triton.jit
def _exact_tile(
    state,
    query,
    scaling,
    keys,
    values,
    live,
    seen,
    cap,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PRECISE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Tokens [T] with exact K and V at keys [T] and values [T], those that a query sees in seen [Q, T]."""
    top, total, out = state
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    k = tl.load(keys[:, None] + dk[None, :], mask=live[:, None] & (dk < K_DIM)[None, :], other=0.0).to(query.dtype)
    v = tl.load(values[:, None] + dv[None, :], mask=live[:, None] & (dv < V_DIM)[None, :], other=0.0).to(query.dtype)
    if PRECISE:
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scaling
    else:
        scores = tl.dot(query, tl.trans(k)) * scaling
    if SOFTCAP:
        scores = capped(scores, cap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    out = out * shrink[:, None]
    if PRECISE:
        out = tl.dot(weight, v, out, input_precision="ieee")
    else:
        rounded = weight.to(v.dtype)
        out = tl.dot(rounded, v, out)
        if v.dtype == tl.bfloat16:
            # See decode: the rest of the weights.
            out = tl.dot((weight - rounded.to(tl.float32)).to(tl.bfloat16), v, out)
    return higher, total, out


@triton.jit
def sealed_prefill_kernel(
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
    turn,
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
    TILE: tl.constexpr,
    TURN_EXACT: tl.constexpr,
    TURN_UNIT: tl.constexpr,
):
    """Grid [rows * kv heads * query tiles, splits]; a query tile is QUERIES (token, head of the group) pairs.

    `turn` times TURN_UNIT is what rotates back: see _turned. A row's history is in sealed blocks up to the last border
    before the end of the fresh tokens, and from there on in the tail.
    """
    number = tl.program_id(0)
    split = tl.program_id(1)
    tiles = tl.cdiv(GROUP * length, QUERIES)
    q_tile = number % tiles
    head = ((number // tiles) % KV_HEADS).to(tl.int64)
    row = (number // (tiles * KV_HEADS)).to(tl.int64)
    skip = tl.load(targets + row).to(tl.int32)
    past = tl.load(targets + rows + row).to(tl.int32)
    first_known = tl.load(known + row)
    fresh = length - skip
    local = tl.arange(0, QUERIES)
    pair = q_tile * QUERIES + local
    own = pair // GROUP
    used = own < fresh
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    q_at = (head * GROUP + pair % GROUP) * q_head + (skip + own).to(tl.int64) * q_token
    q = tl.load(query + row * q_row + q_at[:, None] + dk[None, :], mask=used[:, None] & (dk < K_DIM)[None, :], other=0)
    # Tiles of sealed blocks, of the tail, then of the fresh tokens, are shared out among the splits.
    coded = tl.minimum(past, (past + fresh) // BLOCK * BLOCK)
    coded_tiles = tl.cdiv(coded, BLOCK)
    old_tiles = coded_tiles + tl.cdiv(past - coded, TILE)
    last_own = tl.minimum((q_tile * QUERIES + QUERIES - 1) // GROUP, fresh - 1)
    all_tiles = old_tiles + tl.cdiv(last_own + 1, TILE)
    first = 0
    if WINDOW:
        oldest = tl.maximum(past + (q_tile * QUERIES) // GROUP - window + 1, 0)
        first = tl.where(oldest < coded, oldest // BLOCK, coded_tiles + (oldest - coded) // TILE)
        first = tl.where(oldest < past, first, old_tiles + (oldest - past) // TILE)
    share = tl.cdiv(tl.maximum(all_tiles - first, 0), splits)
    begin = first + split * share
    end = tl.minimum(begin + share, all_tiles)
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, V_PAD], tl.float32)
    if begin < tl.minimum(end, coded_tiles):
        folded = q.to(tl.float32)
        # Beside exact keys the shift counts: it drops out only where all keys are codes.
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        bend = tl.sum(folded * mu[None, :], axis=1) * scaling
        folded = folded * tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)[None, :]
        scale = tl.full([QUERIES], 1.0, tl.float32) * scaling
        if not PRECISE:
            largest = tl.max(tl.abs(folded), axis=1)
            largest = tl.where(largest > 0, largest, 1.0)
            folded = (folded / largest[:, None]).to(tl.float16)
            scale = largest * scaling
        if K_BITS == 4:
            scale = scale * KEY_UNIT
        unit = tl.zeros([], tl.float32) + 5.960464477539063e-08
        level = tl.zeros([QUERIES], tl.float32)
        inside = tokens_of(BLOCK, BLOCK, V_BITS)
        for block in range(begin, tl.minimum(end, coded_tiles)):
            offset = block_offset(table + row * width, block, anchor, layer_offset, head * HEAD_BYTES, FETCHED)
            codes = anchor + offset
            k_scales = scale_anchor + offset // 2 + K_SCALES // 2
            v_scales = scale_anchor + offset // 2 + V_SCALES // 2 + inside
            k = key_tile(codes + K_CODES, k_scales, K_DIM, K_PAD, BLOCK, K_BITS, V_BITS, PRECISE, FAST)
            v = value_tile(codes + V_CODES, codes + V_HIGH, odds, V_DIM, V_PAD, BLOCK, V_BITS, PRECISE, FAST)
            v_scale = tl.load(v_scales).to(tl.float32)
            if PRECISE:
                scores = tl.dot(folded, tl.trans(k), input_precision="ieee")
            else:
                scores = tl.dot(folded, tl.trans(k))
            if K_BITS == 8:
                scores = scores * tl.load(k_scales + inside).to(tl.float32)[None, :]
            scores = scores * scale[:, None] + bend[:, None]
            if SOFTCAP:
                scores = capped(scores, cap)
            token = block * BLOCK + inside
            # The first token, if it is known exactly, comes below.
            live = (token < coded) & (token >= first_known)
            if WINDOW:
                seen = live[None, :] & (token[None, :] > past + own[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            else:
                scores = scores + tl.where(live, 0.0, float("-inf"))[None, :]
            higher = tl.maximum(top, tl.max(scores, axis=1))
            shrink = tl.exp2(top - higher)
            weight = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            if V_BITS == 4:
                # See decode: codes are taken less 8.
                middle = tl.load(v_scales + BLOCK).to(tl.float32) + 8 * v_scale
                level = level * shrink + tl.sum(weight * middle[None, :], axis=1)
            larger = tl.maximum(unit, tl.max(v_scale, axis=0))
            weight = weight * (v_scale / larger)[None, :]
            out = out * (shrink * (unit / larger))[:, None]
            unit = larger
            if PRECISE:
                out = tl.dot(weight, tl.trans(v), out, input_precision="ieee")
            else:
                out = tl.dot(weight.to(tl.float16), tl.trans(v), out)
            top = higher
        out = _turned(out * unit + level[:, None], turn, V_PAD, TURN_EXACT) * TURN_UNIT
    place = row * KV_HEADS + head
    if (split == 0) & (coded > 0) & (first_known > 0):
        one_k = tl.load(first_k + place * K_DIM + dk, mask=dk < K_DIM, other=0.0).to(tl.float32)
        one_v = tl.load(first_v + place * V_DIM + dv, mask=dv < V_DIM, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * one_k[None, :], axis=1) * scaling
        if SOFTCAP:
            score = capped(score, cap)
        if WINDOW:
            score = tl.where(past + own < window, score, float("-inf"))
        highest = tl.maximum(top, score)
        kept = tl.exp2(top - highest)
        added = tl.exp2(score - highest)
        total = total * kept + added
        out = out * kept[:, None] + added[:, None] * one_v[None, :]
        top = highest
    each = tl.arange(0, TILE)
    for tile in tl.range(tl.maximum(begin, coded_tiles), tl.minimum(end, old_tiles), num_stages=1):
        old = coded + (tile - coded_tiles) * TILE + each
        # The tail begins at the last border before the history's end.
        at = place * CAPACITY + old - past // BLOCK * BLOCK
        old_live = old < past
        old_seen = old_live[None, :] & used[:, None]
        if WINDOW:
            old_seen = old_seen & (old[None, :] > past + own[:, None] - window)
        top, total, out = _exact_tile(
            (top, total, out), q, scaling, tail_k + at * K_DIM, tail_v + at * V_DIM, old_live, old_seen, cap, K_DIM,
            K_PAD, V_DIM, V_PAD, PRECISE, SOFTCAP,
        )  # fmt: skip
    for tile in range(tl.maximum(begin, old_tiles) - old_tiles, end - old_tiles):
        new = tile * TILE + each
        new_at = (skip + new).to(tl.int64)
        new_seen = (new[None, :] <= own[:, None]) & used[:, None]
        if WINDOW:
            new_seen = new_seen & (new[None, :] > own[:, None] - window)
        top, total, out = _exact_tile(
            (top, total, out), q, scaling, key + row * k_row + head * k_head + new_at * k_token,
            value + row * v_row + head * v_head + new_at * v_token, new < fresh, new_seen, cap, K_DIM, K_PAD, V_DIM,
            V_PAD, PRECISE, SOFTCAP,
        )  # fmt: skip
    q_number = head * GROUP + pair % GROUP
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks + q_number, mask=used, other=0.0) * 1.4426950408889634
            with_sink = tl.maximum(top, sink)
            total = total * tl.exp2(top - with_sink) + tl.exp2(sink - with_sink)
            out = out * tl.exp2(top - with_sink)[:, None]
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        result_at = ((row * length + skip + own) * (KV_HEADS * GROUP) + q_number) * V_DIM
        tl.store(
            result + result_at[:, None] + dv[None, :],
            out.to(result.dtype.element_ty),
            mask=used[:, None] & (dv < V_DIM)[None, :],
        )
    else:
        part = (number.to(tl.int64) * splits + split) * QUERIES + local
        tl.store(partials + part[:, None] * V_DIM + dv[None, :], out, mask=used[:, None] & (dv < V_DIM)[None, :])
        tl.store(stats + part, top, mask=used)
        tl.store(stats + stats_half + part, total, mask=used)
