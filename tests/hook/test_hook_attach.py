"""attach() and detach(): what is refused before the first token, and what is left behind."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from kvstore_client.hook import (
    AttachError,
    SelfCheckError,
    UnsupportedModelError,
    UnsupportedVersionError,
    attach,
)
from kvstore_client.hook import attachment as attachment_module
from kvstore_client.hook.calibration import calibrate, calibration_ids
from kvstore_client.hook.plan import model_plan
from kvstore_client.hook.versions import check_transformers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def everything_of(model: Any) -> dict[str, Any]:
    return {
        "instance": dict(model.__dict__),
        "class": dict(type(model).__dict__),
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": model.training,
    }


def test_detach_puts_everything_back_b174(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    ids = kit.ids_of(70, 1)
    before, logits = everything_of(model), model(ids).logits
    with pytest.raises(RuntimeError, match="in the middle"), attach(store, model):  # noqa: PT012
        model.generate(ids, max_new_tokens=3, do_sample=False)
        raise RuntimeError("in the middle")
    assert everything_of(model) == before
    assert torch.equal(model(ids).logits, logits)
    model.train()
    model(ids, labels=ids).loss.backward()
    model.eval()
    attachment = attach(store, model)
    attachment.detach()
    attachment.detach()
    assert everything_of(model) == before


def test_attach_is_idempotent_and_tells_contradictions(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    with attach(store, model) as first:
        assert attach(store, model) is first
        with pytest.raises(AttachError, match="codec='int8', not 'passthrough'"):
            attach(store, model, codec="passthrough")
        with pytest.raises(AttachError, match="another store"):
            attach(type(store)(), model)
    for name, value in (("codec", "int3"), ("commit", "never"), ("fallback", "x"), ("compile", "always")):
        with pytest.raises(AttachError, match=f"{name}='{value}'"):
            attach(store, model, **{name: value})


def test_models_that_share_a_config_and_copies_of_an_attached_one(kit: Any, store: Any) -> None:
    first = kit.build("llama")
    second = type(first)(first.config).eval()
    ids = kit.ids_of(70, 1)
    expected = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (first, second)]
    one, two = attach(store, first, codec="passthrough"), attach(store, second, codec="passthrough")
    copied = copy.deepcopy(first)
    one.detach()
    reports = len(store.reports)
    assert torch.equal(second.generate(ids, max_new_tokens=4, do_sample=False), expected[1])
    assert len(store.reports) == reports + 1
    two.detach()
    assert first.config._attn_implementation == "sdpa"
    # The copy is a model of its own, not attached, and keeps working with functions that pass everything on.
    with torch.no_grad():
        copied.lm_head.weight.mul_(-1)
    assert not torch.equal(copied.generate(ids, max_new_tokens=4, do_sample=False), expected[0])
    assert len(store.reports) == reports + 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_whatever_attention_ran_before_runs_direct_calls(kit: Any, store: Any, implementation: str) -> None:
    model = kit.build("qwen2")
    model.set_attn_implementation(implementation)
    ids, mask = kit.padded([kit.ids_of(20, 1), kit.ids_of(9, 2)])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with attach(store, model, codec="passthrough"):
            assert torch.equal(expected, model(ids, attention_mask=mask).logits)
            if implementation == "eager":
                assert model(ids, output_attentions=True).attentions[0].shape == (2, 4, 20, 20)
    assert model.config._attn_implementation == implementation


def _model(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            lambda: Llama4TextConfig(**_SMALL, num_local_experts=2, intermediate_size_mlp=32),
            "layer 0 is chunked_attention",
        ),
        (
            lambda: Qwen3NextConfig(
                **_SMALL, num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
            ),
            "layer 0 is linear_attention",
        ),
        (lambda: MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, state_size=4), "mamba"),
        (
            lambda: LlamaConfig(**_SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "RoPE of type 'dynamic'",
        ),
        (
            lambda: Phi3Config(
                **_SMALL,
                max_position_embeddings=64,
                original_max_position_embeddings=32,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 32,
                },
            ),
            "RoPE of type 'longrope'",
        ),
    ],
    ids=["chunks", "linear", "mamba", "dynamic", "longrope"],
)
def test_models_are_refused_by_name_and_reason_b164(store: Any, config: Any, reason: str) -> None:
    model = _model(config())
    before = dict(model.__dict__)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        attach(store, model)
    assert type(model).__name__ in str(caught.value)
    assert dict(model.__dict__) == before
    assert not store.namespaces


def test_encoder_decoders_and_foreign_objects_are_refused_b180_b224(kit: Any, store: Any) -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=99, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        attach(store, t5.eval())

    class PeftModel(torch.nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match="get_base_model"):
        attach(store, PeftModel())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="CausalLM"):
        attach(store, kit.build("llama").model)


def test_training_is_refused_b190(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        attach(store, model)
    model.eval()
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModelError, match="gradient_checkpointing_disable"):
        attach(store, model)
    model.gradient_checkpointing_disable()
    model.generation_config.cache_implementation = "static"
    with pytest.raises(UnsupportedModelError, match="static"):
        attach(store, model)
    model.generation_config.cache_implementation = None
    with attach(store, model):
        model.train()
        model.generate(kit.ids_of(5, 1), max_new_tokens=2)
        assert "training" in store.last_report.warnings[0]


@pytest.mark.parametrize("version", ["5.16.1", "5.17.0", "5.19.0", "5.19.9.dev0"])
def test_versions_in_the_range(version: str) -> None:
    check_transformers(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0", "5.20.0", "5.20.0.dev0", "6.0", "unknown"])
def test_other_versions_are_refused_naming_the_range_b219(version: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=r">=5\.16\.1,<5\.20") as caught:
        check_transformers(version)
    assert version in str(caught.value)


def test_the_self_check_finds_attention_that_is_not_served(kit: Any, store: Any, monkeypatch: Any) -> None:
    model = kit.build("llama")
    before = everything_of(model)
    kernel = attachment_module.attention.Stored.attend

    def scaled(self: Any, module: Any, query: Any, mask: Any, scaling: Any, *rest: Any) -> Any:
        return kernel(self, module, query, mask, scaling * 1.2, *rest)

    monkeypatch.setattr(attachment_module.attention.Stored, "attend", scaled)
    with pytest.raises(SelfCheckError, match="differ from the native"):
        attach(store, model)
    assert everything_of(model) == before


def test_calibration_is_deterministic_and_says_where_its_ids_come_from(kit: Any) -> None:
    model = kit.build("qwen2")
    plan = model_plan(model)
    first, second = calibrate(model, plan, "int8"), calibrate(model, plan, "int8")
    assert first.to_bytes() == second.to_bytes()
    assert first.origin == "ids drawn with seed 20261130, 1024 tokens"

    def letters(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 150 for letter in text]}

    ids, origin = calibration_ids(kit.VOCABULARY, 6000, letters)
    assert ids.shape == (1, 6000)
    assert origin.startswith("text ")
    # Ids beyond the model's own are no use.
    assert "seed" in calibration_ids(100, 10, letters)[1]


def test_shapes_are_those_that_the_model_caches(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    ids = kit.ids_of(70, 1)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.config.num_key_value_heads = 1
    with attach(store, model, codec="passthrough") as attachment:
        assert (attachment.plan.kv_heads, attachment.plan.k_dim) == (2, 64)
        assert torch.equal(expected, model.generate(ids, max_new_tokens=3, do_sample=False))


def test_layers_that_differ_are_refused(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(getattr(attention, name).in_features, 64, bias=False))
    attention.num_key_value_groups = 4
    with pytest.raises(UnsupportedModelError, match=r"different shapes.*\(1, 64, 64\), \(2, 64, 64\)"):
        attach(store, model)
    assert not store.namespaces


def test_a_model_that_keeps_no_cache_of_keys_and_values_is_refused_by_name(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    stock = type(model.model.layers[1].self_attn).forward

    def own_cache(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return stock(self, *args, past_key_values=None, **kwargs)

    model.model.layers[1].self_attn.forward = types.MethodType(own_cache, model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModelError, match=r"layers \[1\] updated the cache \[0\] times"):
        attach(store, model)

    def tuples(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return past_key_values[0][0].shape

    model.model.layers[1].self_attn.forward = types.MethodType(tuples, model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedModelError, match="does not run on a cache of keys and values alone"):
        attach(store, model)


def test_a_foreign_cache_stays_with_its_model(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(20, 1)
    cache = DynamicCache(config=llama.config)
    with attach(store, llama):
        out = llama.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.get_seq_length() == 22
    assert torch.equal(out, llama.generate(ids, max_new_tokens=3, do_sample=False))
