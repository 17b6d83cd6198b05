"""Codec plans: deterministic bytes, refused damage; and the calibration that makes them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_kernels.codecs import Calibrator, CodecPlan, get_codec
from kvstore_kernels.errors import LayoutError, PlanError
from kvstore_kernels.layout import BlockLayout


def int8_plan(origin: str = "a text") -> CodecPlan:
    generator = torch.Generator().manual_seed(3)
    shape = (2, 3, 72)
    shift, scale = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) + 0.1
    return CodecPlan("int8", {"k_shift": shift, "k_scale": scale}, origin)


def test_round_trip_and_digest() -> None:
    plan = int8_plan("pages of §")
    again = CodecPlan.from_bytes(plan.to_bytes())
    assert again == plan
    assert again.to_bytes() == plan.to_bytes() == int8_plan("pages of §").to_bytes()
    assert again.origin == "pages of §"
    assert torch.equal(again.tensors["k_shift"], plan.tensors["k_shift"])
    assert len(plan.digest()) == 32
    assert plan.digest() != int8_plan("other").digest()


def test_order_of_tensors_does_not_count() -> None:
    plan = int8_plan()
    swapped = CodecPlan("int8", dict(reversed(plan.tensors.items())), plan.origin)
    assert swapped.to_bytes() == plan.to_bytes()


def test_passthrough_plan_is_empty() -> None:
    plan = Calibrator("passthrough", layers=2, kv_heads=1, k_dim=64).finish("nothing to learn")
    assert plan.tensors == {}
    assert CodecPlan.from_bytes(plan.to_bytes()) == plan


@settings(max_examples=150, deadline=500)
@given(st.data())
def test_damage_is_a_typed_error_or_another_plan(data: st.DataObject) -> None:
    good = bytearray(int8_plan().to_bytes())
    match data.draw(st.sampled_from(["cut", "grow", "flip"])):
        case "cut":
            bad = bytes(good[: data.draw(st.integers(0, len(good) - 1))])
        case "grow":
            bad = bytes(good) + data.draw(st.binary(min_size=1, max_size=9))
        case _:
            good[data.draw(st.integers(0, 200))] ^= data.draw(st.integers(1, 255))
            bad = bytes(good)
    try:
        plan = CodecPlan.from_bytes(bad)
    except PlanError:
        return
    assert plan != int8_plan()


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"codec": "int8", "origin": "", "tensors": [["k_shift", [2**40]]]},
        {"codec": "int8", "origin": "", "tensors": [["k_shift", [-4]]]},
        {"codec": "int8", "origin": "", "tensors": [["k_shift", [True]]]},
        {"codec": "int8", "origin": "", "tensors": [["b", [1]], ["a", [1]]]},
        {"codec": "int8", "origin": "", "tensors": [["a", [1]], ["a", [1]]]},
        {"codec": "int8", "origin": "", "tensors": "a"},
        {"codec": 8, "origin": "", "tensors": []},
        {"codec": "int9", "origin": "", "tensors": []},
        {"codec": "int8", "tensors": []},
    ],
)
def test_strange_headers(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(PlanError):
        CodecPlan.from_bytes(b"KVPLAN1\n" + len(text).to_bytes(4, "little") + text + bytes(8))


def test_numbers_that_are_not_finite() -> None:
    with pytest.raises(PlanError, match="k_shift"):
        CodecPlan("int8", {"k_shift": torch.tensor([float("nan")])})


def test_plan_for_another_shape_or_codec() -> None:
    layout = BlockLayout.create("int8", layers=2, kv_heads=3, k_dim=64, v_dim=64, dtype="float32")
    with pytest.raises(PlanError, match=r"\(2, 3, 72\).*\(2, 3, 64\)"):
        get_codec("int8")(layout, int8_plan())
    with pytest.raises(PlanError, match="passthrough"):
        get_codec("int8")(layout, CodecPlan("passthrough"))
    with pytest.raises(LayoutError, match="passthrough"):
        get_codec("passthrough")(layout, CodecPlan("passthrough"))
    with pytest.raises(LayoutError, match="int3"):
        get_codec("int3")
    negative = int8_plan().tensors | {"k_scale": -torch.ones(2, 3, 72)}
    wide = BlockLayout.create("int8", layers=2, kv_heads=3, k_dim=72, v_dim=64, dtype="float32")
    with pytest.raises(PlanError, match="not positive"):
        get_codec("int8")(wide, CodecPlan("int8", negative))


def test_calibration_is_mean_and_largest_distance() -> None:
    k = torch.randn(2, 3, 101, 72) * torch.linspace(0.5, 40, 72) + torch.linspace(-200, 200, 72)
    calibrator = Calibrator("int8", layers=1, kv_heads=3, k_dim=72)
    calibrator.observe(0, k)
    plan = calibrator.finish("")
    mean = k.double().mean(dim=(0, 2))
    extent = (k.double() - mean[None, :, None]).abs().amax(dim=(0, 2))
    torch.testing.assert_close(plan.tensors["k_shift"][0].double(), mean, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(plan.tensors["k_scale"][0].double() * 127, extent, rtol=1e-4, atol=1e-4)


def test_calibration_does_not_depend_on_chunks() -> None:
    k = torch.randn(1, 2, 168, 64)
    plans = []
    for step in (168, 24, 1):
        calibrator = Calibrator("int8", layers=1, kv_heads=2, k_dim=64)
        for start in range(0, 168, step):
            calibrator.observe(0, k[:, :, start : start + step])
        plans.append(calibrator.finish(""))
    for plan in plans[1:]:
        for name, tensor in plan.tensors.items():
            torch.testing.assert_close(tensor, plans[0].tensors[name], rtol=1e-5, atol=1e-6)


def test_constant_channels_get_a_usable_scale() -> None:
    k = torch.randn(1, 1, 50, 64)
    k[..., 5] = 3.0
    calibrator = Calibrator("int8", layers=2, kv_heads=1, k_dim=64)
    calibrator.observe(0, k)
    calibrator.observe(1, torch.full((1, 1, 50, 64), 2.0))
    scale = calibrator.finish("").tensors["k_scale"]
    assert 0 < scale[0, 0, 5] < scale[0, 0].median()
    torch.testing.assert_close(scale[1], torch.full((1, 64), 1 / 127))


def test_calibration_refuses_what_it_can_not_use() -> None:
    calibrator = Calibrator("int8", layers=2, kv_heads=2, k_dim=64)
    with pytest.raises(LayoutError, match=r"\(1, 3, 5, 64\)"):
        calibrator.observe(0, torch.zeros(1, 3, 5, 64))
    with pytest.raises(LayoutError, match="layer 2"):
        calibrator.observe(2, torch.zeros(1, 2, 5, 64))
    with pytest.raises(PlanError, match="layer 1"):
        calibrator.observe(1, torch.full((1, 2, 5, 64), float("inf")))
    calibrator.observe(0, torch.ones(1, 2, 5, 64))
    with pytest.raises(PlanError, match=r"\[1\]"):
        calibrator.finish("half a model")
