"""Figures against hand-computed ones, passes over a window, errors of layers, texts and numbers."""

import math
from typing import Any

import pytest
import torch
from kvstore_client.hook.step import MAX_DECODE_TOKENS
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvstore.demo.models import load
from kvstore.fidelity.interpose import exact_keys_values, layer_errors, rounded
from kvstore.fidelity.measures import PROMPT, STEPS, Divergence, compare, logits_at_once, logits_in_passes, split
from kvstore.fidelity.tasks import agreement, needles

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def ids(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).mul(31).remainder(97)[None]


def test_figures_by_hand() -> None:
    """Two positions of two tokens: one equal but for a constant, one turned round."""
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    found = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log() + 3
    seen = Divergence()
    seen.add(reference, found, torch.tensor([1, 0]))
    figures = seen.summary()
    turned = 0.8 * math.log(9)
    assert figures["positions"] == 2
    assert figures["kl_mean"] == pytest.approx(turned / 2, rel=1e-5)
    assert figures["kl_max"] == figures["kl_p99"] == pytest.approx(turned, rel=1e-5)
    assert figures["top1"] == 0.5
    assert figures["native_perplexity"] == pytest.approx((0.5 * 0.9) ** -0.5, rel=1e-5)
    assert figures["perplexity"] == pytest.approx((0.5 * 0.1) ** -0.5, rel=1e-5)
    assert figures["perplexity_change"] == pytest.approx(2.0, rel=1e-5)


def test_the_99th_percentile_is_not_the_largest() -> None:
    seen = Divergence()
    same = torch.zeros(199, 2)
    seen.add(same, same, torch.zeros(199, dtype=torch.int64))
    seen.add(torch.tensor([[0.0, 5.0]]), torch.tensor([[5.0, 0.0]]), torch.tensor([0]))
    figures = seen.summary()
    assert figures["kl_p99"] == 0
    assert figures["kl_max"] > 4


def test_what_is_impossible_counts_nothing() -> None:
    seen = Divergence()
    seen.add(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, -math.inf]]), torch.tensor([0]))
    assert seen.summary()["kl_mean"] == 0
    assert seen.summary()["perplexity"] == 1


def test_no_positions_no_figures() -> None:
    with pytest.raises(ValueError, match="no positions"):
        Divergence().summary()


def test_each_position_is_paired_with_the_token_that_follows() -> None:
    """The first position is left out, the last is followed by nothing; cuts don't matter."""
    tokens = torch.tensor([[3, 1, 2, 0, 1]])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    surprise = [-float(logits[at].log_softmax(-1)[tokens[0, at + 1]]) for at in (1, 2, 3)]
    for parts in ([5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]):
        seen = Divergence()
        compare(seen, logits.split(parts), logits.split(parts), tokens)
        assert seen.positions == 4
        assert seen.summary()["perplexity"] == pytest.approx(math.exp(sum(surprise) / 3), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 34, 65, 100])
def test_passes_are_read_back_from_their_codes(tokens: int) -> None:
    passes = STEPS.places(tokens)
    assert [token for first, last in passes for token in range(first, last)] == list(range(tokens))
    assert passes[0] == (0, 1)
    assert all(last - first <= MAX_DECODE_TOKENS for first, last in passes)
    prompt = PROMPT.places(tokens)
    assert [token for first, last in prompt for token in range(first, last)] == list(range(tokens))
    # But for the last one: what is fresh is exact to itself.
    assert all(last - first > MAX_DECODE_TOKENS for first, last in prompt[:-1])


def test_passes_over_the_native_cache_are_one_pass(model: Any) -> None:
    whole = logits_at_once(model, ids(70))
    passes = list(logits_in_passes(model, ids(70), DynamicCache(config=model.config)))
    assert [len(part) for part in passes] == [len(part) for part in split(whole)] == [1, 32, 32, 5]
    assert torch.allclose(torch.cat(passes), whole, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_errors_of_layers_by_hand(model: Any, attention: str) -> None:
    """V 1 % larger in one layer moves that layer's output by 1 % and, with exact inputs, no other's."""
    model.set_attn_implementation(attention)

    def larger(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value * 1.01 if layer == 1 else value

    nothing, one = layer_errors(model, ids(20), [lambda _, key, value: (key, value), larger])
    assert nothing == [0, 0, 0]
    assert one == pytest.approx([0, 0.01, 0], abs=1e-5)
    assert model.config._attn_implementation == attention


def test_a_model_runs_on_what_the_rounding_gives(model: Any) -> None:
    exact = logits_at_once(model, ids(20))
    with rounded(model, lambda _, key, value: (key, value)):
        assert torch.equal(logits_at_once(model, ids(20)), exact)
    with rounded(model, lambda _, key, value: (key, torch.zeros_like(value))):
        blind = logits_at_once(model, ids(20))
    assert not torch.allclose(blind, exact, atol=1e-2)
    # The last token alone decides when nothing is attended.
    with rounded(model, lambda _, key, value: (key, torch.zeros_like(value))):
        assert torch.allclose(logits_at_once(model, ids(20)[:, -1:])[0], blind[-1], atol=1e-4)
    assert torch.equal(logits_at_once(model, ids(20)), exact)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_group_that_is_not_full_is_seen_exact(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    exact = logits_at_once(model, ids(20))
    with rounded(model, lambda _, key, value: (key, value), 8):
        assert torch.allclose(logits_at_once(model, ids(20)), exact, atol=1e-4)
    with rounded(model, lambda _, key, value: (key, torch.zeros_like(value)), 8):
        blind = logits_at_once(model, ids(20))
    same = [torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(blind, exact, strict=True)]
    assert same == [True] * 8 + [False] * 12


def test_exact_keys_and_values_are_those_of_the_cache(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(20), past_key_values=cache, use_cache=True)
    seen = exact_keys_values(model, ids(20))
    assert len(seen) == 3
    for (key, value), layer in zip(seen, cache.layers, strict=True):
        assert torch.allclose(key, layer.keys, atol=1e-5)
        assert torch.allclose(value, layer.values, atol=1e-5)


def test_texts_are_compared_in_place_and_until_they_part() -> None:
    figures = agreement([1, 2, 3, 4], [9.0, 9.0, 0.05, 9.0], [1, 2, 7, 4])
    assert figures["equal_until"] == figures["first_difference"] == 2
    assert figures["equal_share"] == 0.75
    assert figures["gap"] == 0.05
    assert figures["gap_was_small"]
    assert not agreement([1, 2], [9.0, 9.0], [2, 2])["gap_was_small"]
    same = agreement([1, 2], [9.0, 9.0], [1, 2])
    assert (same["equal_until"], same["equal_share"], same["first_difference"], same["gap"]) == (2, 1.0, None, None)


def test_numbers_lie_at_their_depths() -> None:
    _, tokenizer = load("tiny", None)
    body = "A sentence of some length stands here. " * 200
    asked = needles(tokenizer, body, (0.0, 0.5, 1.0), 2000)
    places = []
    for needle in asked:
        assert len(needle.prompt) <= 2000
        text = tokenizer.decode(needle.prompt)
        assert text.count(needle.number) == 1
        places.append(text.index(needle.number) / len(text))
        assert needle.found_in(f" It is {needle.number}.")
        assert not needle.found_in(f"It is 1{needle.number}")
    assert places[0] < 0.2 < 0.4 < places[1] < 0.6 < 0.7 < places[2]
    assert len({needle.number for needle in asked}) == 3


def test_no_chat_template_no_needle() -> None:
    _, tokenizer = load("tiny", None)
    with pytest.raises(ValueError, match="no room"):
        needles(tokenizer, "A. B. " * 100, (0.5,), 64)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="refuses a system and a user message: System role not supported"):
        needles(tokenizer, "A. B. " * 100, (0.5,), 2000)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        needles(tokenizer, "A. B. " * 100, (0.5,), 2000)
