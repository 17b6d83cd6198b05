"""The CUDA kernels against the CPU functions, over poisoned memory.

On a GPU (`-m gpu`) through the public functions; under TRITON_INTERPRET=1, which test_interpreted.py sets in a process
of its own, the same cases on CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from kvstore_kernels.attention import decode_attention, decode_reference, prefill_attention, prefill_reference
from kvstore_kernels.attention.options import Options
from kvstore_kernels.device_checksum import block_checksums, launch_checksums
from kvstore_kernels.errors import LayoutError, TableError, UnsupportedAttentionError
from kvstore_kernels.gpu import check_supported, device_step
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda:0") if CUDA else torch.device("cpu")
CODECS = ["int8", "passthrough"]
# Triton's interpreter multiplies bfloat16 as if it were integers.
DTYPES = ["float32", "float16", "bfloat16"] if CUDA else ["float32", "float16"]
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-3 if CUDA else 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "window": {"sliding_window": 70},
    "window of one": {"sliding_window": 1},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "sliding_window": 33, "sinks": True},
}

pytestmark = [
    pytest.mark.gpu,
    # Numpy, which the interpreter computes with, warns where a GPU doesn't.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"),
]
only_cuda = pytest.mark.skipif(not CUDA, reason="too large for the interpreter, or about CUDA itself")


class Twins(NamedTuple):
    """One table on the CPU and one like it on the device, over poisoned slabs of their own."""

    codec: Any
    host: BlockTable
    there: BlockTable
    slabs: tuple[Slab, Slab]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Any) -> None:
        self.codec.write(layer, k, v, self.host, targets)
        write(self.codec, self.there, layer, k.to(DEVICE), v.to(DEVICE), targets)

    def set_tokens(self, tokens: list[int]) -> None:
        for row, count in enumerate(tokens):
            self.host.set_tokens(row, count)
            self.there.set_tokens(row, count)

    def assert_same_bytes(self) -> None:
        ours, theirs = self.slabs[0].data, self.slabs[1].data.cpu()
        assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} bytes differ"

    def decode(self, query: torch.Tensor, layer: int, **options: Any) -> torch.Tensor:
        out = attend(self.codec, self.there, query.to(DEVICE), layer, **options)
        expected = decode_reference(query, self.codec, layer, self.host, scaling=0.17, **options)
        return close(out, expected, query.dtype)


def write(codec: Any, table: BlockTable, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Any) -> None:
    if CUDA:
        codec.write(layer, k, v, table, targets)
    else:
        device_step(codec, table, DEVICE).append(table, layer, k, v, targets)


def attend(codec: Any, table: BlockTable, query: torch.Tensor, layer: int, **options: Any) -> torch.Tensor:
    sinks = options.get("sinks")
    if sinks is not None:
        options["sinks"] = sinks.to(DEVICE)
    if CUDA:
        return decode_attention(query, codec, layer, table, scaling=0.17, **options)
    named = [options.get(name) for name in ("softcap", "sliding_window", "sinks")]
    return device_step(codec, table, DEVICE).attend(table, query, layer, 0.17, *named)


def prefill(
    codec: Any, table: BlockTable, q: Any, k: Any, v: Any, begins: Any, pasts: Any, layer: int = 1, **options: Any
) -> torch.Tensor:
    q, k, v = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(DEVICE)
    if CUDA:
        return prefill_attention(q, k, v, codec, layer, table, starts=begins, history=pasts, scaling=0.17, **options)
    named = [options.get(name) for name in ("softcap", "sliding_window", "sinks")]
    checked = Options.checked(q, codec.layout, 0.17, *named)
    return device_step(codec, table, DEVICE).prefill(table, q, k, v, layer, checked, begins, pasts)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert out.shape == expected.shape
    assert out.dtype == dtype
    assert out.is_contiguous()
    found = out.float().cpu()
    assert torch.isfinite(found).all()
    error = (found - expected).norm() / (expected.norm() + 1e-30)
    assert error <= LIMITS[str(dtype).removeprefix("torch.")], float(error)
    return found


def twins(bench: Any, capacities: list[int], order: str = "scattered") -> Twins:
    size = bench.layout.block_tokens
    blocks = [-(-tokens // size) for tokens in capacities]
    slabs = (
        bench.slab(2 * sum(blocks) + 3),
        Slab.allocate(bench.layout.block_bytes, 2 * sum(blocks) + 3, device=DEVICE),
    )
    slabs[1].data.copy_(slabs[0].data)
    tables = (BlockTable(len(blocks)), BlockTable(len(blocks)))
    for table, slab in zip(tables, slabs, strict=True):
        free = list(range(slab.slots))
        if order == "scattered":
            free = free[::2][::-1] + free[1::2]
        for row, count in enumerate(blocks):
            for _ in range(count):
                table.append_block(row, slab, free.pop(0))
    return Twins(bench.codec, *tables, slabs)


def filled(bench: Any, k: torch.Tensor, v: torch.Tensor, skips: list[int]) -> Twins:
    lengths = [k.shape[2] - skip for skip in skips]
    pair = twins(bench, lengths)
    for layer in range(bench.layout.layers):
        pair.write(layer, k, v, [(skip, 0) for skip in skips])
    pair.set_tokens(lengths)
    return pair


def numbers(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(getattr(torch, dtype))


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return options | {"sinks": torch.randn(heads)} if options.get("sinks") else dict(options)


# -- append ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("dtype", "dims"), [(dtype, (80, 96) if dtype == "float32" else (64, 64)) for dtype in DTYPES])
@pytest.mark.parametrize("length", [1, 5, 100])
def test_codes_are_the_cpu_codecs(make, codec: str, dtype: str, dims: tuple[int, int], length: int) -> None:
    """Any start inside a block, padding, a row that stores nothing, strides of a transposed projection."""
    bench = make(codec, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    pair = twins(bench, [200, 200, 200])
    k = (numbers(dtype, 3, length, 2, dims[0]) * 2 + 1).transpose(1, 2)
    v = numbers(dtype, 3, 2, dims[1], length).transpose(2, 3)
    for layer in range(2):
        pair.write(layer, k, v, [(0, 61), (length // 2, 3), (length, 0)])
    pair.assert_same_bytes()


@pytest.mark.parametrize("dims", [(128, 128), (256, 192)])
def test_codes_of_wide_heads(make, dims: tuple[int, int]) -> None:
    bench = make("int8", k_dim=dims[0], v_dim=dims[1], layers=1, kv_heads=1)
    pair = twins(bench, [129])
    pair.write(0, torch.randn(1, 1, 129, dims[0]), torch.randn(1, 1, 129, dims[1]) * 1e-3, [(0, 0)])
    pair.assert_same_bytes()


def test_numbers_that_are_not_finite_are_counted_and_harmless(make) -> None:
    bench = make("int8")
    pair = twins(bench, [64])
    k, v = torch.randn(1, 2, 7, 64), torch.randn(1, 2, 7, 64)
    k[0, 0, 1, 3], k[0, 1, 2, 5], v[0, 0, 3, 1] = float("nan"), float("inf"), float("-inf")
    k[0, 0, 4, 9], v[0, 1, 5, 2], v[0, 0, 6] = 3e38, -3e38, 0.0
    v[0, 1, 6] = 1e-9
    before = bench.codec.nonfinite_by_layer
    pair.write(1, k, v, [(0, 0)])
    pair.assert_same_bytes()
    # Counted once by each of the two.
    assert [b - a for a, b in zip(before, bench.codec.nonfinite_by_layer, strict=True)] == [0, 6]


def test_what_write_refuses(make) -> None:
    bench = make("int8")
    pair = twins(bench, [64])
    k = torch.randn(1, 2, 3, 64, device=DEVICE)
    for targets, error in (([(0, 62)], TableError), ([(-1, 0)], TableError), ([], LayoutError)):
        with pytest.raises(error):
            write(bench.codec, pair.there, 0, k, k, targets)
    with pytest.raises(LayoutError):
        write(bench.codec, pair.there, 0, k[..., :32], k, [(0, 0)])
    with pytest.raises(LayoutError):
        write(bench.codec, pair.there, 2, k, k, [(0, 0)])


# -- decode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 63, 100, 129, 300])
def test_decode(make, codec: str, dtype: str, tokens: int) -> None:
    bench = make(codec, kv_heads=2, dtype=dtype)
    pair = filled(bench, numbers(dtype, 1, 2, tokens, 64) + 1, numbers(dtype, 1, 2, tokens, 64), [0])
    pair.decode(numbers(dtype, 1, 6, 1, 64), 1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_head_dims(make, codec: str, dims: tuple[int, int]) -> None:
    for dtype in [DTYPES[-1], *(["float32"] if dims[0] == 128 else [])]:
        bench = make(codec, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
        k, v = numbers(dtype, 2, 2, 131, dims[0]), numbers(dtype, 2, 2, 131, dims[1])
        pair = filled(bench, k, v, [0, 100])
        pair.decode(numbers(dtype, 2, 4, 1, dims[0]), 1)
        pair.decode(numbers(dtype, 2, 4, 3, dims[0]), 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [1, 5])
def test_options(make, codec: str, options: dict[str, Any], length: int) -> None:
    """Rows of different lengths, one of them shorter than L: its queries in the padding give zeros."""
    for dtype in ("float32", "float16") if len(options) == 3 else (DTYPES[-1],):
        bench = make(codec, dtype=dtype)
        k, v = numbers(dtype, 3, 2, 200, 64) + 1, numbers(dtype, 3, 2, 200, 64)
        pair = filled(bench, k, v, [0, 71, 198])
        out = pair.decode(numbers(dtype, 3, 6, length, 64), 1, **with_sinks(options, 6))
        assert bool((out[2, : max(0, length - 2)] == 0).all())


@pytest.mark.parametrize(("heads", "length"), [(3, 32), (24, 1), (24, 7), (51, 3)])
def test_many_queries_a_head(make, heads: int, length: int) -> None:
    bench = make("int8", kv_heads=3, dtype="float16", layers=1)
    pair = filled(bench, numbers("float16", 2, 3, 100, 64), numbers("float16", 2, 3, 100, 64), [0, 45])
    pair.decode(numbers("float16", 2, heads, length, 64), 0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_at_a_time(make, codec: str) -> None:
    """Device state follows counts, growth, crops and replaced blocks."""
    bench = make(codec, dtype="float16")
    pair = twins(bench, [64, 64])
    slabs = (bench.slab(8), Slab.allocate(bench.layout.block_bytes, 8, device=DEVICE))
    k, v = numbers("float16", 2, 2, 70, 64), numbers("float16", 2, 2, 70, 64)
    for layer in range(2):
        pair.write(layer, k[:, :, :62], v[:, :, :62], [(0, 0)] * 2)
    for token in range(62, 70):
        if token == 64:
            for table, slab in zip((pair.host, pair.there), slabs, strict=True):
                for row in range(2):
                    table.append_block(row, slab, row)
        pair.set_tokens([token + 1] * 2)
        targets = [(0, token)] * 2
        for layer in range(2):
            pair.write(layer, k[:, :, token : token + 1], v[:, :, token : token + 1], targets)
        pair.decode(numbers("float16", 2, 4, 1, 64), token % 2)
    pair.assert_same_bytes()
    pair.set_tokens([33, 66])
    pair.decode(numbers("float16", 2, 4, 1, 64), 0)
    for table, slab in zip((pair.host, pair.there), slabs, strict=True):
        bench.codec.copy_tokens(table.entry(1, 0), type(table.entry(1, 0))(slab, 5), 64)
        table.replace_block(1, 0, slab, 5)
    pair.decode(numbers("float16", 2, 4, 1, 64), 0)


def test_no_tokens_gives_zeros(make) -> None:
    bench = make("int8")
    pair = twins(bench, [64])
    out = attend(bench.codec, pair.there, torch.randn(1, 4, 3, 64, device=DEVICE), 0)
    assert torch.equal(out.cpu(), torch.zeros(1, 3, 4, 64))


def test_tiny_values_keep_their_precision(make) -> None:
    """Weights times V's scales lie below what float16 resolves."""
    bench = make("int8", dtype="float16")
    v = torch.randn(1, 2, 300, 64) * 1e-5
    pair = filled(bench, torch.randn(1, 2, 300, 64), v, [0])
    query = numbers("float16", 1, 4, 1, 64)
    expected = decode_reference(query.float(), bench.codec, 1, pair.host, scaling=0.17)
    # Far below what a float16 result holds: only its order of magnitude can be right.
    out = attend(bench.codec, pair.there, query.to(DEVICE), 1)
    assert (out.float().cpu() - expected).abs().max() <= 6e-8


# -- prompts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize(("begins", "pasts"), [([0, 0], [150, 100]), ([5, 0], [0, 100]), ([70, 0], [0, 1])])
def test_prompts_over_a_history(make, codec: str, options: Any, begins: list[int], pasts: list[int]) -> None:
    for dtype in ("float32", DTYPES[-1]) if CUDA else (DTYPES[-1] if begins[0] else "float32",):
        bench = make(codec, k_dim=80, v_dim=64, dtype=dtype)
        pair = filled(bench, numbers(dtype, 2, 2, 150, 80) + 1, numbers(dtype, 2, 2, 150, 64), [0, 50])
        q, k = numbers(dtype, 2, 6, 70, 80), numbers(dtype, 2, 2, 70, 80) + 1
        v, named = numbers(dtype, 2, 2, 70, 64), with_sinks(options, 6)
        expected = prefill_reference(
            q, k, v, bench.codec, 1, pair.host, starts=begins, history=pasts, scaling=0.17, **named
        )
        out = prefill(bench.codec, pair.there, q, k, v, begins, pasts, **named)
        close(out, expected, q.dtype)
        for row, begin in enumerate(begins):
            assert bool((out[row, :begin] == 0).all())


@pytest.mark.parametrize("dims", [128, 256])
def test_prompts_of_wide_heads(make, dims: int) -> None:
    dtype = DTYPES[-1]
    for codec in CODECS:
        bench = make(codec, k_dim=dims, dtype=dtype, kv_heads=1)
        pair = filled(bench, numbers(dtype, 1, 1, 100, dims), numbers(dtype, 1, 1, 100, dims), [0])
        q, k, v = numbers(dtype, 1, 2, 63, dims), numbers(dtype, 1, 1, 63, dims), numbers(dtype, 1, 1, 63, dims)
        expected = prefill_reference(q, k, v, bench.codec, 1, pair.host, history=[100], scaling=0.17)
        close(prefill(bench.codec, pair.there, q, k, v, [0], [100]), expected, q.dtype)


# -- reading back, checksums, errors --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_read(make, codec: str) -> None:
    bench = make(codec, k_dim=96, v_dim=80)
    pair = filled(bench, torch.randn(2, 2, 140, 96) + 3, torch.randn(2, 2, 140, 80), [0, 70])
    step = device_step(bench.codec, pair.there, DEVICE)
    for row, start, stop in ((0, 0, 140), (1, 3, 67), (0, 64, 65), (1, 5, 5)):
        expected = bench.codec.read(1, pair.host, row, start, stop)
        for ours, theirs in zip(
            step.read(pair.there, row, 1, start, stop - start, torch.float32), expected, strict=True
        ):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-6)


def test_checksums() -> None:
    slab = Slab.allocate(128 * 1301, 5, device=DEVICE)
    slab.data.random_(0, 256)
    host = Slab(Slab.allocate(slab.slot_bytes, 5).data.copy_(slab.data), slab.slot_bytes)
    for nbytes in (8, 4096, 4104, 65536 + 16, 128 * 1301):
        found = block_checksums(slab, [3, 0, 4], nbytes) if CUDA else launch_checksums(slab, [3, 0, 4], nbytes, 0)
        assert found == block_checksums(host, [3, 0, 4], nbytes)
    with pytest.raises(LayoutError):
        block_checksums(slab, [5], 8)


@only_cuda
def test_errors_of_a_cuda_pass(make) -> None:
    bench = make("int8")
    pair = twins(bench, [64])
    k = torch.randn(1, 2, 1, 64, device=DEVICE)
    with pytest.raises(TableError, match="register"):
        bench.codec.write(0, k, k, pair.host, [(0, 0)])
    pair.slabs[0].pinned = True
    with pytest.raises(TableError, match="take a slot there"):
        bench.codec.write(0, k, k, pair.host, [(0, 0)])
    with pytest.raises(LayoutError, match="slot_tensor"):
        pair.slabs[1].slot_buffer(0)
    with pytest.raises(UnsupportedAttentionError, match="k_dim is 512"):
        check_supported(make("int8", k_dim=512).layout, DEVICE)


# -- what only a GPU can do -----------------------------------------------------------------------------------


@only_cuda
@pytest.mark.parametrize("codec", CODECS)
def test_beyond_32_bits(make, codec: str) -> None:
    """25k tokens of 16 heads, in blocks on both sides of 4 GiB of one slab."""
    bench = make(codec, layers=1, kv_heads=16, k_dim=128, dtype="bfloat16")
    tokens, size = 25_000, bench.layout.block_tokens
    blocks = -(-tokens // size)
    slots = (5 << 30) // bench.layout.block_bytes
    slab = Slab.allocate(bench.layout.block_bytes, slots, device=DEVICE)
    slab.data.fill_(0xFF)
    table = BlockTable(1)
    for index in range(blocks):
        table.append_block(0, slab, index if index % 2 else slots - 1 - index)
    k = torch.randn(1, 16, tokens, 128, device=DEVICE).bfloat16()
    v = torch.randn(1, 16, tokens, 128, device=DEVICE).bfloat16()
    bench.codec.write(0, k, v, table, [(0, 0)])
    table.set_tokens(0, tokens)
    k_read, v_read = bench.codec.read(0, table, 0)
    assert (k_read - k[0].float()).abs().max() <= (0 if codec == "passthrough" else 0.05)
    for length in (1, 7, 100):
        query = torch.randn(1, 16, length, 128, device=DEVICE).bfloat16()
        scores = query[0].float() @ k_read.transpose(1, 2) * 0.17
        hidden = (
            torch.arange(tokens, device=DEVICE)[None] > torch.arange(tokens - length, tokens, device=DEVICE)[:, None]
        )
        expected = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v_read).transpose(0, 1)
        out = decode_attention(query, bench.codec, 0, table, scaling=0.17)[0].float()
        assert (out - expected).norm() <= 2e-3 * expected.norm()


@only_cuda
def test_two_streams_and_inference_mode(make) -> None:
    bench = make("int8", dtype="bfloat16")
    with torch.inference_mode():
        pair = filled(bench, numbers("bfloat16", 1, 2, 100, 64), numbers("bfloat16", 1, 2, 100, 64), [0])
        first = pair.decode(numbers("bfloat16", 1, 4, 1, 64), 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = pair.decode(numbers("bfloat16", 1, 4, 1, 64), 1)
    torch.cuda.current_stream().wait_stream(side)
    assert first.shape == second.shape


@only_cuda
def test_a_decode_step_does_not_wait_for_the_device(make) -> None:
    """Behind a kernel of a second, a step of all layers is given within a fraction of it."""
    bench = make("int8", dtype="bfloat16")
    pair = filled(bench, numbers("bfloat16", 2, 2, 127, 64), numbers("bfloat16", 2, 2, 127, 64), [0, 0])
    k, q = numbers("bfloat16", 2, 2, 1, 64).to(DEVICE), numbers("bfloat16", 2, 4, 1, 64).to(DEVICE)
    for token in (124, 125, 126):
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(1_500_000_000)
        targets = [(0, token)] * 2
        pair.set_tokens([token + 1] * 2)
        for layer in range(2):
            bench.codec.write(layer, k, k, pair.there, targets)
            decode_attention(q, bench.codec, layer, pair.there, scaling=0.17)
        done.record()
        waited = not done.query()
        torch.cuda.synchronize()
        # The first round compiles.
        assert waited or token == 124


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1, pytest.param(40, marks=only_cuda)])
def test_fetched_blocks_give_what_local_ones_give(
    make, codec: str, length: int, copies_now: type, monkeypatch: Any
) -> None:
    """History in pinned host memory, in runs and scattered, and the last block on the device; several steps."""
    dtype, layers = DTYPES[-1], 5 if CUDA else 2
    bench = make(codec, layers=layers, dtype=dtype)
    pair = filled(bench, numbers(dtype, 2, 2, 300, 64), numbers(dtype, 2, 2, 300, 64), [0, 100])
    away = Slab.allocate(bench.layout.block_bytes, pair.slabs[1].slots, pinned=CUDA)
    away.data.copy_(pair.slabs[1].data)
    if not CUDA:
        # Any device but the one that computes.
        monkeypatch.setattr("kvstore_kernels.gpu.tablestep.CudaCopies", copies_now)
        away.device = torch.device("cuda:7")
    mixed = BlockTable(2)
    for row in range(2):
        entries = pair.there.blocks(row)
        for index, entry in enumerate(entries):
            mixed.append_block(row, away if index < len(entries) - 1 else entry.slab, entry.slot)
        mixed.set_tokens(row, pair.there.tokens(row))

    def same(layer: int) -> None:
        q, k = numbers(dtype, 2, 4, length, 64), numbers(dtype, 2, 2, length, 64)
        if length == 1:
            ours, theirs = (attend(bench.codec, table, q.to(DEVICE), layer) for table in (mixed, pair.there))
        else:
            ours, theirs = (
                prefill(bench.codec, table, q, k, k, [0, 0], [300, 200], layer=layer) for table in (mixed, pair.there)
            )
        assert torch.equal(ours, theirs)

    for _ in range(3 if CUDA else 1):
        for layer in range(layers):
            same(layer)
    # One more token, into the local block; then the table changes.
    for table in (mixed, pair.there):
        table.set_tokens(0, 301)
    k = numbers(dtype, 2, 2, 1, 64).to(DEVICE)
    for layer in range(layers):
        write(bench.codec, mixed, layer, k, k, [(0, 300), (0, 200)])
        same(layer)
    entry = pair.there.entry(0, 0)
    mixed.replace_block(0, 0, entry.slab, entry.slot)
    same(1)


@only_cuda
def test_copies_between_host_and_device(make) -> None:
    bench = make("int8")
    pair = filled(bench, torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64), [0])
    host, there = bench.slab(1), Slab.allocate(bench.layout.block_bytes, 1, device=DEVICE)
    entry = pair.host.entry(0, 0)
    bench.codec.copy_tokens(entry, type(entry)(there, 0), 64)
    bench.codec.copy_tokens(pair.there.entry(0, 0), type(entry)(host, 0), 64)
    for name, view in host.block_views(bench.layout).items():
        assert torch.equal(view[0], entry.slab.block_views(bench.layout)[name][entry.slot])
        assert torch.equal(there.block_views(bench.layout)[name][0].cpu(), view[0])
