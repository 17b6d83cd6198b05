"""What codecs store: byte for byte the definition, whatever the input's cut, strides, neighbours or memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_kernels.codecs import RowTarget
from kvstore_kernels.errors import LayoutError, TableError

CODECS = ["int8", "passthrough"]
HEAD_DIMS = [64, 72, 80, 96, 112, 120, 128, 192, 256]

pytestmark = pytest.mark.usefixtures("decode_path")


def stored(bench, table, row: int) -> list[torch.Tensor]:
    """The bytes that hold the row's tokens: every part of every block, without its unused end."""
    found = []
    for index, entry in enumerate(table.blocks(row)):
        count = table.count(row, index)
        for name, view in entry.slab.block_views(bench.layout).items():
            axis = -2 if name == "k_codes" else -1
            found.append(view[entry.slot].narrow(axis, 0, count).contiguous().view(torch.uint8).clone())
    return found


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def slow_codes(values: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """One token's int8 codes and scale, number by number in float32, as design and docstring define them."""
    f = np.float32
    largest = f(max(abs(value) for value in values))
    scale = f(f(2.0**-25) + f(largest * f(1 / 127)))
    scale = np.float16(min(max(scale, f(2.0**-24)), f(65504)))
    inverse = f(f(1) / f(scale))
    return np.array([np.clip(np.rint(f(value * inverse)), -127, 127) for value in values], np.int8), scale


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", [63, 129])
def test_bytes_equal_a_slow_reference(make, dim: int, tokens: int) -> None:
    """b022, b020: K and V of different dims as well."""
    v_dim = dim + 8 if dim % 3 == 0 else dim
    bench = make("int8", layers=1, kv_heads=1, k_dim=dim, v_dim=v_dim)
    k, v = torch.randn(1, 1, tokens, dim) * 3 + 1, torch.randn(1, 1, tokens, v_dim)
    table = bench.filled(k, v, [0])
    shift, scale = (bench.codec.plan.tensors[name][0, 0].numpy() for name in ("k_shift", "k_scale"))
    for token in [0, 1, 62, tokens - 1, tokens // 2]:
        entry = table.entry(0, token // 64)
        parts = {name: view[entry.slot, 0, 0] for name, view in entry.slab.block_views(bench.layout).items()}
        inside = token % 64
        centred = (k[0, 0, token].numpy() - shift) * (np.float32(1) / scale)
        codes, t = slow_codes(centred)
        assert parts["k_codes"][inside].tolist() == codes.tolist()
        assert parts["k_scales"][inside].item() == t
        codes, t = slow_codes(v[0, 0, token].numpy())
        assert parts["v_codes"][:, inside].tolist() == codes.tolist()
        assert parts["v_scales"][inside].item() == t


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [72, 128])
def test_chunks_do_not_matter(make, codec: str, dim: int) -> None:
    """b041: 168 tokens as 1 x 168, 168 x 1, 7 x 24, and at odd places."""
    bench = make(codec, k_dim=dim)
    k, v = torch.randn(1, 2, 168, dim), torch.randn(1, 2, 168, dim)
    expected = stored(bench, bench.filled(k, v, [0]), 0)
    for cuts in ([1] * 168, [24] * 7, [63, 1, 100, 4], [5, 64, 64, 35]):
        table = bench.table([168])
        at = 0
        for count in cuts:
            for layer in range(2):
                part = slice(at, at + count)
                bench.codec.write(layer, k[:, :, part], v[:, :, part], table, [RowTarget(0, at)])
            at += count
        table.set_tokens(0, 168)
        assert same(stored(bench, table, 0), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_neighbours_padding_and_poison_do_not_matter(make, codec: str) -> None:
    """b011, b012: a row's bytes alone, padded, beside short and long rows, in a run or scattered."""
    bench = make(codec)
    k, v = torch.randn(3, 2, 200, 64), torch.randn(3, 2, 200, 64)
    # What stands in the padding must not leak: not even NaN.
    k[0, :, :77], v[0, :, :77] = float("nan"), 1e30
    k[1, :, :195], v[1, :, :195] = 7e4, float("inf")
    alone = stored(bench, bench.filled(k[:1, :, 77:], v[:1, :, 77:], [0]), 0)
    for order in ("run", "scattered"):
        assert same(stored(bench, bench.filled(k, v, [77, 195, 0], order), 0), alone)
    assert bench.codec.nonfinite == 0


def test_skipped_rows_store_nothing(make) -> None:
    bench = make("int8")
    k = torch.randn(2, 2, 5, 64)
    table = bench.table([64, 64])
    before = table.entry(1, 0).slab.data.clone()
    bench.codec.write(0, k, k, table, [(5, 0), (9, 0)])
    bench.codec.write(0, k[:, :, :1], k[:, :, :1], table, [(1, 0), (1, 0)])
    assert torch.equal(table.entry(1, 0).slab.data, before)


@pytest.mark.parametrize("codec", CODECS)
def test_unwritten_bytes_stay(make, codec: str) -> None:
    """Only the tokens' own bytes change: other tokens of a block may be being read."""
    bench = make(codec, kv_heads=1)
    table = bench.table([128])
    slab = table.entry(0, 0).slab
    before = slab.data.clone()
    k = torch.randn(1, 1, 3, 64)
    bench.codec.write(1, k, k, table, [(0, 62)])
    changed = (slab.data != before).nonzero()[:, 0].tolist()
    layout = bench.layout
    allowed = set()
    for token in (62, 63, 64):
        slot = table.entry(0, token // 64).slot
        for part in layout.parts:
            item = part.nbytes // math.prod(part.shape)
            start, inside = layout.offset(slot, 1, 0, part.name), token % 64
            if part.name == "k_codes":
                allowed |= set(range(start + inside * 64 * item, start + (inside + 1) * 64 * item))
            elif part.name == "v_codes":
                allowed |= {start + (c * 64 + inside) * item + b for c in range(64) for b in range(item)}
            else:
                allowed |= {start + inside * item + b for b in range(item)}
    assert changed
    assert set(changed) <= allowed


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1, 70])
def test_strides_and_autograd_do_not_matter(make, codec: str, length: int) -> None:
    """b030."""
    bench = make(codec)
    base = torch.randn(1, length, 2, 64)
    views = {
        "transposed": base.transpose(1, 2),
        "stepped": torch.stack([base, base + 9], dim=2)[:, :, 0].transpose(1, 2),
        "channels stepped": torch.stack([base, base - 9], dim=-1)[..., 0].transpose(1, 2),
        "with grad": base.transpose(1, 2).clone().requires_grad_(),
        "channel-major": base.permute(0, 2, 3, 1).contiguous().transpose(2, 3),
    }
    expected = stored(bench, bench.filled(*[base.transpose(1, 2).contiguous()] * 2, [0]), 0)
    for name, view in views.items():
        assert same(stored(bench, bench.filled(view, view, [0]), 0), expected), name
    head = torch.randn(1, 1, length, 64)
    expanded = head.expand(1, 2, length, 64)
    assert same(
        stored(bench, bench.filled(expanded, expanded, [0]), 0),
        stored(bench, bench.filled(*[expanded.contiguous()] * 2, [0]), 0),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 65])
def test_half_precision_input(make, dtype: torch.dtype, length: int) -> None:
    k, v = torch.randn(1, 2, length, 64).to(dtype), torch.randn(1, 2, length, 64).to(dtype)
    name = str(dtype).removeprefix("torch.")
    exact = make("passthrough", dtype=name)
    read = exact.codec.read(1, exact.filled(k, v, [0]), 0)
    assert torch.equal(read[0], k[0].float())
    assert torch.equal(read[1], v[0].float())
    bench = make("int8", dtype=name)
    assert same(stored(bench, bench.filled(k, v, [0]), 0), stored(bench, bench.filled(k.float(), v.float(), [0]), 0))


@pytest.mark.parametrize("length", [1, 66])
def test_extremes(make, length: int) -> None:
    """b044: 7e4 (beyond float16), equal rows, tiny and zero rows, largest floats."""
    bench = make("int8", layers=1)
    k, v = torch.randn(1, 2, length, 64), torch.randn(1, 2, length, 64)
    for values in (k, v):
        values[0, 0, -1, 3] = 7e4
        values[0, 1, -1] = 4.25
        values[0, 0, 0, 7] = -3.3e38
    tables = [bench.filled(k, v, [0])]
    read_k, read_v = bench.codec.read(0, tables[0], 0)
    assert torch.isfinite(read_k).all()
    assert torch.isfinite(read_v).all()
    torch.testing.assert_close(read_v[1, -1], v[0, 1, -1], rtol=1e-3, atol=0)
    for size in (0.0, 1e-7, 1e-5, 1e-3):
        tiny = torch.linspace(-size, size, 64).expand(1, 2, length, 64)
        read = bench.codec.read(0, bench.filled(k, tiny, [0]), 0)[1]
        # Half a code, or half of the smallest scale.
        assert (read - tiny[0]).abs().max() <= max(size / 127 * 0.6, 2.0**-24 if size else 0.0)
    assert bench.codec.nonfinite == 0


@pytest.mark.parametrize("length", [1, 66])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_not_finite_are_counted_and_harmless(make, length: int, bad: float) -> None:
    bench = make("int8")
    k, v = torch.randn(2, 2, length, 64), torch.randn(2, 2, length, 64)
    clean = bench.filled(k, v, [0, 0])
    expected = [bench.codec.read(1, clean, row) for row in range(2)]
    k[1, 0, -1, 9] = v[1, 1, -1, 3] = bad
    table = bench.filled(k, v, [0, 0])
    assert bench.codec.nonfinite_by_layer == [2, 2]
    assert bench.codec.nonfinite == 4
    assert same(stored(bench, table, 0), stored(bench, clean, 0))
    read_k, read_v = bench.codec.read(1, table, 1)
    assert torch.equal(read_k[:, :-1], expected[1][0][:, :-1])
    assert torch.equal(read_v[:, :-1], expected[1][1][:, :-1])
    assert read_v[1, -1, 3] == 0
    assert read_k[0, -1, 9] == bench.codec.plan.tensors["k_shift"][1, 0, 9]
    others = torch.arange(64) != 3
    torch.testing.assert_close(read_v[1, -1, others], v[1, 1, -1, others], rtol=0, atol=0.03)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [0, 1, 37, 64])
def test_copied_tokens_are_equal_code_for_code(make, codec: str, count: int) -> None:
    bench = make(codec, layers=3, k_dim=80, v_dim=72)
    k, v = torch.randn(1, 2, 64, 80), torch.randn(1, 2, 64, 72)
    source = bench.filled(k, v, [0])
    target = bench.table([64])
    untouched = target.entry(0, 0).slab.data.clone()
    bench.codec.copy_tokens(source.entry(0, 0), target.entry(0, 0), count)
    source.set_tokens(0, count)
    target.set_tokens(0, count)
    assert same(stored(bench, target, 0), stored(bench, source, 0))
    # The rest of the block is still unwritten.
    rest = target.entry(0, 0).slab.block_views(bench.layout)
    target.entry(0, 0).slab.data.copy_(untouched)
    before = {name: view[target.entry(0, 0).slot].clone() for name, view in rest.items()}
    bench.codec.copy_tokens(source.entry(0, 0), target.entry(0, 0), count)
    for name, view in rest.items():
        axis = -2 if name == "k_codes" else -1
        kept = view[target.entry(0, 0).slot].narrow(axis, count, 64 - count).contiguous().view(torch.uint8)
        assert torch.equal(kept, before[name].narrow(axis, count, 64 - count).contiguous().view(torch.uint8))
    with pytest.raises(TableError, match="count 65"):
        bench.codec.copy_tokens(source.entry(0, 0), target.entry(0, 0), 65)


@settings(max_examples=25, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dim=st.sampled_from(HEAD_DIMS),
    skips=st.lists(st.integers(0, 140), min_size=1, max_size=3),
    start=st.integers(0, 130),
    scattered=st.booleans(),
    codec=st.sampled_from(CODECS),
)
def test_any_rows_anywhere(make, dim: int, skips: list[int], start: int, scattered: bool, codec: str) -> None:
    """Rows with padding of their own, behind `start` tokens, read back within half a step; the start is untouched."""
    bench = make(codec, layers=1, k_dim=dim)
    rows, length = len(skips), 141
    k, v = torch.randn(rows, 2, start + length, dim), torch.randn(rows, 2, start + length, dim)
    table = bench.table([start + length] * rows, "scattered" if scattered else "run")
    bench.codec.write(0, k[:, :, :start], v[:, :, :start], table, [(0, 0)] * rows)
    bench.codec.write(0, k[:, :, start:], v[:, :, start:], table, [(skip, start) for skip in skips])
    for row, skip in enumerate(skips):
        wanted_k = torch.cat([k[row, :, :start], k[row, :, start + skip :]], dim=1)
        wanted_v = torch.cat([v[row, :, :start], v[row, :, start + skip :]], dim=1)
        read_k, read_v = bench.codec.read(0, table, row, 0, wanted_k.shape[1])
        if codec == "passthrough":
            assert torch.equal(read_k, wanted_k)
            assert torch.equal(read_v, wanted_v)
        else:
            step = bench.codec.plan.tensors["k_scale"][0][:, None]
            largest = ((wanted_k - bench.codec.plan.tensors["k_shift"][0][:, None]) / step).abs().amax(-1, keepdim=True)
            assert ((read_k - wanted_k).abs() <= step * largest / 127 * 0.57 + 1e-6).all()
            assert ((read_v - wanted_v).abs() <= wanted_v.abs().amax(-1, keepdim=True) / 127 * 0.57).all()


def test_misuse_is_named(make) -> None:
    bench = make("int8")
    table = bench.table([64])
    good = torch.zeros(1, 2, 3, 64)
    with pytest.raises(TableError, match="tokens 62 to 65"):
        bench.codec.write(0, good, good, table, [(0, 62)])
    with pytest.raises(TableError, match=r"tokens? 64"):
        bench.codec.write(0, good[:, :, :1], good[:, :, :1], table, [(0, 64)])
    with pytest.raises(TableError, match="skips -1"):
        bench.codec.write(0, good, good, table, [(-1, 0)])
    with pytest.raises(LayoutError, match="layer 2"):
        bench.codec.write(2, good, good, table, [(0, 0)])
    with pytest.raises(LayoutError, match="2 heads"):
        bench.codec.write(0, good[:, :1], good[:, :1], table, [(0, 0)])
    with pytest.raises(LayoutError, match="expected equal rows"):
        bench.codec.write(0, good, good, table, [(0, 0), (0, 0)])
    with pytest.raises(LayoutError, match="float64"):
        bench.codec.write(0, good.double(), good.double(), table, [(0, 0)])
    exact = make("passthrough", dtype="bfloat16")
    with pytest.raises(LayoutError, match="bfloat16"):
        exact.codec.write(0, good, good, exact.table([64]), [(0, 0)])
