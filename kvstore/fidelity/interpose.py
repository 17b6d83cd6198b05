"""A model whose attention sees rounded K and V, and what that does to each layer's output."""

# ruff: noqa: SLF001  transformers has no public name for a config's attention implementation
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# (layer, K, V) -> K and V as they are read back; [rows, kv_heads, tokens, dim], K after RoPE.
Rounding = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# The arguments of an attention function, and the one before it.
_Attention = Callable[..., tuple[torch.Tensor, Any]]
_NAME = "fidelity_"


@contextmanager
def interposed(model: Any, attend: Callable[[_Attention, Any, Any, Any, Any, Any, Any], Any]) -> Iterator[None]:
    """While open, every layer's attention is attend(stock, module, query, key, value, mask, options)."""
    config = model.config
    previous = config._attn_implementation or "eager"

    def function(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return attend(_stock(previous, module), module, query, key, value, mask, options)

    name = _NAME + previous
    AttentionInterface.register(name, function)
    if previous in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = previous


@contextmanager
def rounded(model: Any, rounding: Rounding, group: int = 1) -> Iterator[None]:
    """While open, the model attends on rounded K and V. For whole windows in one pass without a cache: every token
    sees the tokens before it, and itself, rounded.

    With `group` > 1 so many tokens are rounded together, when the last of them is there: a token sees its own group
    exact, and the groups before it rounded.
    """

    def attend(stock: _Attention, module: Any, query: Any, key: Any, value: Any, mask: Any, options: Any) -> Any:
        old_key, old_value = rounding(module.layer_idx, key, value)
        if group == 1:
            return stock(module, query, old_key, old_value, mask, **options)
        parts = []
        for first in range(0, key.shape[2], group):
            last = min(first + group, key.shape[2])
            keys = torch.cat((old_key[:, :, :first], key[:, :, first:last]), dim=2)
            values = torch.cat((old_value[:, :, :first], value[:, :, first:last]), dim=2)
            seen = _causal(first, last, query) if mask is None else mask[..., first:last, :last]
            parts.append(stock(module, query[:, :, first:last], keys, values, seen, **options)[0])
        return torch.cat(parts, dim=1), None

    with interposed(model, attend):
        yield


@torch.no_grad()
def layer_errors(model: Any, ids: torch.Tensor, roundings: Sequence[Rounding]) -> list[list[float]]:
    """For each rounding: RMS of each layer's change of the attention output over the RMS of the output itself.

    Queries, keys and values are those of the exact run, so an error counts in its own layer only.
    """
    errors: list[dict[int, float]] = [{} for _ in roundings]

    def attend(stock: _Attention, module: Any, query: Any, key: Any, value: Any, mask: Any, options: Any) -> Any:
        result = stock(module, query, key, value, mask, **options)
        exact = result[0].double()
        for found, rounding in zip(errors, roundings, strict=True):
            other = stock(module, query, *rounding(module.layer_idx, key, value), mask, **options)[0]
            power = float(exact.square().sum())
            found[module.layer_idx] = (float((other.double() - exact).square().sum()) / power) ** 0.5 if power else 0.0
        return result

    with interposed(model, attend):
        model(input_ids=ids, use_cache=False)
    return [[found[layer] for layer in sorted(found)] for found in errors]


@torch.no_grad()
def exact_keys_values(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer of the exact run, [1, kv_heads, tokens, dim] each."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(stock: _Attention, module: Any, query: Any, key: Any, value: Any, mask: Any, options: Any) -> Any:
        seen[module.layer_idx] = (key, value)
        return stock(module, query, key, value, mask, **options)

    with interposed(model, attend):
        model(input_ids=ids, use_cache=False)
    return [seen[layer] for layer in sorted(seen)]


def _causal(first: int, last: int, like: torch.Tensor) -> torch.Tensor:
    """What tokens first … last - 1 see of tokens 0 … last - 1, as a mask to add: [1, 1, last - first, last]."""
    hidden = torch.full((last - first, last), -torch.inf, dtype=like.dtype, device=like.device)
    return hidden.triu(first + 1)[None, None]


def _stock(previous: str, module: Any) -> _Attention:
    if previous != "eager":
        found: _Attention = ALL_ATTENTION_FUNCTIONS[previous]
        return found
    # Eager attention isn't registered: each modeling file has its own.
    eager: _Attention = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    return eager
