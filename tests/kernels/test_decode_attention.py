"""Decode attention against the reference, over poisoned memory."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_kernels.attention import decode, decode_attention, decode_reference
from kvstore_kernels.errors import LayoutError, UnsupportedAttentionError

CODECS = ["int8", "passthrough"]
LIMIT = 1e-5
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "window": {"sliding_window": 70},
    "window of one": {"sliding_window": 1},
    "wide window": {"sliding_window": 100_000},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "sliding_window": 33, "sinks": True},
}

pytestmark = pytest.mark.usefixtures("decode_path")


def check(bench, query: torch.Tensor, table, layer: int = 1, **options: object) -> torch.Tensor:
    if options.get("sinks"):
        options["sinks"] = torch.randn(query.shape[1])
    out = decode_attention(query, bench.codec, layer, table, scaling=0.17, **options)
    expected = decode_reference(query, bench.codec, layer, table, scaling=0.17, **options)
    assert out.shape == expected.shape == (query.shape[0], query.shape[2], query.shape[1], bench.layout.v_dim)
    assert out.is_contiguous()
    assert out.dtype == query.dtype
    assert torch.isfinite(out).all()
    assert (out.float() - expected).norm() <= LIMIT * expected.norm() + 1e-30
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 129, 1411])
@pytest.mark.parametrize("order", ["run", "scattered"])
def test_one_row(make, codec: str, tokens: int, order: str) -> None:
    bench = make(codec, kv_heads=3)
    k, v = torch.randn(1, 3, tokens, 64) + 2, torch.randn(1, 3, tokens, 64)
    check(bench, torch.randn(1, 9, 1, 64), bench.filled(k, v, [0], order))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "dims", [(72, 72), (80, 64), (96, 96), (112, 120), (120, 112), (128, 128), (192, 128), (256, 256)]
)
def test_head_dims(make, codec: str, dims: tuple[int, int]) -> None:
    bench = make(codec, k_dim=dims[0], v_dim=dims[1])
    k, v = torch.randn(2, 2, 131, dims[0]), torch.randn(2, 2, 131, dims[1])
    table = bench.filled(k, v, [0, 100])
    check(bench, torch.randn(2, 4, 1, dims[0]), table)
    check(bench, torch.randn(2, 4, 3, dims[0]), table)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [1, 5])
def test_options(make, codec: str, options: dict[str, object], length: int) -> None:
    """Rows of different lengths, one of them shorter than L: its queries in the padding give zeros."""
    bench = make(codec)
    k, v = torch.randn(3, 2, 200, 64) + 1, torch.randn(3, 2, 200, 64)
    table = bench.filled(k, v, [0, 71, 198])
    out = check(bench, torch.randn(3, 6, length, 64), table, **options)
    assert bool((out[2, : max(0, length - 2)] == 0).all())


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (32, 1), (3, 3)])
def test_query_head_groups(make, heads: int, kv_heads: int) -> None:
    """b084."""
    for codec in CODECS:
        bench = make(codec, kv_heads=kv_heads)
        k, v = torch.randn(1, kv_heads, 190, 64), torch.randn(1, kv_heads, 190, 64)
        table = bench.filled(k, v, [0])
        for length in (1, 2):
            check(bench, torch.randn(1, heads, length, 64), table)


@pytest.mark.parametrize("codec", CODECS)
def test_growing_a_token_at_a_time(make, codec: str) -> None:
    """Views are kept between steps: they must follow the count over a block's border, and every layer."""
    bench = make(codec)
    k, v = torch.randn(2, 2, 140, 64), torch.randn(2, 2, 140, 64)
    table = bench.table([140, 140])
    for token in range(140):
        for row in range(2):
            table.set_tokens(row, token + 1)
        for layer in range(2):
            part = slice(token, token + 1)
            bench.codec.write(layer, k[:, :, part], v[:, :, part], table, [(0, token)] * 2)
        if token % 7 == 0 or 60 < token < 67 or token > 126:
            check(bench, torch.randn(2, 4, 1, 64), table, layer=token % 2)
    # Taking tokens back (assisted decoding) and replacing a block.
    for row in range(2):
        table.set_tokens(row, 77)
    check(bench, torch.randn(2, 4, 1, 64), table)
    slab = bench.slab(1)
    bench.codec.copy_tokens(table.entry(0, 0), type(table.entry(0, 0))(slab, 0), 64)
    table.replace_block(0, 0, slab, 0)
    check(bench, torch.randn(2, 4, 1, 64), table)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_thread_counts(make, codec: str, threads: int) -> None:
    """Chunks are cut by the number of threads: odd remainders, several chunks, a second slab."""
    torch.set_num_threads(threads)
    for kv_heads, blocks in ((3, 1), (3, 7), (1, 45), (2, 67)):
        bench = make(codec, layers=2, kv_heads=kv_heads)
        tokens = 64 * blocks - 11
        k, v = torch.randn(1, kv_heads, tokens, 64), torch.randn(1, kv_heads, tokens, 64)
        table = bench.filled(k, v, [0])
        query = torch.randn(1, 2 * kv_heads, 1, 64)
        check(bench, query, table)
        slab = bench.slab(2)
        bench.codec.copy_tokens(table.entry(0, 0), type(table.entry(0, 0))(slab, 1), 64)
        table.replace_block(0, 0, slab, 1)
        check(bench, query, table)


def test_empty_history_gives_zeros(make) -> None:
    bench = make("int8")
    for length in (1, 3):
        out = decode_attention(torch.randn(1, 4, length, 64), bench.codec, 0, bench.table([64]), scaling=0.1)
        assert torch.equal(out, torch.zeros(1, length, 4, 64))


@pytest.mark.parametrize("codec", CODECS)
def test_scores_in_several_tiles(make, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Very long rows are cut into score tiles that merge exactly."""
    bench = make(codec)
    k, v = torch.randn(1, 2, 900, 64) * 2, torch.randn(1, 2, 900, 64)
    table = bench.filled(k, v, [0])
    query = torch.randn(1, 4, 1, 64)
    whole = check(bench, query, table)
    monkeypatch.setattr(decode, "SCORE_NUMBERS", 4 * 128)
    monkeypatch.setattr(decode, "plan_fits", lambda *_: False)
    monkeypatch.setattr(bench.codec, "tile_blocks", 2)
    assert (check(bench, query, table) - whole).norm() < LIMIT * whole.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries(make, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for codec in CODECS:
        bench = make(codec, dtype=name)
        k, v = torch.randn(1, 2, 100, 64).to(dtype), torch.randn(1, 2, 100, 64).to(dtype)
        table, query = bench.filled(k, v, [0]), torch.randn(1, 4, 1, 64).to(dtype)
        out = decode_attention(query, bench.codec, 0, table, scaling=0.125)
        expected = decode_reference(query, bench.codec, 0, table, scaling=0.125)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=2e-3)


def test_inference_mode_then_plain_then_grad(make) -> None:
    """Work buffers made in one mode are written in another."""
    bench = make("int8")
    k, v = torch.randn(1, 2, 90, 64), torch.randn(1, 2, 90, 64)
    query = torch.randn(1, 4, 1, 64)
    with torch.inference_mode():
        table = bench.filled(k, v, [0])
        first = decode_attention(query, bench.codec, 0, table, scaling=0.1)
        decode_attention(torch.randn(1, 4, 2, 64), bench.codec, 0, table, scaling=0.1)
    bench.codec.write(0, k[:, :, :5], v[:, :, :5], table, [(0, 0)])
    second = decode_attention(query.clone().requires_grad_(), bench.codec, 0, table, scaling=0.1)
    decode_attention(torch.randn(1, 4, 2, 64), bench.codec, 0, table, scaling=0.1)
    assert torch.equal(first, second)
    assert not second.requires_grad


def test_threads_do_not_share_buffers(make) -> None:
    bench = make("int8")
    k, v = torch.randn(4, 2, 333, 64), torch.randn(4, 2, 333, 64)
    query = torch.randn(1, 4, 1, 64)
    tables = [bench.filled(k[i : i + 1], v[i : i + 1], [0]) for i in range(4)]
    expected = [decode_reference(query, bench.codec, 1, table, scaling=0.2) for table in tables]
    worst = [1.0] * 4

    def work(index: int) -> None:
        errors = []
        for _ in range(15):
            for length in (1, 2):
                wide = query.expand(1, 4, length, 64)
                out = decode_attention(wide, bench.codec, 1, tables[index], scaling=0.2)[:, -1:]
                errors.append(float((out - expected[index]).norm() / expected[index].norm()))
        worst[index] = max(errors)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert max(worst) < LIMIT


@settings(max_examples=30, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codec=st.sampled_from(CODECS),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    queries=st.integers(1, 4),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 320),
    softcap=st.none() | st.floats(0.2, 50),
    sinks=st.booleans(),
    order=st.sampled_from(["run", "scattered"]),
)
def test_anything(make, codec, lengths, queries, group, kv_heads, window, softcap, sinks, order) -> None:
    bench = make(codec, kv_heads=kv_heads, k_dim=72)
    longest = max(lengths)
    k, v = torch.randn(len(lengths), kv_heads, longest, 72) + 1, torch.randn(len(lengths), kv_heads, longest, 72)
    table = bench.filled(k, v, [longest - length for length in lengths], order)
    query = torch.randn(len(lengths), kv_heads * group, queries, 72)
    check(bench, query, table, sliding_window=window, softcap=softcap, sinks=sinks or None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scaling": float("nan")}, "scaling"),
        ({"scaling": 0.1, "softcap": 0.0}, "softcap"),
        ({"scaling": 0.1, "sliding_window": 0}, "sliding_window"),
        ({"scaling": 0.1, "sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_options_that_can_not_be_honoured(make, options: dict[str, object], named: str) -> None:
    bench = make("int8")
    with pytest.raises(UnsupportedAttentionError, match=named):
        decode_attention(torch.zeros(1, 4, 1, 64), bench.codec, 0, bench.table([64]), **options)


@pytest.mark.parametrize("shape", [(1, 3, 1, 64), (1, 4, 1, 72), (2, 4, 1, 64), (4, 1, 64)])
def test_queries_that_do_not_fit(make, shape: tuple[int, ...]) -> None:
    bench = make("int8")
    with pytest.raises(LayoutError):
        decode_attention(torch.zeros(shape), bench.codec, 0, bench.table([64]), scaling=0.1)
