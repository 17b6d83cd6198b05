"""What the sealed codecs' CUDA kernels write and read back, against the CPU codec, over poisoned memory.

On a GPU (`-m gpu`), and on CPU tensors under TRITON_INTERPRET=1, which test_interpreted.py sets in an own process.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from kvstore_kernels.attention import decode_attention, decode_reference, prefill_attention
from kvstore_kernels.codecs import make_codec
from kvstore_kernels.codecs.packing import unpack
from kvstore_kernels.codecs.sealed import SealedCodec
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.gpu import device_step, sealed_step
from kvstore_kernels.layout import SEALED_BITS
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda:0") if CUDA else torch.device("cpu")
CODECS = list(SEALED_BITS)
pytestmark = [
    pytest.mark.gpu,
    # Numpy, which the interpreter computes with, warns where a GPU doesn't.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"),
]
only_cuda = pytest.mark.skipif(not CUDA, reason="about CUDA itself, or too slow in the interpreter")


class Twins(NamedTuple):
    """One table on the CPU and one like it on the device, over poisoned slabs and with a codec of their own."""

    codec: Any
    there_codec: Any
    host: BlockTable
    there: BlockTable
    slabs: tuple[Slab, Slab]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Any) -> None:
        self.codec.write(layer, k, v, self.host, targets)
        k, v = k.to(DEVICE), v.to(DEVICE)
        if CUDA:
            self.there_codec.write(layer, k, v, self.there, targets)
        else:
            sealed_step(self.there_codec, self.there, DEVICE).append(self.there, layer, k, v, targets)

    def set_tokens(self, tokens: list[int]) -> None:
        for row, count in enumerate(tokens):
            self.host.set_tokens(row, count)
            self.there.set_tokens(row, count)

    def decoded(self, layer: int, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of sealed blocks, read back by the device's kernel."""
        layout = self.codec.layout
        k = torch.full((layout.kv_heads, stop - start, layout.k_dim), torch.nan, device=DEVICE)
        v = torch.full((layout.kv_heads, stop - start, layout.v_dim), torch.nan, device=DEVICE)
        sealed_step(self.there_codec, self.there, DEVICE).decoded(self.there, row, layer, start, stop, k, v)
        return k.cpu(), v.cpu()

    def assert_same_blocks(self, row: int, blocks: int) -> None:
        """K bit for bit; V is rotated by sums of another order: few codes differ, by one, and scales in a last bit."""
        layout = self.codec.layout
        for index in range(blocks):
            ours, theirs = (
                [{name: part[table.entry(row, index).slot].cpu() for name, part in views.items()} for views in layers]
                for table, layers in (
                    (self.host, self.slabs[0].views(layout)),
                    (self.there, self.slabs[1].views(layout)),
                )
            )
            for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                for name in ("k_codes", "k_scales"):
                    assert torch.equal(mine[name], other[name]), (row, index, layer, name)
                scales = [part["v_scales"].float() for part in (mine, other)]
                assert ((scales[0] - scales[1]).abs() <= 1e-3 * scales[0].abs() + 1e-6).all()
                differ = values(mine, self.codec.v_bits) - values(other, self.codec.v_bits)
                assert differ.abs().max() <= 1
                assert (differ != 0).float().mean() < 0.005

    def assert_same_tails(self, layer: int) -> None:
        mine, other = self.host.tail, self.there.tail
        assert mine is not None
        assert other is not None
        assert mine.end[layer] == other.end[layer]
        for row in range(self.host.rows):
            base, end = max(mine.base[layer][row], other.base[layer][row]), mine.end[layer][row]
            for ours, theirs in ((mine.k[layer], other.k[layer]), (mine.v[layer], other.v[layer])):
                assert ours is not None
                assert theirs is not None
                first, last = (base - tail.base[layer][row] for tail in (mine, other))
                a, b = ours[row, :, first : first + end - base], theirs[row, :, last : last + end - base].cpu()
                torch.testing.assert_close(b.float(), a.float(), rtol=2e-2, atol=2e-2)
                assert torch.isfinite(b).all()


def values(parts: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    if bits == 4:
        return unpack(parts["v_codes"], 4, 2).int()
    codes = unpack(parts["v_codes"], 2, 2).int()
    return codes if bits == 2 else codes + 4 * unpack(parts["v_high"], 1, 2).int()


def twins(bench: Any, capacities: list[int]) -> Twins:
    size = bench.layout.block_tokens
    blocks = [-(-tokens // size) for tokens in capacities]
    slots = 2 * sum(blocks) + 3
    slabs = (bench.slab(slots), Slab.allocate(bench.layout.block_bytes, slots, device=DEVICE))
    slabs[1].data.copy_(slabs[0].data)
    tables = (BlockTable(len(blocks)), BlockTable(len(blocks)))
    for table, slab in zip(tables, slabs, strict=True):
        free = list(range(slab.slots))[::2][::-1] + list(range(slab.slots))[1::2]
        for row, count in enumerate(blocks):
            for _ in range(count):
                table.append_block(row, slab, free.pop(0))
    return Twins(bench.codec, make_codec(bench.layout, bench.codec.plan), *tables, slabs)


def numbers(dtype: str, heads: int, length: int, dim: int, rows: int = 1) -> torch.Tensor:
    # As attention gives them: heads and tokens change places.
    return (torch.randn(rows, length, heads, dim) * 2 + 0.5).to(getattr(torch, dtype)).transpose(1, 2)


DIMS = [(64, 64), (80, 96)] if INTERPRETED else [(64, 64), (80, 96), (96, 80), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("k_dim", "v_dim"), DIMS)
def test_blocks_are_the_cpu_codecs(make: Any, codec: str, k_dim: int, v_dim: int) -> None:
    dtype = "float32" if INTERPRETED or k_dim == 80 else "bfloat16"
    pair = twins(make(codec, layers=1, kv_heads=2, k_dim=k_dim, v_dim=v_dim, dtype=dtype), [200])
    start = 0
    for length in (130, 1, 20, 13):
        pair.write(0, numbers(dtype, 2, length, k_dim), numbers(dtype, 2, length, v_dim), [(0, start)])
        start += length
        pair.set_tokens([start])
        pair.assert_same_tails(0)
    pair.assert_same_blocks(0, start // 64)
    for first, last in ((0, 128), (5, 70), (63, 65)):
        for found, expected in zip(pair.decoded(0, 0, first, last), cpu_decoded(pair, 0, 0, first, last), strict=True):
            assert torch.isfinite(found).all()
            assert (found - expected).norm() <= 2e-2 * expected.norm()


def cpu_decoded(pair: Twins, layer: int, row: int, start: int, stop: int) -> list[torch.Tensor]:
    parts = []
    for block in range(start // 64, -(-stop // 64)):
        first, last = max(start, block * 64), min(stop, block * 64 + 64)
        parts.append(pair.codec._decoded(layer, pair.host, row, first, last))
    return [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("codec", "dtype"),
    # What is given is float32: a tail of another dtype must not show either.
    [("k8v4", "float32"), ("k4v3", "float32"), ("int4", "float16")]
    if INTERPRETED
    else [(codec, dtype) for codec in CODECS for dtype in ("float32", "bfloat16")],
)
def test_any_cut_gives_the_same_blocks(make: Any, codec: str, dtype: str) -> None:
    bench = make(codec, layers=1, kv_heads=1, k_dim=64, dtype=dtype)
    k, v = numbers("float32", 1, 200, 64), numbers("float32", 1, 200, 64)
    slots = []
    for cuts in ((200,), (63, 1, 64, 1, 71), (10, 33, 50, 32, 32, 32, 11), (129, 31, 32, 8)):
        pair = twins(bench, [200])
        start = 0
        for length in cuts:
            part = slice(start, start + length)
            pair.write(0, k[:, :, part], v[:, :, part], [(0, start)])
            start += length
            pair.set_tokens([start])
        pair.assert_same_tails(0)
        slots.append(torch.stack([pair.slabs[1].slot_tensor(pair.there.entry(0, block).slot) for block in range(3)]))
    assert all(torch.equal(slots[0], other) for other in slots[1:])


def test_rows_with_padding_and_different_lengths(make: Any) -> None:
    pair = twins(make("int4", layers=2, kv_heads=2, k_dim=64), [160, 100, 130])
    skips, starts = [0, 60, 129], [0, 0, 0]
    for length in (129, 5, 1, 20):
        k, v = numbers("float32", 2, length, 64, rows=3), numbers("float32", 2, length, 64, rows=3)
        targets = list(zip(skips, starts, strict=True))
        for layer in range(2):
            pair.write(layer, k, v, targets)
        starts = [start + max(0, length - skip) for skip, start in zip(skips, starts, strict=True)]
        skips = [max(0, skip - length) for skip in skips]
        pair.set_tokens(starts)
        for layer in range(2):
            pair.assert_same_tails(layer)
    for row, tokens in enumerate(starts):
        pair.assert_same_blocks(row, tokens // 64)


@pytest.mark.parametrize("again", [100, 64, 70, 10])
def test_writing_on_from_the_middle(make: Any, again: int) -> None:
    pair = twins(make("int4", layers=1, kv_heads=1, k_dim=64), [200])
    pair.write(0, numbers("float32", 1, 120, 64), numbers("float32", 1, 120, 64), [(0, 0)])
    pair.write(0, numbers("float32", 1, 20, 64), numbers("float32", 1, 20, 64), [(0, 120)])
    pair.set_tokens([again])
    for length in (1, 3, 50):
        pair.write(0, numbers("float32", 1, length, 64), numbers("float32", 1, length, 64), [(0, again)])
        again += length
        pair.set_tokens([again])
        pair.assert_same_tails(0)
    last = pair.decoded(0, 0, 0, again // 64 * 64)
    for found, expected in zip(last, cpu_decoded(pair, 0, 0, 0, again // 64 * 64), strict=True):
        assert (found - expected).norm() <= 0.1 * expected.norm()


def test_numbers_that_are_not_finite_are_counted_once_and_harmless(make: Any) -> None:
    pair = twins(make("int4", layers=1, kv_heads=1, k_dim=64), [200])
    start = 0
    for length in (70, 1, 1, 80):
        k, v = numbers("float32", 1, length, 64), numbers("float32", 1, length, 64)
        k[0, 0, 0, 3], v[0, 0, length - 1, 5] = torch.nan, torch.inf
        pair.write(0, k, v, [(0, start)])
        start += length
        pair.set_tokens([start])
        pair.assert_same_tails(0)
    pair.assert_same_blocks(0, 2)
    assert pair.there_codec.nonfinite == pair.codec.nonfinite == 8


def test_what_a_write_refuses(make: Any) -> None:
    pair = twins(make("int4", layers=1, kv_heads=1, k_dim=64), [64])
    k = numbers("float32", 1, 65, 64).to(DEVICE)
    step = sealed_step(pair.there_codec, pair.there, DEVICE)
    with pytest.raises(TableError, match="its blocks hold 64 tokens"):
        step.append(pair.there, 0, k, k, [(0, 0)])
    with pytest.raises(TableError, match="expected 0 or more"):
        step.append(pair.there, 0, k, k, [(-1, 0)])
    with pytest.raises(LayoutError):
        step.append(pair.there, 0, k[..., :32], k, [(0, 0)])


def test_a_refused_write_changes_nothing(make: Any) -> None:
    pair = twins(make("int4", layers=2, kv_heads=1, k_dim=64), [70])
    k, v = numbers("float32", 1, 70, 64), numbers("float32", 1, 70, 64)
    targets = [(0, 0)]
    pair.write(0, k, v, targets)
    step = sealed_step(pair.there_codec, pair.there, DEVICE)
    with pytest.raises(TableError, match="its blocks hold 128 tokens"):
        step.append(pair.there, 0, k.to(DEVICE), v.to(DEVICE), [(0, 100)])
    # The pass goes on as if nothing had been: its first block is complete.
    pair.write(1, k, v, targets)
    pair.assert_same_blocks(0, 1)


def test_copies_keep_their_first_token(make: Any) -> None:
    """A table of selected rows has it by reference until it is used, whatever becomes of the table it came from."""
    pair = twins(make("int4", layers=1, kv_heads=1, k_dim=64), [64, 64])
    k, v = numbers("float32", 1, 5, 64, rows=2), numbers("float32", 1, 5, 64, rows=2)
    pair.write(0, k, v, [(0, 0), (0, 0)])
    copy = pair.there.select_rows([1, 0])
    pair.write(0, k + 1, v + 1, [(0, 0), (5, 5)])
    for row, (first_k, first_v) in ((0, (k[1], v[1])), (1, (k[0], v[0]))):
        told = copy.tail.first[0][row]
        assert torch.equal(told[0].cpu(), first_k[:, 0])
        assert torch.equal(told[1].cpu(), first_v[:, 0])
    kept = [pair.there.tail.first[0][row][0].cpu() for row in range(2)]
    assert torch.equal(kept[0], k[0, :, 0] + 1)
    assert torch.equal(kept[1], k[1, :, 0])
    # The kernels read what the tails were told.
    step = sealed_step(pair.there_codec, pair.there, DEVICE)
    buffers = step._tail._firsts[0]
    assert torch.equal(buffers[0].cpu(), torch.stack(kept))
    for given, held in zip(step.tail_pointers(0)[2:], buffers, strict=True):
        assert (given.data_ptr() if INTERPRETED else given) == held.data_ptr()


@pytest.mark.parametrize("codec", ["int4"] if INTERPRETED else CODECS)
def test_steps_over_what_was_written(make: Any, codec: str) -> None:
    """Prompt, single tokens, several at once over a block's end, a second prompt: as a model runs."""
    dtype = "float32" if INTERPRETED else "bfloat16"
    pair = twins(make(codec, layers=2, kv_heads=2, k_dim=64, dtype=dtype), [330])
    start = 0
    for length in (100, 1, 27, 5, 1, 90, 1):
        k, v = numbers(dtype, 2, length, 64), numbers(dtype, 2, length, 64)
        query = numbers(dtype, 6, length, 64)
        for layer in range(2):
            pair.write(layer, k, v, [(0, start)])
        pair.set_tokens([start + length])
        if length <= 32:
            found = run(pair, query, 1)
            expected = decode_reference(query, pair.codec, 1, pair.host, scaling=0.17)
        else:
            found = prompt(pair, query, k, v, 1, start)
            expected = prefill_attention(query, k, v, pair.codec, 1, pair.host, history=[start], scaling=0.17).float()
        error = (found.float().cpu() - expected).norm() / expected.norm()
        assert error <= (1e-3 if dtype == "float32" else 1e-2), (length, start, float(error))
        start += length


def run(pair: Twins, query: torch.Tensor, layer: int) -> torch.Tensor:
    query = query.to(DEVICE)
    if CUDA:
        return decode_attention(query, pair.there_codec, layer, pair.there, scaling=0.17)
    step = sealed_step(pair.there_codec, pair.there, DEVICE)
    return step.attend(pair.there, query, layer, 0.17, None, None, None)


def prompt(pair: Twins, query: Any, key: Any, value: Any, layer: int, past: int) -> torch.Tensor:
    query, key, value = query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)
    if CUDA or not past:
        return prefill_attention(query, key, value, pair.there_codec, layer, pair.there, history=[past], scaling=0.17)
    from kvstore_kernels.attention.options import Options

    options = Options.checked(query, pair.codec.layout, 0.17, None, None, None)
    step = sealed_step(pair.there_codec, pair.there, DEVICE)
    return step.prefill(pair.there, query, key, value, layer, options, [0], [past])


@pytest.mark.parametrize(
    "codec", ["int4", "int8:1,k4v2:1,int8:1"] if INTERPRETED else [*CODECS, "int8:1,k4v2:2,int8:2"]
)
def test_fetched_blocks_give_what_local_ones_give(make: Any, codec: str, copies_now: type, monkeypatch: Any) -> None:
    """History in pinned host memory, the last block on the device; of several codecs each fetches its own layers."""
    dtype, layers = ("float16", 3) if INTERPRETED else ("bfloat16", 5)
    bench = make(codec, layers=layers, dtype=dtype)
    pair = twins(bench, [200, 130])
    k, v = numbers(dtype, 2, 150, 64, rows=2), numbers(dtype, 2, 150, 64, rows=2)
    for layer in range(layers):
        write(pair, pair.there, layer, k, v, [(0, 0), (50, 0)])
    pair.set_tokens([150, 100])
    away = Slab.allocate(bench.layout.block_bytes, pair.slabs[1].slots, pinned=CUDA)
    away.data.copy_(pair.slabs[1].data)
    if not CUDA:
        # Any device but the one that computes.
        monkeypatch.setattr("kvstore_kernels.gpu.tablestep.CudaCopies", copies_now)
        away.device = torch.device("cuda:7")
    mixed = pair.there.select_rows([0, 1])
    for row in range(2):
        for index in range(pair.there.tokens(row) // 64):
            mixed.replace_block(row, index, away, mixed.entry(row, index).slot)
    for start in range(3 if CUDA else 1):
        q, k = numbers(dtype, 4, 1, 64, rows=2), numbers(dtype, 2, 1, 64, rows=2)
        for table in (mixed, pair.there):
            for row, tokens in enumerate((150, 100)):
                table.set_tokens(row, tokens + start + 1)
        for layer in range(layers):
            for table in (mixed, pair.there):
                write(pair, table, layer, k, k, [(0, 150 + start), (0, 100 + start)])
            assert torch.equal(attended(pair, mixed, q, layer), attended(pair, pair.there, q, layer))
        if isinstance(pair.there_codec.of(layer), SealedCodec):
            assert step_of(pair, mixed, layer).ring is not None
    for layer in range(layers):
        for ours, theirs in zip(back(pair, mixed, layer), back(pair, pair.there, layer), strict=True):
            assert torch.equal(ours, theirs)


def write(pair: Twins, table: BlockTable, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Any) -> None:
    step_of(pair, table, layer).append(table, layer, k.to(DEVICE), v.to(DEVICE), targets)


def attended(pair: Twins, table: BlockTable, query: torch.Tensor, layer: int) -> torch.Tensor:
    return step_of(pair, table, layer).attend(table, query.to(DEVICE), layer, 0.17, None, None, None)


def back(pair: Twins, table: BlockTable, layer: int) -> list[torch.Tensor]:
    """Row 0's tokens 20 to 100, read back from their codes."""
    step, layout = step_of(pair, table, layer), pair.codec.layout
    if not isinstance(pair.there_codec.of(layer), SealedCodec):
        return list(step.read(table, 0, layer, 20, 80, torch.float32))
    made = [torch.zeros(layout.kv_heads, 80, dim, device=DEVICE) for dim in (layout.k_dim, layout.v_dim)]
    step.decoded(table, 0, layer, 20, 100, *made)
    assert all(bool(each.any()) for each in made)
    return made


def step_of(pair: Twins, table: BlockTable, layer: int) -> Any:
    codec = pair.there_codec.of(layer)
    return (sealed_step if isinstance(codec, SealedCodec) else device_step)(codec, table, DEVICE)


@only_cuda
def test_rows_that_part_keep_their_tails(make: Any) -> None:
    pair = twins(make("int4", layers=2, kv_heads=2, k_dim=64, dtype="bfloat16"), [200])
    k, v = numbers("bfloat16", 2, 100, 64), numbers("bfloat16", 2, 100, 64)
    for layer in range(2):
        pair.write(layer, k, v, [(0, 0)])
    pair.set_tokens([100])
    parted = pair.there.select_rows([0, 0])
    host = pair.host.select_rows([0, 0])
    for table in (parted, host):
        for row in range(2):
            table.set_tokens(row, 100)
    query = numbers("bfloat16", 4, 1, 64, rows=2)
    found = decode_attention(query.to(DEVICE), pair.there_codec, 1, parted, scaling=0.17)
    expected = decode_reference(query, pair.codec, 1, host, scaling=0.17)
    assert (found.float().cpu() - expected).norm() <= 1e-2 * expected.norm()
    torch.testing.assert_close(
        pair.there_codec.read(1, pair.there, 0)[0].cpu(), pair.codec.read(1, pair.host, 0)[0], rtol=1e-2, atol=1e-2
    )
