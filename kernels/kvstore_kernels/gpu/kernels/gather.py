"""Dequantize: a range of one row's tokens, as K and V in any float type."""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import block_offset


@triton.jit
def gather_kernel(
    k,
    v,
    factor,
    shift,
    anchor,
    scale_anchor,
    table,
    start,
    tokens,
    layer_offset,
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
    FETCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid [tiles, kv heads]: k [kv heads, tokens, K_DIM] and v from the token `start` on of the row of `table`."""
    head = tl.program_id(1).to(tl.int64)
    tile = start // TILE + tl.program_id(0)
    each = tl.arange(0, TILE)
    inside = (tile % (BLOCK // TILE)) * TILE + each
    offset = block_offset(table, tile // (BLOCK // TILE), anchor, layer_offset, head * HEAD_BYTES, FETCHED)
    to = tile * TILE + each - start
    live = (to >= 0) & (to < tokens)
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    k_live = live[:, None] & (dk < K_DIM)[None, :]
    v_live = live[:, None] & (dv < V_DIM)[None, :]
    codes = anchor + offset // ITEM
    keys = tl.load(codes + inside[:, None] * K_DIM + dk[None, :], mask=k_live, other=0)
    values = tl.load(
        codes + V_CODES // ITEM + dv[:, None] * BLOCK + inside[None, :],
        mask=(dv < V_DIM)[:, None] & live[None, :],
        other=0,
    )
    values = tl.trans(values)
    if SCALED:
        scales = scale_anchor + offset // 2 + inside
        k_scale = tl.load(scales + K_SCALES // 2, mask=live, other=0.0).to(tl.float32)
        v_scale = tl.load(scales + V_SCALES // 2, mask=live, other=0.0).to(tl.float32)
        scale = tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
        keys = keys.to(tl.float32) * k_scale[:, None] * scale[None, :] + mu[None, :]
        values = values.to(tl.float32) * v_scale[:, None]
    row = head * tokens + to
    tl.store(k + row[:, None] * K_DIM + dk[None, :], keys.to(k.dtype.element_ty), mask=k_live)
    tl.store(v + row[:, None] * V_DIM + dv[None, :], values.to(v.dtype.element_ty), mask=v_live)
