"""Layers of several codecs in one block: each is what it would be in a model of its own codec."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kvstore_kernels.attention.decode import decode_attention
from kvstore_kernels.codecs import CodecPlan, make_codec
from kvstore_kernels.errors import LayoutError, PlanError
from kvstore_kernels.layout import BlockLayout, codec_of_layers, codecs_by_layer
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

NAMES = ("int8", "int4", "passthrough", "k4v2", "int8")
SPEC = "int8:1,int4:1,passthrough:1,k4v2:1,int8:1"


def made(codec: str, plan: CodecPlan, layers: int) -> tuple[Any, BlockTable]:
    """A codec of two KV heads of 64 and a table of three poisoned slots."""
    layout = BlockLayout.create(codec, layers=layers, kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
    slab = Slab.allocate(layout.block_bytes, 5)
    slab.data.fill_(0x7F)
    table = BlockTable(1)
    for slot in (3, 0, 4):
        table.append_block(0, slab, slot)
    return make_codec(layout, plan), table


def plan_of(make: Any, codec: str) -> CodecPlan:
    calibrated = make("int8", layers=len(NAMES), kv_heads=2).codec.plan
    return CodecPlan(codec, {} if codec == "passthrough" else calibrated.tensors, "test")


@pytest.mark.parametrize("threads", [1, 8])
def test_each_layer_is_what_it_is_alone(make: Any, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With many threads torch serves instead of compiled code.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 2, 150, 64, generator=generator) for _ in range(2))
    q = torch.randn(1, 4, 1, 64, generator=generator)
    mixed, table = made(SPEC, plan_of(make, SPEC), len(NAMES))
    alone = {name: made(name, plan_of(make, name), len(NAMES)) for name in set(NAMES)}
    for first, last in itertools.pairwise([0, 100, 101, 150]):
        for layer, name in enumerate(NAMES):
            own, own_table = alone[name]
            part = slice(first, last)
            mixed.write(layer, k[:, :, part], v[:, :, part], table, [(0, first)])
            own.write(layer, k[:, :, part], v[:, :, part], own_table, [(0, first)])
    for each in (table, *(own_table for _, own_table in alone.values())):
        each.set_tokens(0, 150)
    for layer, name in enumerate(NAMES):
        own, own_table = alone[name]
        for found, expected in zip(mixed.read(layer, table, 0), own.read(layer, own_table, 0), strict=True):
            assert torch.equal(found, expected)
        out = decode_attention(q, mixed, layer, table, scaling=0.125)
        assert torch.allclose(out, decode_attention(q, own, layer, own_table, scaling=0.125), atol=1e-5)


def test_copies_are_whole(make: Any) -> None:
    mixed, table = made(SPEC, plan_of(make, SPEC), len(NAMES))
    k = torch.randn(1, 2, 64, 64)
    for layer in range(len(NAMES)):
        mixed.write(layer, k, k, table, [(0, 0)])
    source, target = table.entry(0, 0), table.entry(0, 1)
    mixed.copy_tokens(source, target, 10)
    assert bytes(source.slab.slot_buffer(source.slot)) == bytes(target.slab.slot_buffer(target.slot))


def test_layouts() -> None:
    shape = {"layers": 5, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "dtype": "float32"}
    layout = BlockLayout.create(SPEC, **shape)
    single = {name: BlockLayout.create(name, **shape) for name in set(NAMES)}
    assert layout.layer_codecs == NAMES
    assert layout.block_bytes == sum(single[name].layer_bytes for name in NAMES)
    assert [layout.layer_offset(layer) for layer in range(5)] == [
        sum(single[name].layer_bytes for name in NAMES[:layer]) for layer in range(5)
    ]
    digests = {layout.digest(), BlockLayout.create("int8:2,int4:3", **shape).digest(), single["int8"].digest()}
    assert len(digests) == 3
    assert min(entry.bits for entry in single.values()) < layout.bits < 32


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("int9", "unknown codec 'int9'"),
        ("int8:2,int4:2", "names 4 layers: expected 5"),
        ("int8:2,int8:3", "neighbours of one codec together"),
        ("int8:0,int4:5", "from 1 to 5"),
        ("int8:x,int4:4", "from 1 to 5"),
        ("int8,int4", "names 10 layers"),
        ("", "unknown codec ''"),
    ],
)
def test_names_that_are_refused(codec: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        codecs_by_layer(codec, 5)


def test_names_there_and_back() -> None:
    assert codec_of_layers(codecs_by_layer(SPEC, 5)) == SPEC
    assert codec_of_layers(["int4"] * 3) == "int4"


def test_plans_and_devices(make: Any) -> None:
    layout = BlockLayout.create(SPEC, layers=5, kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
    with pytest.raises(LayoutError, match="codec plan of 'int8'"):
        make_codec(layout, plan_of(make, "int8"))
    with pytest.raises(PlanError, match="unknown codec"):
        CodecPlan("int8:1,int9:4")
    plan = plan_of(make, SPEC)
    assert CodecPlan.from_bytes(plan.to_bytes()) == plan
    codec = make_codec(layout, plan)
    assert {each.name: list(each.own_layers) for each in codec.members} == {
        name: [layer for layer, own in enumerate(layout.layer_codecs) if own == name] for name in layout.layer_codecs
    }
