"""Dequantize: a range of one row's sealed tokens, as K and V in any float type."""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import block_offset


@triton.jit
def sealed_gather_kernel(
    k,
    v,
    factor,
    shift,
    rotation_back,
    anchor,
    scale_anchor,
    table,
    start,
    tokens,
    stride,
    layer_offset,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_HIGH: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    FETCHED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid [blocks, kv heads]: tokens `start` on of the row of `table` into k [kv heads, stride, K_DIM] and v."""
    head = tl.program_id(1).to(tl.int64)
    block = start // BLOCK + tl.program_id(0)
    each = tl.arange(0, BLOCK)
    to = block * BLOCK + each - start
    live = ((to >= 0) & (to < tokens))[:, None]
    offset = block_offset(table, block, anchor, layer_offset, head * HEAD_BYTES, FETCHED)
    codes = anchor + offset
    scales = scale_anchor + offset // 2
    dk = tl.arange(0, K_PAD)
    dv = tl.arange(0, V_PAD)
    row = head * stride + to

    k_live = live & (dk < K_DIM)[None, :]
    if K_BITS == 8:
        at = codes + K_CODES + each[:, None] * K_DIM + dk[None, :]
        keys = tl.load(at, mask=k_live, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        keys = keys * tl.load(scales + K_SCALES // 2 + each).to(tl.float32)[:, None]
    else:
        at = codes + K_CODES + (each % (BLOCK // 2))[:, None] * K_DIM + dk[None, :]
        packed = tl.load(at, mask=k_live, other=0).to(tl.int32)
        scale = tl.load(scales + K_SCALES // 2 + dk, mask=dk < K_DIM, other=0.0).to(tl.float32)
        low = tl.load(scales + K_SCALES // 2 + K_DIM + dk, mask=dk < K_DIM, other=0.0).to(tl.float32)
        keys = ((packed >> (each // (BLOCK // 2) * 4)[:, None]) & 15).to(tl.float32) * scale[None, :] + low[None, :]
    scale = tl.load(factor + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
    mu = tl.load(shift + head * K_DIM + dk, mask=dk < K_DIM, other=0.0)
    keys = keys * scale[None, :] + mu[None, :]
    tl.store(k + row[:, None] * K_DIM + dk[None, :], keys.to(k.dtype.element_ty), mask=k_live)

    # Some channels at a time: all of the rotation at once would take too much shared memory.
    v_scale = tl.load(scales + V_SCALES // 2 + each).to(tl.float32)[:, None]
    turned = tl.zeros([BLOCK, V_PAD], tl.float32)
    for chunk in tl.range(0, V_PAD, CHUNK, num_stages=1):
        d = chunk + tl.arange(0, CHUNK)
        used = live & (d < V_DIM)[None, :]
        if V_BITS == 4:
            v_at = codes + V_CODES + d[None, :] * (BLOCK // 2) + (each % (BLOCK // 2))[:, None]
            steps = (tl.load(v_at, mask=used, other=0).to(tl.int32) >> (each // (BLOCK // 2) * 4)[:, None]) & 15
            least = tl.load(scales + V_SCALES // 2 + BLOCK + each).to(tl.float32)[:, None]
            values = steps.to(tl.float32) * v_scale + least
        else:
            v_at = codes + V_CODES + d[None, :] * (BLOCK // 4) + (each % (BLOCK // 4))[:, None]
            steps = (tl.load(v_at, mask=used, other=0).to(tl.int32) >> (each // (BLOCK // 4) * 2)[:, None]) & 3
            if V_BITS == 3:
                v_at = codes + V_HIGH + d[None, :] * (BLOCK // 8) + (each % (BLOCK // 8))[:, None]
                steps += ((tl.load(v_at, mask=used, other=0).to(tl.int32) >> (each // (BLOCK // 8))[:, None]) & 1) * 4
                values = (steps.to(tl.float32) - 3.5) * v_scale
            else:
                values = (steps.to(tl.float32) - 1.5) * v_scale
        values = tl.where(used, values, 0.0)
        turn = tl.load(rotation_back + d[:, None] * V_PAD + dv[None, :])
        turned = tl.dot(values, turn, turned, input_precision="ieee")
    v_live = live & (dv < V_DIM)[None, :]
    tl.store(v + row[:, None] * V_DIM + dv[None, :], turned.to(v.dtype.element_ty), mask=v_live)
