"""Variants of a model whose keys are harder to quantize, made in memory. What isn't changed is shared with the model.

    plain   the model as it is
    bias    a large constant on the 3 slowest RoPE pairs of every KV head's keys, as trained Qwen models have it. RoPE
            turns it with the position, so the softmax changes a little: a variant is compared with itself, unquantized
    scaled  some RoPE pairs (fast, middle and slow ones, drawn for each KV head) of the keys times 30, and the same of
            the queries divided by 30: without a codec nothing changes

A RoPE pair is the channels (i, i + half) of a head, half being half the rotated channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvstore.bench.models import twin

BIAS = 100.0
SLOWEST_PAIRS = 3
SCALE = 30.0
PAIRS_OF_A_THIRD = 2
# Largest difference of two logits over the spread of all: rounding of fp32, with room.
LOSSLESS = 1e-3
_SEED = 20261202


class VariantError(Exception):
    """The model has no such variant; the text says why."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the variants must know of a model. `pairs` are the first channels of its RoPE pairs, fastest first."""

    heads: int
    kv_heads: int
    dim: int
    half: int
    pairs: tuple[int, ...]


def make_variant(name: str, model: Any) -> Any:
    """A variant by name, sharing all weights that it doesn't change. VariantError."""
    made = twin(model)
    if name == "plain":
        return made
    attentions = _attentions(made)
    shape = head_shape(made)
    generator = torch.Generator().manual_seed(_SEED)
    for attention in attentions:
        if name == "bias":
            attention.k_proj = _own(attention.k_proj)
            _add_bias(attention.k_proj, shape)
        elif name == "scaled":
            attention.k_proj, attention.q_proj = _own(attention.k_proj), _own(attention.q_proj)
            _scale(attention.k_proj, attention.q_proj, shape, generator)
        else:
            raise VariantError(f"unknown variant {name!r}")
    return made


def head_shape(model: Any) -> HeadShape:
    """Heads and RoPE pairs of a model. VariantError where they can't be told."""
    config = model.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    frequencies = [buffer.detach().cpu() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not frequencies:
        raise VariantError("the model has no rotary position embedding (no inv_freq)")
    if any(not torch.equal(frequencies[0], other) for other in frequencies[1:]):
        raise VariantError("the model's layers have different rotary position embeddings")
    pairs = tuple(int(pair) for pair in frequencies[0].argsort(descending=True))
    if 2 * len(pairs) > dim:
        raise VariantError(f"the model rotates {2 * len(pairs)} channels of heads of {dim}")
    return HeadShape(heads, kv_heads, dim, len(pairs), pairs)


@torch.no_grad()
def difference(plain: Any, variant: Any, ids: torch.Tensor) -> float:
    """Largest difference of two logits over their spread, unquantized. `ids` [1, tokens]."""
    ours, theirs = (model(input_ids=ids, use_cache=False).logits.float() for model in (variant, plain))
    return float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-12))


def check_lossless(name: str, found: float) -> None:
    """VariantError when a variant that should change nothing does."""
    if name != "bias" and not found <= LOSSLESS:
        raise VariantError(
            f"unquantized, its logits differ from the model's by {found:.2g} of their spread, expected at most "
            f"{LOSSLESS:g}: the model's RoPE pairs are others, or something stands between projection and attention"
        )


def _attentions(model: Any) -> list[Any]:
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "q_proj", None), nn.Linear)
        and isinstance(getattr(module, "k_proj", None), nn.Linear)
    ]
    if len(found) != model.config.num_hidden_layers:
        raise VariantError(f"{len(found)} of {model.config.num_hidden_layers} layers have linear q_proj and k_proj")
    if any(getattr(module, "q_norm", None) is not None for module in found):
        raise VariantError("its attention normalizes queries and keys after their projection, which undoes the change")
    return found


def _own(linear: nn.Linear) -> nn.Linear:
    """A copy with weights of its own."""
    copied = nn.Linear(
        linear.in_features, linear.out_features, linear.bias is not None, linear.weight.device, linear.weight.dtype
    )
    copied.load_state_dict(linear.state_dict())
    return copied.requires_grad_(linear.weight.requires_grad)


def _add_bias(k_proj: nn.Linear, shape: HeadShape) -> None:
    if k_proj.bias is None:
        k_proj.bias = nn.Parameter(k_proj.weight.new_zeros(k_proj.out_features))
    pairs = torch.tensor(shape.pairs[-SLOWEST_PAIRS:])
    channels = torch.cat((pairs, pairs + shape.half)).to(k_proj.weight.device)
    with torch.no_grad():
        k_proj.bias.view(shape.kv_heads, shape.dim)[:, channels] += BIAS


def _scale(k_proj: nn.Linear, q_proj: nn.Linear, shape: HeadShape, generator: torch.Generator) -> None:
    factors = torch.ones(shape.kv_heads, shape.dim)
    third = -(-len(shape.pairs) // 3)
    for head in range(shape.kv_heads):
        for first in range(0, len(shape.pairs), third):
            speed = torch.tensor(shape.pairs[first : first + third])
            chosen = speed[torch.randperm(len(speed), generator=generator)[:PAIRS_OF_A_THIRD]]
            factors[head, chosen] = SCALE
            factors[head, chosen + shape.half] = SCALE
    factors = factors.to(k_proj.weight.device)
    of_queries = 1 / factors.repeat_interleave(shape.heads // shape.kv_heads, dim=0)
    with torch.no_grad():
        for linear, factor in ((k_proj, factors), (q_proj, of_queries)):
            linear.weight.mul_(factor.reshape(-1, 1))
            if linear.bias is not None:
                linear.bias.mul_(factor.reshape(-1))
