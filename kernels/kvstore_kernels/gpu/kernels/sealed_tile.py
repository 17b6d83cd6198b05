"""Sealed blocks as operands of a matrix instruction: each packed byte is loaded once and gives two or four numbers.

A byte holds codes of tokens half a block (4 bits) or a quarter (2 bits) apart, so a block comes in two or four parts of
neighbouring tokens, keys and values in the same parts. 0x64 over a byte u is 1024 + u in float16; a fused multiply-add
then gives the number exactly, whichever bits of the byte hold the code.
"""

import triton
import triton.language as tl

from kvstore_kernels.gpu.kernels.common import as_half

# Keys of 4 bits come divided by this: scale and lowest value may be as large as float16 holds, and their sum larger.
KEY_UNIT = tl.constexpr(4.0)


@triton.jit
def _nibble_keys(codes, scale, low, PRECISE: tl.constexpr, FAST: tl.constexpr):
    """uint8 [T, D] -> keys of the low and of the high nibbles, code * scale + low [1, D], divided by KEY_UNIT."""
    if FAST and not PRECISE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, quarter, minus;
            and.b32 low, $4, 0x0F0F0F0F;
            and.b32 high, $4, 0xF0F0F0F0;
            prmt.b32 $0, low, 0x64646464, 0x4140;
            prmt.b32 $1, low, 0x64646464, 0x4342;
            prmt.b32 $2, high, 0x64646464, 0x4140;
            prmt.b32 $3, high, 0x64646464, 0x4342;
            mov.b32 quarter, 0x34003400;
            mov.b32 minus, 0xDC00DC00;
            fma.rn.f16x2 $0, $0, quarter, minus;
            fma.rn.f16x2 $1, $1, quarter, minus;
            mov.b32 quarter, 0x24002400;
            mov.b32 minus, 0xCC00CC00;
            fma.rn.f16x2 $2, $2, quarter, minus;
            fma.rn.f16x2 $3, $3, quarter, minus;
            mov.b32 quarter, 0x34003400;
            mul.rn.f16x2 low, $7, quarter;
            mul.rn.f16x2 high, $8, quarter;
            fma.rn.f16x2 $0, $0, $5, low;
            fma.rn.f16x2 $1, $1, $6, high;
            fma.rn.f16x2 $2, $2, $5, low;
            fma.rn.f16x2 $3, $3, $6, high;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, scale, low],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    kind: tl.constexpr = tl.float32 if PRECISE else tl.float16
    steps, least = scale.to(tl.float32) / KEY_UNIT, low.to(tl.float32) / KEY_UNIT
    first = (codes & 15).to(tl.float32) * steps + least
    second = (codes >> 4).to(tl.float32) * steps + least
    return first.to(kind), second.to(kind)


@triton.jit
def _nibbles(codes, PRECISE: tl.constexpr, FAST: tl.constexpr):
    """uint8 -> code - 8 of the low and of the high nibbles."""
    if FAST and not PRECISE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, part, minus;
            and.b32 low, $4, 0x0F0F0F0F;
            and.b32 high, $4, 0xF0F0F0F0;
            prmt.b32 $0, low, 0x64646464, 0x4140;
            prmt.b32 $1, low, 0x64646464, 0x4342;
            prmt.b32 $2, high, 0x64646464, 0x4140;
            prmt.b32 $3, high, 0x64646464, 0x4342;
            mov.b32 minus, 0xE408E408;
            add.rn.f16x2 $0, $0, minus;
            add.rn.f16x2 $1, $1, minus;
            mov.b32 part, 0x2C002C00;
            mov.b32 minus, 0xD480D480;
            fma.rn.f16x2 $2, $2, part, minus;
            fma.rn.f16x2 $3, $3, part, minus;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    kind: tl.constexpr = tl.float32 if PRECISE else tl.float16
    return ((codes & 15).to(tl.float32) - 8).to(kind), ((codes >> 4).to(tl.float32) - 8).to(kind)


@triton.jit
def _pairs(codes, PRECISE: tl.constexpr, FAST: tl.constexpr):
    """uint8 -> code - 1.5 of each of its four codes of 2 bits."""
    if FAST and not PRECISE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bits, part, minus;
            shl.b32 bits, $8, 2;
            and.b32 bits, bits, 0x0C0C0C0C;
            prmt.b32 $0, bits, 0x64646464, 0x4140;
            prmt.b32 $1, bits, 0x64646464, 0x4342;
            and.b32 bits, $8, 0x0C0C0C0C;
            prmt.b32 $2, bits, 0x64646464, 0x4140;
            prmt.b32 $3, bits, 0x64646464, 0x4342;
            and.b32 bits, $8, 0x30303030;
            prmt.b32 $4, bits, 0x64646464, 0x4140;
            prmt.b32 $5, bits, 0x64646464, 0x4342;
            and.b32 bits, $8, 0xC0C0C0C0;
            prmt.b32 $6, bits, 0x64646464, 0x4140;
            prmt.b32 $7, bits, 0x64646464, 0x4342;
            mov.b32 part, 0x34003400;
            mov.b32 minus, 0xDC06DC06;
            fma.rn.f16x2 $0, $0, part, minus;
            fma.rn.f16x2 $1, $1, part, minus;
            fma.rn.f16x2 $2, $2, part, minus;
            fma.rn.f16x2 $3, $3, part, minus;
            mov.b32 part, 0x2C002C00;
            mov.b32 minus, 0xD418D418;
            fma.rn.f16x2 $4, $4, part, minus;
            fma.rn.f16x2 $5, $5, part, minus;
            mov.b32 part, 0x24002400;
            mov.b32 minus, 0xCC60CC60;
            fma.rn.f16x2 $6, $6, part, minus;
            fma.rn.f16x2 $7, $7, part, minus;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    kind: tl.constexpr = tl.float32 if PRECISE else tl.float16
    first, second = ((codes & 3).to(tl.float32) - 1.5).to(kind), (((codes >> 2) & 3).to(tl.float32) - 1.5).to(kind)
    third, fourth = (((codes >> 4) & 3).to(tl.float32) - 1.5).to(kind), ((codes >> 6).to(tl.float32) - 1.5).to(kind)
    return first, second, third, fourth


@triton.jit
def _triples(codes, high, odd, PRECISE: tl.constexpr, FAST: tl.constexpr):
    """uint8 with four times 2 bits, uint8 with the third bit of each in bits 0, 2, 4, 6 (in 1, 3, 5, 7 where `odd`) ->
    code - 3.5 of each of the four.
    """
    if FAST and not PRECISE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 evens, odds, top, bits, part, minus;
            shr.b32 top, $9, $10;
            shl.b32 bits, top, 2;
            and.b32 bits, bits, 0x44444444;
            and.b32 evens, $8, 0x33333333;
            or.b32 evens, evens, bits;
            shr.b32 odds, $8, 2;
            and.b32 odds, odds, 0x33333333;
            and.b32 top, top, 0x44444444;
            or.b32 odds, odds, top;
            shl.b32 bits, evens, 1;
            and.b32 bits, bits, 0x0E0E0E0E;
            prmt.b32 $0, bits, 0x64646464, 0x4140;
            prmt.b32 $1, bits, 0x64646464, 0x4342;
            shl.b32 bits, odds, 1;
            and.b32 bits, bits, 0x0E0E0E0E;
            prmt.b32 $2, bits, 0x64646464, 0x4140;
            prmt.b32 $3, bits, 0x64646464, 0x4342;
            and.b32 bits, evens, 0x70707070;
            prmt.b32 $4, bits, 0x64646464, 0x4140;
            prmt.b32 $5, bits, 0x64646464, 0x4342;
            and.b32 bits, odds, 0x70707070;
            prmt.b32 $6, bits, 0x64646464, 0x4140;
            prmt.b32 $7, bits, 0x64646464, 0x4342;
            mov.b32 part, 0x38003800;
            mov.b32 minus, 0xE007E007;
            fma.rn.f16x2 $0, $0, part, minus;
            fma.rn.f16x2 $1, $1, part, minus;
            fma.rn.f16x2 $2, $2, part, minus;
            fma.rn.f16x2 $3, $3, part, minus;
            mov.b32 part, 0x2C002C00;
            mov.b32 minus, 0xD438D438;
            fma.rn.f16x2 $4, $4, part, minus;
            fma.rn.f16x2 $5, $5, part, minus;
            fma.rn.f16x2 $6, $6, part, minus;
            fma.rn.f16x2 $7, $7, part, minus;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [codes, high, odd],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    kind: tl.constexpr = tl.float32 if PRECISE else tl.float16
    top = high >> odd.to(tl.uint8)
    first = ((codes & 3) | ((top << 2) & 4)).to(tl.float32) - 3.5
    second = (((codes >> 2) & 3) | (top & 4)).to(tl.float32) - 3.5
    third = (((codes >> 4) & 3) | ((top >> 2) & 4)).to(tl.float32) - 3.5
    fourth = ((codes >> 6) | ((top >> 4) & 4)).to(tl.float32) - 3.5
    return first.to(kind), second.to(kind), third.to(kind), fourth.to(kind)


@triton.jit
def tokens_of(T: tl.constexpr, BLOCK: tl.constexpr, V_BITS: tl.constexpr):
    """Which token of a block each of a tile's first T rows is: such that all codes of a byte belong to one thread.

    With V of 3 and 2 bits, runs of 4 tokens of the first and second quarter take turns, so do those of the others.
    """
    row = tl.arange(0, T)
    if V_BITS < 4:
        half = row % (BLOCK // 2)
        row = row - half + (half // 4) % 2 * (BLOCK // 4) + half // 8 * 4 + half % 4
        row = tl.max_contiguous(tl.multiple_of(row, 4), 4)
    return row


@triton.jit
def _key_bytes(
    at, T: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr, V_BITS: tl.constexpr
):
    """uint8 [T, K_PAD]: the first T rows of K codes that begin at `at`."""
    d = tl.arange(0, K_PAD)
    rows = at + tokens_of(T, BLOCK, V_BITS)[:, None] * K_DIM + d[None, :]
    if K_PAD == K_DIM:
        return tl.load(rows).to(tl.uint8, bitcast=True)
    return tl.load(rows, mask=(d < K_DIM)[None, :], other=0).to(tl.uint8, bitcast=True)


@triton.jit
def _rows(first, second):
    """[T, D] and [T, D] -> [2 T, D], register for register: no data moves."""
    both = tl.permute(tl.join(first, second), (2, 0, 1))
    return tl.reshape(both, (2 * first.shape[0], first.shape[1]))


@triton.jit
def _columns(first, second, RUN: tl.constexpr):
    """[D, T] and [D, T] -> [D, 2 T], runs of RUN columns in turns."""
    both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1] // RUN, RUN, 2))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def key_tile(
    at, scales, K_DIM: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, PRECISE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A block's keys [BLOCK, K_PAD], in the order of `tokens_of`, from K codes at `at`: float16, or float32 (PRECISE).

    Of 4 bits: with their channel's scale and lowest value at `scales`, over KEY_UNIT. Of 8 bits: codes alone.
    """
    if K_BITS == 8:
        codes = _key_bytes(at, BLOCK, K_DIM, K_PAD, BLOCK, V_BITS).to(tl.int8, bitcast=True)
        if PRECISE:
            keys = codes.to(tl.float32)
        else:
            keys = as_half(codes, FAST)
    else:
        d = tl.arange(0, K_PAD)
        if K_PAD == K_DIM:
            scale = tl.load(scales + d)
            low = tl.load(scales + K_DIM + d)
        else:
            scale = tl.load(scales + d, mask=d < K_DIM, other=0.0)
            low = tl.load(scales + K_DIM + d, mask=d < K_DIM, other=0.0)
        codes = _key_bytes(at, BLOCK // 2, K_DIM, K_PAD, BLOCK, V_BITS)
        first, second = _nibble_keys(codes, scale[None, :], low[None, :], PRECISE, FAST)
        keys = _rows(first, second)
    return keys


@triton.jit
def _value_bytes(at, V_DIM: tl.constexpr, V_PAD: tl.constexpr, T: tl.constexpr, PERIOD: tl.constexpr):
    """uint8 [V_PAD, T]: channels of PERIOD bytes that begin at `at`; bytes come again after PERIOD."""
    d = tl.arange(0, V_PAD)
    each = tl.arange(0, T)
    if T > PERIOD:
        each = each % PERIOD
    channels = at + d[:, None] * PERIOD + each[None, :]
    if V_PAD == V_DIM:
        return tl.load(channels).to(tl.uint8, bitcast=True)
    return tl.load(channels, mask=(d < V_DIM)[:, None], other=0).to(tl.uint8, bitcast=True)


@triton.jit
def value_tile(
    at, high_at, odds, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, V_BITS: tl.constexpr,
    PRECISE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A block's V codes at `at` (their third bits at `high_at`) as [V_PAD, BLOCK], in the order of `tokens_of`.

    They are to be multiplied by their token's scale: of 4 bits code - 8, else code - (half of the codes - 0.5). `odds`
    int32 [BLOCK // 4]: 1 where a byte's codes have their third bits in the odd ones.
    """
    if V_BITS == 4:
        first, second = _nibbles(_value_bytes(at, V_DIM, V_PAD, BLOCK // 2, BLOCK // 2), PRECISE, FAST)
    else:
        codes = _value_bytes(at, V_DIM, V_PAD, BLOCK // 4, BLOCK // 4)
        if V_BITS == 2:
            part0, part1, part2, part3 = _pairs(codes, PRECISE, FAST)
        else:
            high = _value_bytes(high_at, V_DIM, V_PAD, BLOCK // 4, BLOCK // 8)
            # Loaded: what is computed from a range would not take the layout of the codes.
            odd = tl.load(odds + tl.arange(0, BLOCK // 4))[None, :]
            part0, part1, part2, part3 = _triples(codes, high, odd, PRECISE, FAST)
        first, second = _columns(part0, part1, 4), _columns(part2, part3, 4)
    return _columns(first, second, BLOCK // 2)
