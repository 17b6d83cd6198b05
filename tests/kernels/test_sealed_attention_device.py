"""Attention of the sealed codecs' CUDA kernels against the CPU's, over bytes and tails that the CPU codec wrote.

On a GPU (`-m gpu`), and on CPU tensors under TRITON_INTERPRET=1, which test_interpreted.py sets in an own process.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kvstore_kernels.attention import decode_attention, decode_reference, prefill_attention
from kvstore_kernels.attention.options import Options
from kvstore_kernels.layout import SEALED_BITS
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda:0") if CUDA else torch.device("cpu")
CODECS = list(SEALED_BITS)
# Triton's interpreter multiplies bfloat16 as if it were integers.
DTYPES = ["float32", "float16", "bfloat16"] if CUDA else ["float32", "float16"]
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-3}
SCALING = 0.17
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "window": {"sliding_window": 70},
    "window of one": {"sliding_window": 1},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "sliding_window": 133, "sinks": True},
}

pytestmark = [
    pytest.mark.gpu,
    # Numpy, which the interpreter computes with, warns where a GPU doesn't.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"),
]


class On:
    """A codec on the device, as attention needs it."""

    def __init__(self, codec: Any) -> None:
        from kvstore_kernels.gpu.launch import padded, pointer

        layout = self.layout = codec.layout
        self.device, self.processors = DEVICE, 4
        offsets = {part.name: part.offset for part in layout.parts}
        self.constants = {
            "K_DIM": layout.k_dim, "K_PAD": padded(layout.k_dim), "V_DIM": layout.v_dim, "V_PAD": padded(layout.v_dim),
            "BLOCK": layout.block_tokens, "HEAD_BYTES": layout.head_bytes, "K_CODES": offsets["k_codes"],
            "K_SCALES": offsets["k_scales"], "V_CODES": offsets["v_codes"], "V_HIGH": offsets.get("v_high", 0),
            "V_SCALES": offsets["v_scales"], "K_BITS": codec.k_bits, "V_BITS": codec.v_bits,
            "KV_HEADS": layout.kv_heads,
        }  # fmt: skip
        pad = self.constants["V_PAD"] - layout.v_dim
        self._kept = [item.contiguous().to(DEVICE) for item in (*codec._shift, *codec._scale)]
        self._kept.append(torch.nn.functional.pad(codec.rotation.T, (0, pad, 0, pad)).contiguous().to(DEVICE))
        self._kept.append(torch.zeros(128, device=DEVICE))
        pointers = [pointer(item) for item in self._kept]
        self.shifts, self.factors = pointers[: layout.layers], pointers[layout.layers : 2 * layout.layers]
        self.rotation_back, self.nothing = pointers[-2:]


class Step:
    """A table's step over a copy of its slabs and tails on the device."""

    def __init__(self, bench: Any, table: BlockTable) -> None:
        from kvstore_kernels.gpu.launch import pointer
        from kvstore_kernels.gpu.places import Places
        from kvstore_kernels.gpu.split import Partials

        layout, tail = bench.layout, table.tail
        self.on, self.plan, self.ring = On(bench.codec), None, None
        self.partials = Partials(DEVICE, layout.v_dim)
        slabs: dict[int, Slab] = {}
        width = max(len(table.blocks(row)) for row in range(table.rows))
        addresses = torch.zeros(table.rows, width, dtype=torch.int64)
        for row in range(table.rows):
            for index, entry in enumerate(table.blocks(row)):
                if id(entry.slab) not in slabs:
                    there = Slab.allocate(entry.slab.slot_bytes, entry.slab.slots, device=DEVICE)
                    there.data.copy_(entry.slab.data)
                    slabs[id(entry.slab)] = there
                addresses[row, index] = slabs[id(entry.slab)].address(entry.slot)
        anchor = torch.zeros(512, dtype=torch.uint8, device=DEVICE)
        targets = torch.zeros(3, table.rows, dtype=torch.int64)
        targets[2] = torch.tensor(table.token_counts)
        self._addresses, self._targets = addresses.to(DEVICE), targets.to(DEVICE)
        firsts = [tail.first[layer] for layer in range(layout.layers)]
        self._known = torch.tensor([int(item is not None) for item in firsts[0]], dtype=torch.int32, device=DEVICE)
        self._tails, dtype = [], getattr(torch, layout.dtype)
        for layer in range(layout.layers):
            held: list[torch.Tensor] = []
            for tensor, dim in ((tail.k[layer], layout.k_dim), (tail.v[layer], layout.v_dim)):
                shape = (table.rows, layout.kv_heads, tail.capacity, dim)
                copy = torch.full(shape, float("nan"), dtype=dtype)
                if tensor is not None:
                    for row in range(table.rows):
                        used = tail.end[layer][row] - tail.base[layer][row]
                        copy[row, :, :used] = tensor[row, :, :used]
                held.append(copy.to(DEVICE))
            for number, dim in enumerate((layout.k_dim, layout.v_dim)):
                first = torch.full((table.rows, layout.kv_heads, dim), float("nan"), dtype=dtype)
                for row, known in enumerate(firsts[layer]):
                    if known is not None:
                        first[row] = known[number]
                held.append(first.to(DEVICE))
            self._tails.append(held)
        self.known = pointer(self._known)
        self._kept = (anchor, slabs)
        self.places = Places(
            codes=pointer(anchor), scales=pointer(anchor.view(torch.float16)), targets=pointer(self._targets),
            table=pointer(self._addresses), width=width, rows=table.rows,
        )  # fmt: skip

    def prompt_targets(self, begins: Any, pasts: Any, length: int) -> Any:
        from kvstore_kernels.gpu.launch import pointer

        ends = [past + length - begin for begin, past in zip(begins, pasts, strict=True)]
        self._prompt = torch.tensor([list(begins), list(pasts), ends], dtype=torch.int64).to(DEVICE)
        return pointer(self._prompt)

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if CUDA else 0

    def tail_pointers(self, layer: int) -> Any:
        from kvstore_kernels.gpu.launch import pointer

        return tuple(pointer(item) for item in self._tails[layer])

    def table_for(self, layer: int) -> Any:
        return self.places.table


def numbers(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(getattr(torch, dtype))


def written(bench: Any, tokens: list[int], last: int, length: int | None = None) -> BlockTable:
    """Rows of so many random tokens; the `last` ones come in a write of their own, as a decode step's."""
    layout, most = bench.layout, max(tokens)
    length = most if length is None else length
    table = bench.table([count + last for count in tokens], "scattered")
    for layer in range(layout.layers):
        k = numbers(layout.dtype, len(tokens), layout.kv_heads, most, layout.k_dim) + 1
        v = numbers(layout.dtype, len(tokens), layout.kv_heads, most, layout.v_dim)
        if most > last:
            targets = [(min(most - count, most - last), 0) for count in tokens]
            bench.codec.write(layer, k[:, :, : most - last], v[:, :, : most - last], table, targets)
        targets = [(max(0, last - count), max(0, count - last)) for count in tokens]
        bench.codec.write(layer, k[:, :, most - last :], v[:, :, most - last :], table, targets)
    for row, count in enumerate(tokens):
        table.set_tokens(row, count)
    return table


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.shape == expected.shape
    assert out.dtype == dtype
    found = out.float().cpu()
    assert torch.isfinite(found).all()
    error = (found - expected).norm() / (expected.norm() + 1e-30)
    assert error <= LIMITS[str(dtype).removeprefix("torch.")], float(error)


def check_decode(bench: Any, table: BlockTable, query: torch.Tensor, layer: int = 1, **options: Any) -> torch.Tensor:
    from kvstore_kernels.gpu.sealed.attention import attend

    if options.get("sinks"):
        options["sinks"] = torch.randn(query.shape[1])
    there = options | ({"sinks": options["sinks"].to(DEVICE)} if "sinks" in options else {})
    named = [there.get(name) for name in ("softcap", "sliding_window", "sinks")]
    out = attend(Step(bench, table), table, query.to(DEVICE), layer, SCALING, *named)
    close(out, decode_attention(query.float(), bench.codec, layer, table, scaling=SCALING, **options), query.dtype)
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 100, 129, 200])
def test_decode(make: Any, codec: str, dtype: str, tokens: int) -> None:
    bench = make(codec, layers=2, dtype=dtype)
    table = written(bench, [tokens], 1)
    query = numbers(dtype, 1, 6, 1, 64)
    out = check_decode(bench, table, query)
    expected = decode_reference(query.float(), bench.codec, 1, table, scaling=SCALING)
    close(out, expected, query.dtype)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", [1, 6])
def test_options(make: Any, codec: str, options: dict[str, Any], length: int) -> None:
    """Rows of different lengths, one of them shorter than L, several queries on both sides of a block's border."""
    bench = make(codec, dtype=DTYPES[-1])
    table = written(bench, [195, 130, 3], length)
    out = check_decode(bench, table, numbers(DTYPES[-1], 3, 6, length, 64), **options)
    assert bool((out[2, : max(0, length - 3)] == 0).all())


@pytest.mark.parametrize(("codec", "dims"), [("int4", (80, 96)), ("k4v3", (96, 80)), ("k8v4", (128, 128)),
                                             ("k4v2", (192, 128)), ("k4v3", (256, 256))])  # fmt: skip
def test_head_dims(make: Any, codec: str, dims: tuple[int, int]) -> None:
    for dtype in ("float32", DTYPES[-1]):
        bench = make(codec, layers=2, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
        table = written(bench, [131], 3)
        check_decode(bench, table, numbers(dtype, 1, 4, 3, dims[0]))


@pytest.mark.parametrize(("heads", "length", "tokens"), [(2, 32, 140), (16, 7, 133), (6, 32, 96), (6, 32, 85)])
def test_many_queries_a_head(make: Any, heads: int, length: int, tokens: int) -> None:
    """Groups of 1, 3 and 8; queries in the block that the pass has filled and in the next."""
    bench = make("int4", dtype="float16", layers=2)
    table = written(bench, [tokens, tokens - 20], length)
    check_decode(bench, table, numbers("float16", 2, heads, length, 64))


@pytest.mark.parametrize("codec", ["int4", "k4v2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_extreme_numbers_stay_finite(make: Any, codec: str, dtype: str, factor: float) -> None:
    from kvstore_kernels.gpu.sealed.attention import attend

    bench = make(codec, layers=1, dtype=dtype)
    table = bench.table([129])
    most = torch.finfo(getattr(torch, dtype)).max
    k, v = ((torch.randn(1, 2, 129, 64) * factor).clamp(-most, most).to(getattr(torch, dtype)) for _ in "kv")
    bench.codec.write(0, k[:, :, :128], v[:, :, :128], table, [(0, 0)])
    bench.codec.write(0, k[:, :, 128:], v[:, :, 128:], table, [(0, 128)])
    table.set_tokens(0, 129)
    out = attend(Step(bench, table), table, numbers(dtype, 1, 2, 1, 64).to(DEVICE), 0, 1e-3, None, None, None)
    # What float16 can't hold may be infinite, but nothing is a NaN.
    assert not bool(torch.isnan(out).any())


def test_first_token_that_nobody_told(make: Any) -> None:
    bench = make("int4", layers=2)
    table = written(bench, [130, 130], 1)
    for layer in range(2):
        table.tail.first[layer][1] = None
    check_decode(bench, table, numbers("float32", 2, 4, 1, 64))


def check_prefill(
    bench: Any, begins: list[int], pasts: list[int], length: int, heads: int, **options: Any
) -> torch.Tensor:
    """A prompt of `length` positions over histories that were written before it, in a pass of their own."""
    from kvstore_kernels.gpu.sealed.attention import prefill

    layout, rows = bench.layout, len(pasts)
    ends = [past + length - begin for begin, past in zip(begins, pasts, strict=True)]
    table, most = bench.table(ends, "scattered"), max(max(pasts), 1)
    old = [numbers(layout.dtype, rows, layout.kv_heads, most, dim) for dim in (layout.k_dim, layout.v_dim)]
    new = [numbers(layout.dtype, rows, layout.kv_heads, length, dim) for dim in (layout.k_dim, layout.v_dim)]
    for layer in range(layout.layers):
        bench.codec.write(layer, old[0], old[1], table, [(most - past, 0) for past in pasts])
        bench.codec.write(layer, new[0], new[1], table, list(zip(begins, pasts, strict=True)))
    for row, end in enumerate(ends):
        table.set_tokens(row, end)
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads)
    query = numbers(layout.dtype, rows, heads, length, layout.k_dim)
    there = options | ({"sinks": options["sinks"].to(DEVICE)} if "sinks" in options else {})
    named = [there.get(name) for name in ("softcap", "sliding_window", "sinks")]
    checked = Options.checked(query, layout, SCALING, *named)
    q, k, v = (tensor.to(DEVICE) for tensor in (query, *new))
    out = prefill(Step(bench, table), table, q, k, v, 1, checked, begins, pasts)
    expected = prefill_attention(
        query.float(), new[0].float(), new[1].float(), bench.codec, 1, table, starts=begins, history=pasts,
        scaling=SCALING, **options,
    )  # fmt: skip
    close(out, expected, query.dtype)
    for row, begin in enumerate(begins):
        assert bool((out[row, :begin] == 0).all())
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("begins", "pasts", "length"), [([0, 0], [150, 64], 40), ([5, 0], [0, 100], 70), ([3, 0], [130, 1], 36)]
)
def test_prompts_over_a_history(make: Any, codec: str, begins: list[int], pasts: list[int], length: int) -> None:
    """Histories that end inside a block, at its border or nowhere; fresh tokens that fill that block or don't."""
    for dtype in DTYPES if CUDA else DTYPES[length % 3 == 1 :][:1]:
        check_prefill(make(codec, k_dim=80, v_dim=64, dtype=dtype), begins, pasts, length, 6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_prompts(make: Any, options: dict[str, Any]) -> None:
    check_prefill(make("int4", dtype=DTYPES[-1], kv_heads=1), [0, 1], [150, 70], 35, 3, **options)


@pytest.mark.parametrize(("codec", "dims"), [("k4v3", (128, 128)), ("int4", (96, 80)), ("k4v2", (192, 256))])
def test_prompts_of_wide_heads(make: Any, codec: str, dims: tuple[int, int]) -> None:
    bench = make(codec, k_dim=dims[0], v_dim=dims[1], dtype=DTYPES[-1], kv_heads=1)
    check_prefill(bench, [0], [100], 63, 2)
