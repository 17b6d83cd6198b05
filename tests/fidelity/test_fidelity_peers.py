"""The other schemes: their bits, their rounding against hand-computed one, and that the bad ones are seen as bad."""

import math
from typing import Any

import pytest
import torch

from kvstore.demo import models
from kvstore.fidelity import peers
from kvstore.fidelity.caches import OwnCache, own_caches
from kvstore.fidelity.interpose import rounded
from kvstore.fidelity.measures import Divergence, compare, logits_at_once
from kvstore.fidelity.peers import by_channel, by_token, fp8, lloyd_max, rotated_lloyd_max, schemes, uniform
from kvstore.fidelity.variants import make_variant

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).square().mean() / x.square().mean())


def test_bits_count_scales() -> None:
    bits = {scheme.name: scheme.bits(64) for scheme in schemes()}
    assert bits == {
        "bf16": 16,
        "fp8 e4m3": 8,
        "fp8 e4m3 a token and head": 8.25,
        "int8 a token and head": 8.25,
        "KIVI 4 bit, groups of 32": 5,
        "KIVI 4 bit, groups of 64": 4.5,
        "int4 a token and head": 4.5,
        "rotated Lloyd-Max 4 bit": 4.25,
        "rotated Lloyd-Max 3 bit": 3.25,
        "KIVI 2 bit, groups of 32": 3,
    }
    # Heads that don't hold whole groups of 32 channels have smaller ones for V, so more scales.
    assert next(scheme for scheme in schemes() if "2 bit" in scheme.name).bits(80) == 2 + 16 / 32 + 16 / 16


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("shape", [(1, 2, 70, 64), (1, 1, 1, 24), (2, 3, 64, 80)])
def test_every_scheme_keeps_shape_and_numbers(scheme: Any, shape: tuple[int, ...]) -> None:
    key, value = normal(*shape), normal(*shape, seed=1)
    for x, y in zip((key, value), scheme.rounding(0, key, value), strict=True):
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert torch.isfinite(y).all()
        assert error(x, y) < 0.25
    zeros = torch.zeros(shape)
    assert all(torch.equal(found, zeros) for found in scheme.rounding(0, zeros, zeros))


def test_even_steps_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 2.2, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert uniform(x, 2, -1).tolist() == [[0, 1, 2, 3], [5, 5, 5, 5]]


def test_groups_of_tokens_leave_the_rest_exact() -> None:
    x = normal(1, 2, 70, 24)
    y = by_channel(x, 2, 32)
    assert torch.equal(y[:, :, 64:], x[:, :, 64:])
    assert not torch.equal(y[:, :, :64], x[:, :, :64])
    # Four numbers a channel in each group, and a group doesn't know the others.
    assert len(y[0, 0, :32, 0].unique()) == 4
    assert torch.equal(by_channel(x[:, :, 32:64], 2, 32), y[:, :, 32:64])
    assert torch.equal(by_channel(x[:, :, :20], 2, 32), x[:, :, :20])


def test_groups_of_channels_are_a_tokens_own() -> None:
    x = normal(1, 1, 3, 64)
    y = by_token(x, 2, 32)
    assert all(len(y[0, 0, token, :32].unique()) == 4 for token in range(3))
    assert torch.equal(by_token(x[:, :, 1:2], 2, 32), y[:, :, 1:2])
    assert torch.equal(by_token(x[..., 32:], 2, 32), y[..., 32:])


def test_fp8_has_three_bits_of_fraction_and_no_infinity() -> None:
    assert fp8(torch.tensor([1.0, 1.0625, 1.13, -300.0, 1e6, -1e6])).tolist() == [1, 1, 1.125, -288, 448, -448]


def test_codebooks_are_the_known_ones() -> None:
    assert lloyd_max(1) == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert lloyd_max(2) == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-4)
    assert len(lloyd_max(4)) == 16


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_rotation_reaches_the_error_of_the_codebook(bits: int, expected: float) -> None:
    """Whatever the channels look like, after the rotation they are normal: the known squared errors."""
    x = normal(1, 1, 2000, 128) * torch.linspace(0.1, 3, 128)
    assert error(x, rotated_lloyd_max(x, bits)) == pytest.approx(expected, rel=0.06)


def test_bf16_is_bf16() -> None:
    x = normal(1, 1, 5, 16)
    assert torch.equal(schemes()[0].key(x), x.bfloat16().float())


def divergence(name: str, variant: Any, ids: torch.Tensor) -> dict[str, Any]:
    scheme = next(scheme for scheme in schemes() if scheme.name == name)
    native, seen = logits_at_once(variant, ids), Divergence()
    with rounded(variant, scheme.rounding, scheme.group):
        compare(seen, [native], [logits_at_once(variant, ids)], ids)
    return seen.summary()


def test_a_scheme_that_only_plain_models_survive_is_seen() -> None:
    """One scale a token: keys 30 times larger in some channels, or with a bias there, drown the others."""
    model, _ = models.load("tiny", None)
    ids = torch.arange(160).mul(37).remainder(259)[None]
    plain, scaled, bias = (make_variant(name, model) for name in ("plain", "scaled", "bias"))
    bad = {name: divergence("int4 a token and head", made, ids) for name, made in
           (("plain", plain), ("scaled", scaled), ("bias", bias))}  # fmt: skip
    assert bad["scaled"]["kl_mean"] > 5 * bad["plain"]["kl_mean"]
    assert bad["bias"]["kl_mean"] > 5 * bad["plain"]["kl_mean"]
    assert bad["scaled"]["top1"] < bad["plain"]["top1"]
    good = [divergence("KIVI 4 bit, groups of 32", made, ids)["kl_mean"] for made in (plain, scaled)]
    assert good[1] == pytest.approx(good[0], rel=0.3)


def test_caches_that_are_not_there_say_what_to_install() -> None:
    absent = OwnCache("hqq", 4, "no_such_package.quantize", "hqq")
    assert absent.why_not() == "not installed: pip install hqq"
    assert OwnCache("hqq", 4, "torch.nn", "hqq").why_not() == ""
    assert [(cache.name, cache.bits) for cache in own_caches()] == [
        ("transformers hqq 8 bit", 8.5),
        ("transformers hqq 4 bit", 4.5),
        ("transformers quanto 4 bit", 4.5),
        ("transformers quanto 2 bit", 2.5),
    ]
    assert peers.schemes()[0].name == "bf16"
