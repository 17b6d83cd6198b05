"""Prefill attention: equal to torch's own without a history, exact against the reference with one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_kernels.attention import prefill, prefill_attention, prefill_reference
from kvstore_kernels.errors import LayoutError, UnsupportedAttentionError

CODECS = ["int8", "passthrough"]
LIMIT = 1e-5
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "window": {"sliding_window": 40},
    "wide window": {"sliding_window": 100_000},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "sliding_window": 33, "sinks": True},
}


def fresh(bench, rows: int, length: int, group: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = bench.layout
    return (
        torch.randn(rows, length, layout.kv_heads * group, layout.k_dim).transpose(1, 2),
        torch.randn(rows, length, layout.kv_heads, layout.k_dim).transpose(1, 2) + 1,
        torch.randn(rows, length, layout.kv_heads, layout.v_dim).transpose(1, 2),
    )


def check(bench, tensors, table, **options: object) -> torch.Tensor:
    if options.get("sinks"):
        options["sinks"] = torch.randn(tensors[0].shape[1])
    out = prefill_attention(*tensors, bench.codec, 1, table, scaling=0.17, **options)
    expected = prefill_reference(*tensors, bench.codec, 1, table, scaling=0.17, **options)
    assert out.shape == expected.shape
    assert out.is_contiguous()
    assert (out - expected).norm() <= LIMIT * expected.norm() + 1e-30
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1, 63, 100, 129])
def test_a_cold_prompt_equals_torchs_own_attention(make, codec: str, length: int) -> None:
    bench = make(codec)
    query, key, value = fresh(bench, 2, length)
    out = prefill_attention(query, key, value, bench.codec, 0, None, scaling=0.125)
    native = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=0.125, enable_gqa=True)
    assert torch.equal(out, native.transpose(1, 2).contiguous())


def test_a_padded_row_equals_the_row_alone(make) -> None:
    """b011: bit for bit, and zeros in the padding, whatever stands there."""
    bench = make("passthrough")
    query, key, value = fresh(bench, 3, 90)
    starts = [0, 37, 90]
    alone = [
        prefill_attention(
            query[row : row + 1, :, start:], key[row : row + 1, :, start:], value[row : row + 1, :, start:],
            bench.codec, 0, None, scaling=0.125,
        )
        for row, start in enumerate(starts[:2])
    ]  # fmt: skip
    for row, start in enumerate(starts):
        for tensor in (query, key, value):
            tensor[row, :, :start] = float("nan")
    empty = bench.table([64, 64, 64])
    for table in (None, empty):
        out = prefill_attention(query, key, value, bench.codec, 0, table, starts=starts, scaling=0.125)
        for row, start in enumerate(starts):
            assert bool((out[row, :start] == 0).all())
            if row < 2:
                assert torch.equal(out[row, start:], alone[row][0])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("order", ["run", "scattered"])
def test_history_and_options(make, codec: str, options: dict[str, object], order: str) -> None:
    """Rows with a long, a short and no history, and padding of their own."""
    bench = make(codec)
    k, v = torch.randn(3, 2, 300, 64) + 1, torch.randn(3, 2, 300, 64)
    table = bench.filled(k, v, [0, 237, 300], order)
    check(bench, fresh(bench, 3, 70), table, starts=[3, 0, 69], **options)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_without_history(make, codec: str, options: dict[str, object]) -> None:
    bench = make(codec)
    check(bench, fresh(bench, 2, 100), None, starts=[0, 31], **options)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_many_tiles(make, codec: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of queries and keys, cut small: borders inside blocks, inside the window, inside the causal edge."""
    monkeypatch.setattr(prefill, "_KEY_TILE", 64)
    monkeypatch.setattr(prefill, "_QUERY_TILE", (17, 17))
    bench = make(codec)
    k, v = torch.randn(2, 2, 333, 64), torch.randn(2, 2, 333, 64)
    check(bench, fresh(bench, 2, 150), bench.filled(k, v, [0, 130]), starts=[0, 9], **options)


@pytest.mark.parametrize("dims", [(72, 72), (80, 96), (192, 128), (256, 256)])
def test_head_dims(make, dims: tuple[int, int]) -> None:
    for codec in CODECS:
        bench = make(codec, k_dim=dims[0], v_dim=dims[1])
        k, v = torch.randn(1, 2, 70, dims[0]), torch.randn(1, 2, 70, dims[1])
        for table in (bench.filled(k, v, [0]), None):
            check(bench, fresh(bench, 1, 65), table)


def test_history_given_by_the_caller(make) -> None:
    """A table that already counts the fresh tokens."""
    bench = make("int8")
    tensors = fresh(bench, 2, 50)
    k, v = torch.randn(2, 2, 150, 64), torch.randn(2, 2, 150, 64)
    k[:, :, 100:], v[:, :, 100:] = tensors[1], tensors[2]
    table = bench.filled(k, v, [0, 0])
    out = check(bench, tensors, table, history=[100, 0], starts=[0, 8])
    table.set_tokens(0, 100)
    table.set_tokens(1, 0)
    assert torch.equal(check(bench, tensors, table, starts=[0, 8]), out)


def test_one_history_for_codes_and_exact_keys(make) -> None:
    """A key shift of hundreds: scores over codes and over exact keys must meet on one scale."""
    bias = torch.zeros(64)
    bias[5], bias[40] = 200.0, -200.0
    bench = make("int8", sample=torch.randn(1, 2, 500, 64) + bias)
    k, v = torch.randn(1, 2, 200, 64) + bias, torch.randn(1, 2, 200, 64)
    query, key, value = fresh(bench, 1, 33)
    query[..., 5], query[..., 40] = 0.4, -0.3
    tensors = (query, key + bias, value)
    out = prefill_attention(*tensors, bench.codec, 1, bench.filled(k, v, [0]), scaling=0.17)
    exact = prefill_reference(*tensors, bench.codec, 1, bench.filled(k, v, [0]), scaling=0.17)
    assert (out - exact).norm() < 1e-4 * exact.norm()


def test_half_precision(make) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        bench = make("int8", dtype=str(dtype).removeprefix("torch."))
        k, v = torch.randn(1, 2, 100, 64).to(dtype), torch.randn(1, 2, 100, 64).to(dtype)
        tensors = tuple(tensor.to(dtype) for tensor in fresh(bench, 1, 20))
        out = prefill_attention(*tensors, bench.codec, 0, bench.filled(k, v, [0]), scaling=0.125)
        expected = prefill_reference(*tensors, bench.codec, 0, bench.filled(k, v, [0]), scaling=0.125)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=5e-3)


@settings(max_examples=30, deadline=4000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codec=st.sampled_from(CODECS),
    histories=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    length=st.integers(1, 80),
    padding=st.integers(0, 80),
    window=st.none() | st.integers(1, 250),
    softcap=st.none() | st.floats(0.2, 50),
    sinks=st.booleans(),
)
def test_anything(make, codec, histories, length, padding, window, softcap, sinks) -> None:
    bench = make(codec, k_dim=72)
    longest = max(histories)
    rows = len(histories)
    k, v = torch.randn(rows, 2, longest, 72), torch.randn(rows, 2, longest, 72)
    table = bench.filled(k, v, [longest - tokens for tokens in histories])
    starts = [min(padding * row, length) for row in range(rows)]
    check(
        bench,
        fresh(bench, rows, length),
        table,
        starts=starts,
        sliding_window=window,
        softcap=softcap,
        sinks=sinks or None,
    )


def test_misuse_is_named(make) -> None:
    bench = make("int8")
    tensors = fresh(bench, 1, 5)
    table = bench.table([64])
    with pytest.raises(UnsupportedAttentionError, match="softcap"):
        prefill_attention(*tensors, bench.codec, 0, table, scaling=0.1, softcap=-1.0)
    with pytest.raises(LayoutError, match="starts"):
        prefill_attention(*tensors, bench.codec, 0, table, scaling=0.1, starts=[6])
    with pytest.raises(LayoutError, match="history of 65"):
        prefill_attention(*tensors, bench.codec, 0, table, scaling=0.1, history=[65])
    with pytest.raises(LayoutError, match="don't fit"):
        prefill_attention(tensors[0], tensors[1][:, :, 1:], tensors[2], bench.codec, 0, table, scaling=0.1)
    with pytest.raises(LayoutError, match="table of 1"):
        prefill_attention(*fresh(bench, 2, 5), bench.codec, 0, table, scaling=0.1)
