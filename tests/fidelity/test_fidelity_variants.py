"""The variants are what they say: harder keys, the same text unquantized, everything else shared with the model."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from kvstore.fidelity import variants
from kvstore.fidelity.variants import BIAS, SCALE, VariantError, check_lossless, difference, head_shape, make_variant

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "initializer_range": 0.2,
}


def build(config: Any) -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    made = build(LlamaConfig(**SHAPE) if request.param == "llama" else Qwen2Config(**SHAPE))
    if request.param == "qwen2":
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.k_proj.bias)
            torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    return made


def ids(tokens: int = 40) -> torch.Tensor:
    return torch.arange(tokens).mul(31).remainder(97)[None]


def projections(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def test_plain_is_the_model(model: Any) -> None:
    plain = make_variant("plain", model)
    assert difference(model, plain, ids()) == 0
    assert plain.config is not model.config
    shared = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in plain.parameters()} == shared


def test_scaled_changes_nothing_unquantized(model: Any) -> None:
    scaled = make_variant("scaled", model)
    check_lossless("scaled", difference(model, scaled, ids()))
    shape = head_shape(model)
    assert (shape.heads, shape.kv_heads, shape.dim, shape.half) == (4, 2, 24, 12)
    chosen = set()
    for before, after in zip(projections(model), projections(scaled), strict=True):
        of_keys = (after.k_proj.weight / before.k_proj.weight).view(2, 24, -1)
        assert torch.allclose(of_keys, of_keys[:, :, :1].expand_as(of_keys), rtol=1e-5)
        factors = of_keys[:, :, 0].round()
        assert set(factors.unique().tolist()) == {1.0, SCALE}
        # Both channels of a pair, and the inverse for every query head of the group.
        assert torch.equal(factors[:, :12], factors[:, 12:])
        of_queries = (before.q_proj.weight / after.q_proj.weight).view(4, 24, -1)[:, :, 0].round()
        assert torch.equal(of_queries, factors.repeat_interleave(2, dim=0))
        # Fast, middle and slow ones in each head.
        thirds = (factors[:, :12] == SCALE).view(2, 3, 4).sum(-1)
        assert thirds.tolist() == [[2, 2, 2], [2, 2, 2]]
        chosen.update(tuple(row) for row in factors.tolist())
        assert after.v_proj.weight.data_ptr() == before.v_proj.weight.data_ptr()
        assert after.k_proj.weight.data_ptr() != before.k_proj.weight.data_ptr()
    assert len(chosen) > 1, "every head has the same pairs"


def test_bias_stands_on_the_slowest_pairs_of_every_head(model: Any) -> None:
    biased = make_variant("bias", model)
    for before, after in zip(projections(model), projections(biased), strict=True):
        old = before.k_proj.bias if before.k_proj.bias is not None else torch.zeros(48)
        added = (after.k_proj.bias - old).view(2, 24).round()
        slow = {9, 10, 11, 21, 22, 23}
        for channel in range(24):
            assert (added[:, channel] == (BIAS if channel in slow else 0)).all(), channel
        assert torch.equal(after.k_proj.weight, before.k_proj.weight)
    # RoPE turns it: the text changes, and that is no error.
    found = difference(model, biased, ids())
    assert found > variants.LOSSLESS
    check_lossless("bias", found)


def test_the_model_itself_stays(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for name in ("bias", "scaled"):
        make_variant(name, model)
    after = dict(model.named_parameters())
    assert set(after) == set(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_pairs_of_another_kind_are_found_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = variants.head_shape(model)
    neighbours = variants.HeadShape(true.heads, true.kv_heads, true.dim, 1, tuple(range(0, 24, 2)))
    monkeypatch.setattr(variants, "head_shape", lambda _: neighbours)
    found = difference(model, make_variant("scaled", model), ids())
    with pytest.raises(VariantError, match=r"expected at most 0\.001"):
        check_lossless("scaled", found)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Qwen3Config(**SHAPE), "normalizes queries and keys after their projection"),
        (Phi3Config(**{**SHAPE, "pad_token_id": 0, "head_dim": 12}), "0 of 2 layers have linear q_proj and k_proj"),
        (GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4), "have linear q_proj and k_proj"),
    ],
    ids=["q-norm", "fused", "gpt2"],
)
def test_a_model_without_such_a_variant_says_why(config: Any, text: str) -> None:
    model = build(config)
    for name in ("bias", "scaled"):
        with pytest.raises(VariantError, match=text):
            make_variant(name, model)
    assert difference(model, make_variant("plain", model), ids()) == 0
