"""The compiled decode step: the bytes and the numbers of the torch path."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_kernels.attention import decode_attention, decode_reference
from kvstore_kernels.codecs.base import RowTarget
from kvstore_kernels.compiled import compiled_reason, compiled_step, memory
from kvstore_kernels.compiled.memory import half_bits, half_number
from kvstore_kernels.errors import TableError
from numba import njit

STEP = "kvstore_kernels.compiled.step"


@njit
def _round_trip(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = np.empty(numbers.shape[0], np.uint16)
    back = np.empty(numbers.shape[0], np.float32)
    for index in range(numbers.shape[0]):
        bits[index] = half_bits(numbers[index])
        back[index] = half_number(bits[index])
    return bits, back


def test_float16_is_rounded_as_numpy_rounds_it() -> None:
    every = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    # Every float16, every midpoint between two (ties to even), and the float32 numbers beside them.
    middles = (every[:-1] + every[1:]) / 2
    numbers = np.concatenate([every, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(7e4))])
    numbers = numbers[(numbers >= 2.0**-24) & (numbers <= 65504)].astype(np.float32)
    bits, back = _round_trip(numbers)
    expected = numbers.astype(np.float16)
    assert np.array_equal(bits, expected.view(np.uint16))
    assert np.array_equal(back, expected.astype(np.float32))


@pytest.mark.parametrize("codec", ["int8", "passthrough"])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(3, 64, 64), (2, 80, 96), (1, 256, 128), (8, 24, 40)])
def test_append_gives_the_bytes_of_the_torch_path(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, codec: str, heads: int, k_dim: int, v_dim: int
) -> None:
    bench = make(codec, layers=2, kv_heads=heads, k_dim=k_dim, v_dim=v_dim)
    lengths = [0, 63, 64, 100]
    tables = [bench.table([length + 65 for length in lengths]) for _ in range(2)]
    torch.manual_seed(1)
    for step in range(65):
        # Magnitudes from far below the smallest scale to far above one.
        size = 10.0 ** (step / 8 - 6)
        k, v = torch.randn(4, heads, 1, k_dim) * size, torch.randn(4, heads, 1, v_dim) * size
        targets = [RowTarget(int(step < 3 and row == 1), length + step) for row, length in enumerate(lengths)]
        for table, missing in zip(tables, ("", "left out"), strict=True):
            monkeypatch.setattr(f"{STEP}._MISSING", missing)
            bench.codec.write(1, k, v, table, targets)
    compiled, plain = (table.entry(0, 0).slab.data for table in tables)
    assert torch.equal(compiled, plain)
    assert bench.codec.nonfinite == 0


@pytest.mark.parametrize("codec", ["int8", "passthrough"])
def test_a_prompt_gives_the_bytes_of_the_torch_path(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    bench = make(codec, layers=2, kv_heads=3, k_dim=80, v_dim=96)
    tables = [bench.table([230, 300, 64], "scattered") for _ in range(2)]
    # As a model hands them over: K contiguous, V a transposed view; rows start anywhere and have padding.
    k, v = torch.randn(3, 3, 200, 80), torch.randn(3, 200, 3, 96).transpose(1, 2)
    targets = [RowTarget(0, 30), RowTarget(71, 100), RowTarget(200, 0)]
    for table, missing in zip(tables, ("", "left out"), strict=True):
        monkeypatch.setattr(f"{STEP}._MISSING", missing)
        bench.codec.write(1, k, v, table, targets)
    compiled, plain = (table.entry(0, 0).slab.data for table in tables)
    assert torch.equal(compiled, plain)


def test_numbers_that_are_not_finite_take_the_careful_path(make: Callable[..., Any]) -> None:
    bench = make("int8")
    layout = bench.layout
    table = bench.table([64, 64])
    k, v = torch.randn(2, layout.kv_heads, 1, layout.k_dim), torch.randn(2, layout.kv_heads, 1, layout.v_dim)
    k[1, 0, 0, 3], v[0, 0, 0, 5] = float("nan"), float("inf")
    bench.codec.write(0, k, v, table, [RowTarget(0, 0), RowTarget(0, 0)])
    assert bench.codec.nonfinite == 2
    for row in range(2):
        table.set_tokens(row, 1)
        for numbers in bench.codec.read(0, table, row):
            assert torch.isfinite(numbers).all()


@pytest.mark.parametrize("codec", ["int8", "passthrough"])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_rows_of_all_lengths_at_once(make: Callable[..., Any], codec: str, group: int) -> None:
    bench = make(codec, layers=2, kv_heads=2, k_dim=64, v_dim=80)
    torch.manual_seed(2)
    lengths = [1, 63, 100, 129, 64, 0]
    k, v = torch.randn(6, 2, 129, 64), torch.randn(6, 2, 129, 80)
    table = bench.filled(k, v, [129 - length for length in lengths], "scattered")
    query = torch.randn(6, 2 * group, 1, 64)
    assert compiled_step(bench.codec, table) is not None
    found = decode_attention(query, bench.codec, 1, table, scaling=0.3)
    expected = decode_reference(query, bench.codec, 1, table, scaling=0.3)
    assert (found - expected).norm() <= 2e-6 * expected.norm()
    assert not found[5].any()


def test_scores_far_apart(make: Callable[..., Any]) -> None:
    bench = make("passthrough", layers=1, kv_heads=1, k_dim=64, v_dim=64)
    k, v = torch.randn(1, 1, 200, 64), torch.randn(1, 1, 200, 64)
    # A rising row of scores from -2000 to 2000: each block's best is far above all before it.
    k[0, 0, :, 0] = torch.linspace(-2000, 2000, 200)
    table = bench.filled(k, v, [0])
    query = torch.zeros(1, 1, 1, 64)
    query[..., 0] = 1
    for sign in (1, -1):
        found = decode_attention(query * sign, bench.codec, 0, table, scaling=1.0)
        assert torch.isfinite(found).all()
        expected = decode_reference(query * sign, bench.codec, 0, table, scaling=1.0)
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_read_only_and_missing_blocks_are_refused(make: Callable[..., Any]) -> None:
    bench = make("int8")
    layout = bench.layout
    token = torch.randn(1, layout.kv_heads, 1, layout.k_dim), torch.randn(1, layout.kv_heads, 1, layout.v_dim)
    table = bench.table([64])
    with pytest.raises(TableError, match="append blocks first"):
        bench.codec.write(0, *token, table, [RowTarget(0, 64)])
    table.entry(0, 0).slab.writable = False
    with pytest.raises(TableError, match="read-only"):
        bench.codec.write(0, *token, table, [RowTarget(0, 0)])


def test_reasons_to_stay_on_torch(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = make("int8").codec
    assert compiled_reason(codec) == ""
    assert "bfloat16" in compiled_reason(make("passthrough", dtype="bfloat16").codec)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 32)
        assert "32 threads" in compiled_reason(codec)
    monkeypatch.setattr(f"{STEP}._MISSING", "No module named 'numba'")
    assert "pip install numba" in compiled_reason(codec)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_table_lets_go_of_its_slabs_without_a_collection(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A worker's mapping ends with its last request, not at some garbage collection: else its session never could."""
    monkeypatch.setattr(f"{STEP}._MISSING", "" if path == "compiled" else "left out")
    bench = make("int8")
    layout = bench.layout
    table = bench.filled(torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64), [0])
    query = torch.randn(1, 2 * layout.kv_heads, 1, layout.k_dim)
    decode_attention(query, bench.codec, 0, table, scaling=0.1)
    slab = weakref.ref(table.entry(0, 0).slab)
    gc.disable()
    try:
        del table
        assert slab() is None
    finally:
        gc.enable()


def test_without_a_folder_for_numbas_cache_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only file system and no home: the decorators would raise."""

    def refuse(_function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    assert memory.EXACT["cache"] is True
    monkeypatch.setattr(memory, "FunctionCache", refuse)
    assert memory._may_cache() is False


def test_variants_are_cached_in_files_of_their_own() -> None:
    pytest.importorskip("numba")
    from kvstore_kernels.compiled.append import append_function
    from kvstore_kernels.compiled.attend import attend_function

    made: list[Any] = [attend_function(scaled) for scaled in (False, True)]
    made += [append_function(scaled, 127.0, 2.0**-24, 65504.0, 2.0**-25) for scaled in (False, True)]
    names = {function._cache._cache_file._index_name for function in made}
    assert len(names) == len(made)
