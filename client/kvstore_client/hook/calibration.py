"""One forward pass over fixed ids: gives the codec plan, and checks the shapes that the model's config promises."""

# ruff: noqa: ARG002  the arguments are those of transformers' Cache
from __future__ import annotations

import hashlib
import importlib.resources
from typing import Any

import numpy as np
import torch
from kvstore_kernels.codecs.calibrate import Calibrator
from kvstore_kernels.codecs.plan import CodecPlan
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvstore_client.hook.errors import UnsupportedModelError
from kvstore_client.hook.plan import ModelPlan, vocabulary_of

CALIBRATION_TOKENS = 1024
_SEED = 20261130
_TEXT = "calibration_text.txt"


class _ObservedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # untyped __init_subclass__
    is_sliding = False

    def __init__(self, observed: _ObservingCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._observed = observed
        self._layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._observed.observe(self._layer, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _ObservingCache(Cache):
    """Hands K and V through and keeps only what the calibrator makes of them. For one forward pass without a past."""

    def __init__(self, plan: ModelPlan, calibrator: Calibrator) -> None:
        super().__init__(layers=[_ObservedLayer(self, layer) for layer in range(plan.layers)])
        self._plan = plan
        self._calibrator = calibrator
        self.seen = [0] * plan.layers

    def observe(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        plan = self._plan
        for name, tensor, dim in (("K", key, plan.k_dim), ("V", value, plan.v_dim)):
            found = (tensor.shape[1], tensor.shape[3])
            if found != (plan.kv_heads, dim):
                raise UnsupportedModelError(
                    f"{plan.name}: layer {layer} has {name} of {found[0]} heads of {found[1]}; its config says "
                    f"{plan.kv_heads} heads of {dim}, and this version needs all layers alike"
                )
        if str(key.dtype).removeprefix("torch.") != plan.dtype:
            raise UnsupportedModelError(
                f"{plan.name}: layer {layer} computes K in {key.dtype}; the model's dtype is {plan.dtype}"
            )
        self._calibrator.observe(layer, key.detach())
        self.seen[layer] += 1


def calibration_ids(vocabulary: int, tokens: int, tokenizer: Any) -> tuple[torch.Tensor, str]:
    """int64 [1, tokens] and where they come from: the shipped text through `tokenizer`, else a fixed seed."""
    if tokenizer is not None:
        text = importlib.resources.files(__package__).joinpath(_TEXT).read_text(encoding="utf-8")
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if ids and max(ids) < vocabulary:
            repeated = (ids * -(-tokens // len(ids)))[:tokens]
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            return torch.tensor([repeated], dtype=torch.int64), f"text {digest}, {tokens} tokens"
    # numpy's bit stream is fixed by its documentation, torch's isn't.
    drawn = np.random.Generator(np.random.PCG64(_SEED)).integers(0, vocabulary, size=tokens, dtype=np.int64)
    return torch.from_numpy(drawn).view(1, -1), f"ids drawn with seed {_SEED}, {tokens} tokens"


def calibrate(model: PreTrainedModel, plan: ModelPlan, codec: str, tokenizer: Any = None) -> CodecPlan:
    """Runs the model once, without gradients, on its own attention; deterministic for one model and tokenizer.

    Raises UnsupportedModelError when layers have other shapes than the config says, or not every layer has a cache.
    """
    tokens = CALIBRATION_TOKENS if codec != "passthrough" else 8
    if plan.max_positions:
        tokens = min(tokens, plan.max_positions)
    vocabulary = vocabulary_of(model)
    ids, origin = calibration_ids(vocabulary, tokens, tokenizer)
    calibrator = Calibrator(codec, layers=plan.layers, kv_heads=plan.kv_heads, k_dim=plan.k_dim)
    cache = _ObservingCache(plan, calibrator)
    # A plan made under autocast would be another one than the other workers'.
    with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
        model(input_ids=ids.to(plan.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    wrong = [layer for layer, count in enumerate(cache.seen) if count != 1]
    if wrong:
        raise UnsupportedModelError(
            f"{plan.name}: layers {wrong} updated the cache {[cache.seen[layer] for layer in wrong]} times in one "
            "forward pass; expected once each"
        )
    return calibrator.finish(origin)
