"""What the kernels share: where a block lies, codes as float16, and the end of a softmax."""

import triton
import triton.language as tl


@triton.jit
def block_offset(table, index, anchor, layer_offset, head_offset, FETCHED: tl.constexpr):
    """Bytes from `anchor` to a block's (layer, head): a multiple of 128, beyond 2**32 too.

    A fetched block (lowest bit of its address set) is one layer alone.
    """
    address = tl.load(table + index)
    if FETCHED:
        fetched = address & 1
        address = address - fetched + layer_offset * (1 - fetched)
    else:
        address = address + layer_offset
    return tl.multiple_of(address + head_offset - anchor.to(tl.int64), 128)


@triton.jit
def as_half(codes, FAST: tl.constexpr):
    """int8 codes as float16, exactly. FAST: four at once; 0x64 over a byte u is 1024 + u in float16."""
    if FAST:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 biased, minus;
            xor.b32 biased, $2, 0x80808080;
            mov.b32 minus, 0xE480E480;
            prmt.b32 $0, biased, 0x64646464, 0x4140;
            prmt.b32 $1, biased, 0x64646464, 0x4342;
            add.rn.f16x2 $0, $0, minus;
            add.rn.f16x2 $1, $1, minus;
            }
            """,
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return codes.to(tl.float16)


@triton.jit
def capped(scores, cap):
    """Cap * tanh(scores / cap), without overflow."""
    power = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634) / cap)
    bent = cap * (1.0 - power) / (1.0 + power)
    return tl.where(scores < 0, -bent, bent)


@triton.jit
def merged(partials, stats, stats_half, first, stride, splits, sink, V_DIM: tl.constexpr, V_PAD: tl.constexpr):
    """One query's attention from its splits: float32 [V_PAD]. Its partial of split s is number first + s * stride."""
    d = tl.arange(0, V_PAD)
    each = tl.arange(0, 16)
    top = tl.zeros([], tl.float32) + sink
    # A sink takes weight and gives no value; where there is none, `sink` is so low that its weight is 0.
    total = tl.where(top > -1e29, 1.0, 0.0)
    out = tl.zeros([V_PAD], tl.float32)
    for begin in range(0, splits, 16):
        split = begin + each
        live = split < splits
        number = first + split.to(tl.int64) * stride
        tops = tl.load(stats + number, mask=live, other=-1e30, cache_modifier=".cg")
        sums = tl.load(stats + stats_half + number, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partials + number[:, None] * V_DIM + d[None, :],
            mask=live[:, None] & (d < V_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(tops, axis=0))
        weight = tl.exp2(tops - higher)
        shrink = tl.exp2(top - higher)
        out = out * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(sums * weight, axis=0)
        top = higher
    return out / tl.where(total > 0, total, 1.0)
