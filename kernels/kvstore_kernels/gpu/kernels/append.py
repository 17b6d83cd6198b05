"""Encode and store: the fresh K and V of all rows of one layer, into blocks, in one launch."""

import triton
import triton.language as tl


@triton.jit
def _encoded(source, values):
    """float32 [T, D] as given, and as to be encoded -> codes [T, D], float16 scales [T], how many were not finite.

    The arithmetic of the CPU codec, rounding for rounding: compiled without fused multiply-add.
    """
    bad = (tl.abs(source) < float("inf")) == 0
    values = tl.where(values == values, values, 0.0)
    values = tl.minimum(tl.maximum(values, -3e38), 3e38)
    values = tl.where(bad, 0.0, values)
    scale = tl.max(tl.abs(values), axis=1) * 0.007874015748031496 + 2.9802322387695312e-08
    scale = tl.minimum(tl.maximum(scale, 5.960464477539063e-08), 65504.0)
    stored = scale.to(tl.float16)
    scaled = values * tl.div_rn(tl.full(stored.shape, 1.0, tl.float32), stored.to(tl.float32))[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    # Adding 1.5 * 2**23 rounds to nearest even.
    codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    return codes, stored, tl.sum(tl.sum(bad.to(tl.int32), axis=1), axis=0)


@triton.jit
def append_kernel(
    k,
    v,
    shift,
    inverse,
    anchor,
    scale_anchor,
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
    BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ITEM: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid [tiles, kv heads, rows]. A tile is TILE neighbouring tokens inside one block."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    skip = tl.load(targets + row)
    start = tl.load(targets + rows + row)
    first = (start // TILE + tl.program_id(0)) * TILE
    end = start + length - skip
    if first < end:
        token = first + tl.arange(0, TILE)
        live = (token >= start) & (token < end)
        source = token - start + skip
        inside = first % BLOCK + tl.arange(0, TILE)
        address = tl.load(table + row * width + first // BLOCK)
        offset = address + layer_offset + head * HEAD_BYTES - anchor.to(tl.int64)
        dk = tl.arange(0, K_PAD)
        dv = tl.arange(0, V_PAD)
        k_live = live[:, None] & (dk < K_DIM)[None, :]
        v_live = live[:, None] & (dv < V_DIM)[None, :]
        k_in = tl.load(k + row * k_row + head * k_head + source[:, None] * k_token + dk[None, :], mask=k_live, other=0)
        v_in = tl.load(v + row * v_row + head * v_head + source[:, None] * v_token + dv[None, :], mask=v_live, other=0)
        if SCALED:
            mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
            inv = tl.load(inverse + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
            k_plain = k_in.to(tl.float32)
            v_plain = v_in.to(tl.float32)
            k_codes, k_scale, k_bad = _encoded(k_plain, (k_plain - mu[None, :]) * inv[None, :])
            v_codes, v_scale, v_bad = _encoded(v_plain, v_plain)
            scales = scale_anchor + offset // 2 + inside
            tl.store(scales + K_SCALES // 2, k_scale, mask=live)
            tl.store(scales + V_SCALES // 2, v_scale, mask=live)
            count = k_bad + v_bad
            tl.atomic_add(nonfinite + layer, count, mask=count > 0)
        else:
            k_codes = k_in
            v_codes = v_in
        codes = anchor + offset // ITEM
        tl.store(codes + inside[:, None] * K_DIM + dk[None, :], k_codes, mask=k_live)
        # Transposed in registers, so that the bytes of one channel are stored together.
        values = codes + V_CODES // ITEM + dv[:, None] * BLOCK + inside[None, :]
        tl.store(values, tl.trans(v_codes), mask=(dv < V_DIM)[:, None] & live[None, :])
