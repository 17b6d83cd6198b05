"""Codecs that quantize whole blocks: what they store, what they keep exactly, and attention over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_kernels.attention.decode import decode_attention
from kvstore_kernels.attention.prefill import prefill_attention
from kvstore_kernels.codecs import names
from kvstore_kernels.codecs.packing import pack, unpack
from kvstore_kernels.codecs.rotation import rotation
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.layout import SEALED_BITS, BlockLayout
from kvstore_kernels.table import BlockTable

SEALED = tuple(SEALED_BITS)
# Bits a number may take, scales included, and the largest error of K and V over their spread on normal numbers.
BARS = {"k8v4": (6.4, 0.01, 0.12), "int4": (4.5, 0.12, 0.12), "k4v3": (3.9, 0.12, 0.25), "k4v2": (3.4, 0.12, 0.5)}


def drawn(rows: int, heads: int, tokens: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(rows, heads, tokens, dim, generator=generator) * 2 + 1
    return k, torch.randn(rows, heads, tokens, dim, generator=generator)


def written(bench: Any, k: torch.Tensor, v: torch.Tensor, cuts: list[int], order: str = "scattered") -> BlockTable:
    """A row's tokens, in writes of these sizes, in all layers."""
    tokens = k.shape[2]
    table = bench.table([tokens] * k.shape[0], order)
    at = 0
    for size in cuts:
        for layer in range(bench.layout.layers):
            part = slice(at, at + size)
            bench.codec.write(layer, k[:, :, part], v[:, :, part], table, [(0, at)] * k.shape[0])
        at += size
    assert at == tokens
    for row in range(k.shape[0]):
        table.set_tokens(row, tokens)
    return table


def payloads(table: BlockTable, blocks: int) -> list[bytes]:
    entries = [table.entry(0, block) for block in range(blocks)]
    return [bytes(entry.slab.slot_buffer(entry.slot)) for entry in entries]


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    """Queries [heads, n, dim] at the end of k [kv_heads, tokens, dim] -> [n, heads, dim], one by one in float64."""
    group = q.shape[0] // k.shape[0]
    k, v = (tensor.double().repeat_interleave(group, 0) for tensor in (k, v))
    scores = q.double() @ k.transpose(1, 2) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    token = torch.arange(k.shape[1])[None]
    hidden = token > position
    if window is not None:
        hidden |= token <= position - window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1).float()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("codec", SEALED)
def test_bits_and_errors_are_what_is_stated(make: Any, codec: str, dim: int) -> None:
    bits, k_error, v_error = BARS[codec]
    bench = make(codec, kv_heads=1, layers=1, k_dim=dim)
    assert bench.layout.bits <= bits
    k, v = drawn(1, 1, 129, dim)
    table = written(bench, k, v, [129])
    read_k, read_v = bench.codec.read(0, table, 0, 1, 128)
    for read, given_, bar in ((read_k, k, k_error), (read_v, v, v_error)):
        wanted = given_[0, :, 1:128]
        assert float((read - wanted).square().mean().sqrt() / wanted.std()) < bar
    # The first token and what isn't sealed yet are exact.
    for read, given_ in zip(bench.codec.read(0, table, 0), (k, v), strict=True):
        assert torch.equal(read[:, [0, 128]], given_[0, :, [0, 128]])


def test_smaller_codecs_come_later_and_all_are_named() -> None:
    sizes = [BlockLayout.create(c, layers=1, kv_heads=1, k_dim=64, v_dim=64, dtype="float32").bits for c in names()]
    assert sizes == sorted(sizes, reverse=True)
    assert set(SEALED) < set(names())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_do_not_depend_on_how_tokens_came(make: Any, data: Any) -> None:
    codec = data.draw(st.sampled_from(SEALED))
    tokens = data.draw(st.sampled_from([63, 64, 100, 129, 200]))
    bench = make(codec, layers=1)
    k, v = drawn(1, 2, tokens, 64, data.draw(st.integers(0, 99)))
    cuts, left = [], tokens
    while left:
        cuts.append(data.draw(st.integers(1, left)))
        left -= cuts[-1]
    whole = written(bench, k, v, [tokens], "run")
    table = written(bench, k, v, cuts)
    assert payloads(table, tokens // 64) == payloads(whole, tokens // 64)
    for read, expected in zip(bench.codec.read(0, table, 0), bench.codec.read(0, whole, 0), strict=True):
        last = tokens // 64 * 64
        assert torch.equal(read[:, last:], expected[:, last:])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 3.0)])
@pytest.mark.parametrize("codec", SEALED)
def test_a_step_attends_on_what_is_read(make: Any, codec: str, window: int | None, softcap: float | None) -> None:
    bench = make(codec, layers=1)
    k, v = drawn(2, 2, 163, 64)
    q = torch.randn(2, 6, 1, 64)
    table = written(bench, k, v, [130, 33])
    out = decode_attention(q, bench.codec, 0, table, scaling=64**-0.5, sliding_window=window, softcap=softcap)
    for row in range(2):
        expected = attended(q[row], *bench.codec.read(0, table, row), window=window, softcap=softcap)
        assert torch.allclose(out[row], expected, atol=2e-5)


@pytest.mark.parametrize("codec", ["k8v4", "k4v2"])
def test_tokens_together_see_what_they_would_see_alone(make: Any, codec: str) -> None:
    bench = make(codec, layers=1)
    k, v = drawn(1, 2, 150, 64)
    q = torch.randn(1, 4, 30, 64)
    singly, out = written(bench, k[:, :, :120], v[:, :, :120], [120]), []
    extra = bench.slab(2)
    singly.append_block(0, extra, 0)
    for step in range(30):
        at = 120 + step
        bench.codec.write(0, k[:, :, at : at + 1], v[:, :, at : at + 1], singly, [(0, at)])
        singly.set_tokens(0, at + 1)
        out.append(decode_attention(q[:, :, step : step + 1], bench.codec, 0, singly, scaling=0.125))
    together = written(bench, k, v, [120, 30])
    found = decode_attention(q, bench.codec, 0, together, scaling=0.125)
    assert torch.allclose(found, torch.cat(out, dim=1), atol=1e-5)


@pytest.mark.parametrize("history", [10, 64, 100, 128])
def test_a_prompt_over_a_history(make: Any, history: int) -> None:
    bench = make("int4", layers=1)
    fresh = 77
    k, v = drawn(1, 2, history + fresh, 64)
    q = torch.randn(1, 4, fresh, 64)
    table = written(bench, k, v, [history, fresh])
    out = prefill_attention(
        q, k[:, :, history:], v[:, :, history:], bench.codec, 0, table, history=[history], scaling=0.125
    )
    read_k, read_v = bench.codec.read(0, table, 0)
    read_k[:, history:], read_v[:, history:] = k[0, :, history:], v[0, :, history:]
    assert torch.allclose(out[0], attended(q[0], read_k, read_v), atol=2e-5)


def test_writing_on_from_the_middle_of_a_sealed_block(make: Any) -> None:
    bench = make("int4", layers=1)
    k, v = drawn(1, 2, 140, 64)
    table = written(bench, k, v, [140])
    before = bench.codec.read(0, table, 0, 0, 100)
    table.set_tokens(0, 100)
    bench.codec.write(0, k[:, :, 100:101], v[:, :, 100:101], table, [(0, 100)])
    table.set_tokens(0, 101)
    after = bench.codec.read(0, table, 0)
    for old, new, own in zip(before, after, (k, v), strict=True):
        assert torch.equal(old, new[:, :100])
        assert torch.equal(new[:, 100], own[0, :, 100])


def test_rows_that_are_chosen_go_their_own_ways(make: Any) -> None:
    bench = make("int4", layers=1)
    k, v = drawn(2, 2, 70, 64)
    table = written(bench, k, v, [70])
    chosen = table.select_rows([1, 1, 0])
    more = drawn(3, 2, 1, 64, seed=5)
    bench.codec.write(0, *more, chosen, [(0, 70)] * 3)
    for row in range(3):
        chosen.set_tokens(row, 71)
    for row, old in enumerate([1, 1, 0]):
        read_k, _ = bench.codec.read(0, chosen, row, 64, 71)
        assert torch.equal(read_k[:, :6], k[old, :, 64:])
        assert torch.equal(read_k[:, 6], more[0][row, :, 0])
    # The table they came from is what it was.
    assert torch.equal(bench.codec.read(0, table, 0, 64, 70)[0], k[0, :, 64:])


def test_padding_is_in_no_scale(make: Any) -> None:
    bench = make("int4", layers=1)
    k, v = drawn(1, 2, 64, 64)
    padded_k, padded_v = (torch.cat((torch.full((1, 2, 9, 64), 1e9), tensor), dim=2) for tensor in (k, v))
    table = bench.table([64])
    bench.codec.write(0, padded_k, padded_v, table, [(9, 0)])
    table.set_tokens(0, 64)
    assert payloads(table, 1) == payloads(written(bench, k, v, [64]), 1)


@pytest.mark.parametrize("codec", SEALED)
def test_numbers_that_are_not_finite_are_counted_and_harmless(make: Any, codec: str) -> None:
    bench = make(codec, layers=1)
    k, v = drawn(1, 2, 64, 64)
    k[0, 0, 3, 5], v[0, 1, 7, 2], k[0, 1, 63, 0] = float("nan"), float("inf"), float("-inf")
    table = written(bench, k, v, [64])
    assert bench.codec.nonfinite == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in bench.codec.read(0, table, 0, 1, 64))


@pytest.mark.parametrize("codec", SEALED)
@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e12])
def test_extreme_numbers_stay_finite(make: Any, codec: str, factor: float) -> None:
    bench = make(codec, layers=1)
    k, v = drawn(1, 2, 129, 64)
    table = written(bench, k * factor, v * factor, [129])
    out = decode_attention(torch.randn(1, 2, 1, 64), bench.codec, 0, table, scaling=1e-3)
    assert bool(torch.isfinite(out).all())
    if not factor:
        # Constant groups are exact: to float16 where they are not the calibration's mean.
        read_k, read_v = bench.codec.read(0, table, 0)
        assert float(read_v.abs().max()) < 1e-6
        assert float(read_k.abs().max()) < 1e-2


def test_what_write_refuses(make: Any) -> None:
    bench = make("int4", layers=1)
    k, v = drawn(1, 2, 65, 64)
    with pytest.raises(TableError, match="append blocks first"):
        bench.codec.write(0, k, v, bench.table([64]), [(0, 0)])
    with pytest.raises(TableError, match="skips -1"):
        bench.codec.write(0, k, v, bench.table([128]), [(-1, 0)])
    with pytest.raises(LayoutError, match="layer 1"):
        bench.codec.write(1, k, v, bench.table([128]), [(0, 0)])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_packing_gives_back(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 64, 5), dtype=torch.uint8)
    packed = pack(codes, bits, 1)
    assert packed.shape == (3, 8 * bits, 5)
    assert torch.equal(unpack(packed, bits, 1), codes)


@pytest.mark.parametrize("size", [1, 3, 64, 80, 96, 256])
def test_rotations_are_orthogonal_and_spread(size: int) -> None:
    matrix = rotation(size)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=2e-6)
    if size >= 64:
        assert float(matrix.abs().max()) < 0.25


def test_a_history_that_nobody_wrote_here(make: Any) -> None:
    # As after a hit, before the first write.
    bench = make("k8v4", layers=1)
    k, v = drawn(1, 2, 168, 64)
    table = written(bench, k[:, :, :128], v[:, :, :128], [128])
    table.set_tokens(0, 100)
    table.tail = None
    q = torch.randn(1, 4, 40, 64)
    out = prefill_attention(q, k[:, :, 128:], v[:, :, 128:], bench.codec, 0, table, history=[100], scaling=0.125)
    read = bench.codec.read(0, table, 0, 0, 100)
    whole = [torch.cat((old, new[0, :, 128:]), dim=1) for old, new in zip(read, (k, v), strict=True)]
    assert torch.allclose(out[0], attended(q[0], *whole), atol=2e-5)


def test_rows_chosen_in_inference_mode_are_written_outside_of_it(make: Any) -> None:
    bench = make("int4", layers=1)
    k, v = drawn(1, 2, 71, 64)
    with torch.inference_mode():
        table = written(bench, k[:, :, :70], v[:, :, :70], [70])
        table.append_block(0, bench.slab(1), 0)
        chosen = table.select_rows([0, 0])
    more = [tensor[:, :, 70:].expand(2, -1, -1, -1) for tensor in (k, v)]
    bench.codec.write(0, *more, chosen, [(0, 70)] * 2)
    chosen.set_tokens(1, 71)
    assert torch.equal(bench.codec.read(0, chosen, 1)[0][:, 64:], k[0, :, 64:])
