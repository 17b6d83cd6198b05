"""Writing for codecs that quantize whole blocks: blocks that are full into their slots, the rest into the tail.

Fresh tokens are those of the pass; a row's earlier ones of its unfinished block lie in the tail, which begins with that
block's first token. `seal_kernel` comes first: it reads what `tail_kernel` may overwrite.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import block_offset

# Rounds to nearest even when it is added and taken off again: 1.5 * 2**23.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _finite(values, instead):
    """Numbers [T, D] with `instead` [D] where they are inf or NaN, and where that is."""
    bad = (tl.abs(values) < float("inf")) == 0
    return tl.where(bad, instead[None, :], values), bad


@triton.jit
def _kept(values, tail):
    """Numbers as the tail's dtype holds them, float32: how writes were cut must not show in a block."""
    return values.to(tail.dtype.element_ty).to(tl.float32)


@triton.jit
def _stored(scale):
    return tl.minimum(tl.maximum(scale, 5.960464477539063e-08), 65504.0).to(tl.float16)


@triton.jit
def _packed(codes, BITS: tl.constexpr):
    """int32 codes [D, T] of so many bits -> uint8 [D, T * BITS / 8]: first tokens in the lowest bits."""
    parts = tl.reshape(codes, (codes.shape[0], 8 // BITS, codes.shape[1] * BITS // 8))
    places = tl.arange(0, 8 // BITS) * BITS
    return tl.sum(parts << places[None, :, None], axis=1).to(tl.uint8)


@triton.jit
def seal_kernel(
    k,
    v,
    shift,
    inverse,
    rotation,
    anchor,
    scale_anchor,
    tail_k,
    tail_v,
    table,
    targets,
    nonfinite,
    rows,
    width,
    layer,
    length,
    layer_offset,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHORT: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    TERMS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Grid [blocks that a row may complete, kv heads, rows]. `rotation`: TERMS matrices [V_PAD, V_PAD] whose sum times
    UNIT it is. The arithmetic of the CPU codec, rounding for rounding but for the sums of the rotation: compiled
    without fused multiply-add.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    skip = tl.load(targets + row)
    start = tl.load(targets + rows + row)
    end = start + length - skip
    begin = start // BLOCK * BLOCK
    block = start // BLOCK + tl.program_id(0)
    if (skip < length) & ((block + 1) * BLOCK <= end):
        token = block * BLOCK + tl.arange(0, BLOCK)
        old = token < start
        source = token - start + skip
        # What is kept in the tail, the other kernel counts.
        counted = (token >= start) & (end - start > SHORT)
        place = (row * KV_HEADS + head) * CAPACITY + token - begin
        offset = block_offset(table, row * width + block, anchor, layer_offset, head * HEAD_BYTES, False)
        codes = anchor + offset
        scales = scale_anchor + offset // 2
        each = tl.arange(0, BLOCK)
        dk = tl.arange(0, K_PAD)
        dv = tl.arange(0, V_PAD)
        k_live = (dk < K_DIM)[None, :]
        v_live = (dv < V_DIM)[None, :]

        held = tl.load(tail_k + place[:, None] * K_DIM + dk[None, :], mask=old[:, None] & k_live, other=0.0)
        at = k + row * k_row + head * k_head + source[:, None] * k_token + dk[None, :]
        fresh = tl.load(at, mask=(token >= start)[:, None] & k_live, other=0.0)
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        keys, bad = _finite(_kept(fresh, tail_k), _kept(mu.to(k.dtype.element_ty), tail_k))
        count = tl.sum(tl.sum((bad & counted[:, None] & k_live).to(tl.int32), axis=1), axis=0)
        keys = tl.where(old[:, None], held.to(tl.float32), keys)
        inv = tl.load(inverse + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        keys = tl.minimum(tl.maximum((keys - mu[None, :]) * inv[None, :], -65504.0), 65504.0)
        if K_BITS == 8:
            scale = _stored(tl.div_rn(tl.max(tl.abs(keys), axis=1), tl.full([BLOCK], 127.0, tl.float32)))
            steps = tl.div_rn(keys, tl.broadcast_to(scale.to(tl.float32)[:, None], (BLOCK, K_PAD)))
            steps = tl.minimum(tl.maximum((steps + _ROUND) - _ROUND, -127.0), 127.0)
            tl.store(scales + K_SCALES // 2 + each, scale)
            at = codes + K_CODES + each[:, None] * K_DIM + dk[None, :]
            tl.store(at, steps.to(tl.int8).to(tl.uint8, bitcast=True), mask=tl.broadcast_to(k_live, (BLOCK, K_PAD)))
        else:
            least = tl.min(keys, axis=0)
            scale = _stored(tl.div_rn(tl.max(keys, axis=0) - least, tl.full([K_PAD], 15.0, tl.float32)))
            low = least.to(tl.float16)
            steps = tl.div_rn(
                keys - low.to(tl.float32)[None, :],
                tl.broadcast_to(scale.to(tl.float32)[None, :], (BLOCK, K_PAD)),
            )
            steps = tl.minimum(tl.maximum((steps + _ROUND) - _ROUND, 0.0), 15.0).to(tl.int32)
            halves = tl.reshape(steps, (2, BLOCK // 2, K_PAD))
            packed = tl.sum(halves << (4 * tl.arange(0, 2))[:, None, None], axis=0).to(tl.uint8)
            half = tl.arange(0, BLOCK // 2)
            at = codes + K_CODES + half[:, None] * K_DIM + dk[None, :]
            tl.store(at, packed, mask=tl.broadcast_to(k_live, (BLOCK // 2, K_PAD)))
            tl.store(scales + K_SCALES // 2 + dk, scale, mask=dk < K_DIM)
            tl.store(scales + K_SCALES // 2 + K_DIM + dk, low, mask=dk < K_DIM)

        # Some channels at a time: all of the rotation at once would take too much shared memory.
        values = tl.zeros([BLOCK, V_PAD], tl.float32)
        for chunk in tl.range(0, V_PAD, CHUNK, num_stages=1):
            d = chunk + tl.arange(0, CHUNK)
            own = (d < V_DIM)[None, :]
            v_held = tl.load(tail_v + place[:, None] * V_DIM + d[None, :], mask=old[:, None] & own, other=0.0)
            v_at = v + row * v_row + head * v_head + source[:, None] * v_token + d[None, :]
            v_fresh = tl.load(v_at, mask=(token >= start)[:, None] & own, other=0.0)
            part, v_bad = _finite(_kept(v_fresh, tail_v), tl.zeros([CHUNK], tl.float32))
            count += tl.sum(tl.sum((v_bad & counted[:, None] & own).to(tl.int32), axis=1), axis=0)
            part = tl.where(old[:, None], v_held.to(tl.float32), part)
            for term in tl.static_range(TERMS):
                turn = tl.load(rotation + term * V_PAD * V_PAD + d[:, None] * V_PAD + dv[None, :])
                if turn.dtype == tl.float32:
                    values = tl.dot(part, turn, values, input_precision="ieee")
                else:
                    # The tail's dtype holds these numbers: products are exact.
                    values = tl.dot(part.to(turn.dtype), turn, values)
        tl.atomic_add(nonfinite + layer, count, mask=count > 0)
        values = tl.minimum(tl.maximum(values * UNIT, -65504.0), 65504.0)
        if V_BITS == 4:
            least = tl.min(tl.where(v_live, values, float("inf")), axis=1)
            most = tl.max(tl.where(v_live, values, float("-inf")), axis=1)
            scale = _stored(tl.div_rn(most - least, tl.full([BLOCK], 15.0, tl.float32)))
            low = least.to(tl.float16)
            steps = tl.div_rn(
                values - low.to(tl.float32)[:, None],
                tl.broadcast_to(scale.to(tl.float32)[:, None], (BLOCK, V_PAD)),
            )
            steps = tl.minimum(tl.maximum((steps + _ROUND) - _ROUND, 0.0), 15.0)
            tl.store(scales + V_SCALES // 2 + BLOCK + each, low)
            packed = _packed(tl.trans(steps.to(tl.int32)), 4)
            half = tl.arange(0, BLOCK // 2)
            tl.store(codes + V_CODES + dv[:, None] * (BLOCK // 2) + half[None, :], packed, mask=(dv < V_DIM)[:, None])
        else:
            middle: tl.constexpr = 4.0 if V_BITS == 3 else 2.0
            # A power of two: as exact as a division.
            scale = _stored(tl.max(tl.abs(values), axis=1) * (1.0 / middle))
            steps = tl.div_rn(values, tl.broadcast_to(scale.to(tl.float32)[:, None], (BLOCK, V_PAD)))
            steps = tl.minimum(tl.maximum(tl.floor(steps), -middle), middle - 1.0) + middle
            whole = tl.trans(steps.to(tl.int32))
            quarter = tl.arange(0, BLOCK // 4)
            at = codes + V_CODES + dv[:, None] * (BLOCK // 4) + quarter[None, :]
            tl.store(at, _packed(whole & 3, 2), mask=(dv < V_DIM)[:, None])
            if V_BITS == 3:
                eighth = tl.arange(0, BLOCK // 8)
                at = codes + V_HIGH + dv[:, None] * (BLOCK // 8) + eighth[None, :]
                tl.store(at, _packed(whole >> 2, 1), mask=(dv < V_DIM)[:, None])
        tl.store(scales + V_SCALES // 2 + each, scale)


@triton.jit
def tail_kernel(
    k,
    v,
    shift,
    tail_k,
    tail_v,
    first_k,
    first_v,
    targets,
    nonfinite,
    rows,
    layer,
    length,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid [tiles, kv heads, rows]: what a write leaves in the tail, TILE tokens a program, and a row's first token."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    skip = tl.load(targets + row)
    start = tl.load(targets + rows + row)
    end = start + length - skip
    if skip < length:
        # A short write keeps the block that it began in; a longer one what is behind the last whole block.
        base = tl.where(end - start <= SHORT, start, end) // BLOCK * BLOCK
        dk = tl.arange(0, K_PAD)
        dv = tl.arange(0, V_PAD)
        token = tl.maximum(base, start) + tl.program_id(0) * TILE + tl.arange(0, TILE)
        live = (token < end)[:, None]
        k_at = k + row * k_row + head * k_head
        v_at = v + row * v_row + head * v_head
        source = token - start + skip
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0).to(k.dtype.element_ty).to(tl.float32)
        nothing = tl.zeros([V_PAD], tl.float32)
        k_live = live & (dk < K_DIM)[None, :]
        v_live = live & (dv < V_DIM)[None, :]
        keys = tl.load(k_at + source[:, None] * k_token + dk[None, :], mask=k_live, other=0.0)
        values = tl.load(v_at + source[:, None] * v_token + dv[None, :], mask=v_live, other=0.0)
        keys, k_bad = _finite(_kept(keys, tail_k), mu)
        values, v_bad = _finite(_kept(values, tail_v), nothing)
        count = tl.sum(tl.sum(k_bad.to(tl.int32), axis=1), axis=0) + tl.sum(tl.sum(v_bad.to(tl.int32), axis=1), axis=0)
        tl.atomic_add(nonfinite + layer, count, mask=count > 0)
        place = (row * KV_HEADS + head) * CAPACITY + token - base
        tl.store(tail_k + place[:, None] * K_DIM + dk[None, :], keys.to(tail_k.dtype.element_ty), mask=k_live)
        tl.store(tail_v + place[:, None] * V_DIM + dv[None, :], values.to(tail_v.dtype.element_ty), mask=v_live)
        if (start == 0) & (tl.program_id(0) == 0):
            one = tl.arange(0, 1)[:, None]
            own_k = (dk < K_DIM)[None, :]
            own_v = (dv < V_DIM)[None, :]
            first_keys = tl.load(k_at + (one + skip) * k_token + dk[None, :], mask=own_k, other=0.0)
            first_values = tl.load(v_at + (one + skip) * v_token + dv[None, :], mask=own_v, other=0.0)
            one_k, _ = _finite(_kept(first_keys, tail_k), mu)
            one_v, _ = _finite(_kept(first_values, tail_v), nothing)
            at = row * KV_HEADS + head
            tl.store(first_k + (at + one) * K_DIM + dk[None, :], one_k.to(first_k.dtype.element_ty), mask=own_k)
            tl.store(first_v + (at + one) * V_DIM + dv[None, :], one_v.to(first_v.dtype.element_ty), mask=own_v)
