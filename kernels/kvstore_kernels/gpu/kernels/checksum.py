"""The 64-bit checksum of blocks: kvstore_kernels.checksum has the definition."""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    # uint64; the constants are written as such, a Python int over 2**63 has no signed form.
    x = x * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def checksum_kernel(words, slots, sums, slot_words, count, ROWS: tl.constexpr):
    """Grid [blocks, tiles]: a program adds ROWS lines of 512 words of one block to its sum. All int64 bits."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    column = tl.arange(0, 512).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
    low = _mixed((column * 2 + 1).to(tl.uint64)) | tl.full([], 1, tl.uint64)
    high = _mixed((column * 2 + 2).to(tl.uint64)) | tl.full([], 1, tl.uint64)
    at = row[:, None] * 512 + column[None, :]
    first = tl.load(slots + block) * slot_words
    word = tl.load(words + first + at, mask=at < count, other=0).to(tl.uint64, bitcast=True)
    line = tl.sum(word * low[None, :] + (word >> 32) * high[None, :], axis=1)
    mixed = _mixed(line + _mixed((row + 4294967296).to(tl.uint64)))
    mixed = tl.where(row * 512 < count, mixed, tl.zeros_like(mixed))
    tl.atomic_add(sums + block, tl.sum(mixed, axis=0).to(tl.int64, bitcast=True))


@triton.jit
def finish_kernel(sums, blocks, count, TILE: tl.constexpr):
    """Grid [blocks / TILE]: the last mix, in place."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.load(sums + block, mask=block < blocks, other=0).to(tl.uint64, bitcast=True)
    mixed = _mixed(total + (tl.zeros([TILE], tl.int64) + count * 8).to(tl.uint64))
    tl.store(sums + block, mixed.to(tl.int64, bitcast=True), mask=block < blocks)
