"""One forward pass over fixed ids: gives the codec plan, and checks the shapes that the model's config promises."""

# ruff: noqa: ARG002  the arguments are those of transformers' Cache
from __future__ import annotations

import hashlib
import importlib.resources
import inspect
from dataclasses import replace
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
_SHAPE_TOKENS = 4
_SEED = 20261130
_TEXT = "calibration_text.txt"


class _ShapesCache(Cache):
    """Hands K and V through and keeps their shapes. For one forward pass without a past."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_ObservedLayer(self, layer) for layer in range(layers)])
        self.shapes: list[list[tuple[int, int, int]]] = [[] for _ in range(layers)]
        self.dtypes: set[torch.dtype] = set()

    def observe(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for tensor, name in ((key, "K"), (value, "V")):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise UnsupportedModelError(
                    f"layer {layer} caches {name} as {shape}: expected [rows, heads, tokens, dim]"
                )
        if key.shape[:3] != value.shape[:3]:
            raise UnsupportedModelError(
                f"layer {layer} caches K of shape {tuple(key.shape)} and V of shape {tuple(value.shape)}: expected "
                "equal heads and tokens"
            )
        self.shapes[layer].append((key.shape[1], key.shape[3], value.shape[3]))
        self.dtypes.add(key.dtype)


def with_real_shapes(model: PreTrainedModel, plan: ModelPlan) -> ModelPlan:
    """The plan with the heads and dims that the model really caches, seen in a pass over a few tokens.

    Raises UnsupportedModelError when layers differ, don't cache, or can't run on a cache that hands K and V through.
    """
    tokens = min(_SHAPE_TOKENS, plan.max_positions or _SHAPE_TOKENS)
    ids = torch.arange(tokens).remainder(vocabulary_of(model)).view(1, -1).to(plan.device)
    cache = _ShapesCache(plan.layers)
    try:
        with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{plan.name}: {error}") from error
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{plan.name} ({model.config.model_type}) does not run on a cache of keys and values alone "
            f"({type(error).__name__}: {error}); use its native cache, or a model that transformers itself implements"
        ) from error
    wrong = [layer for layer, seen in enumerate(cache.shapes) if len(seen) != 1]
    if wrong:
        raise UnsupportedModelError(
            f"{plan.name} ({model.config.model_type}): layers {wrong} updated the cache "
            f"{[len(cache.shapes[layer]) for layer in wrong]} times in one forward pass; expected once each. Remote "
            "code that keeps its own cache can't be served: use the model's implementation in transformers"
        )
    shapes = {seen[0] for seen in cache.shapes}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{plan.name}: its layers cache K and V of different shapes, (heads, K dim, V dim) {sorted(shapes)}; this "
            "version needs all layers alike"
        )
    if cache.dtypes != {model.dtype}:
        raise UnsupportedModelError(f"{plan.name} caches K in {cache.dtypes}; the model's dtype is {model.dtype}")
    heads, k_dim, v_dim = shapes.pop()
    return replace(plan, kv_heads=heads, k_dim=k_dim, v_dim=v_dim)


class _ObservedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # untyped __init_subclass__
    is_sliding = False

    def __init__(self, observed: _ObservingCache | _ShapesCache, layer: int) -> None:
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
    last: dict[str, Any] = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    )
    with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
        model(input_ids=ids.to(plan.device), past_key_values=cache, use_cache=True, **last)
    wrong = [layer for layer, count in enumerate(cache.seen) if count != 1]
    if wrong:
        raise UnsupportedModelError(
            f"{plan.name}: layers {wrong} updated the cache {[cache.seen[layer] for layer in wrong]} times in one "
            "forward pass; expected once each"
        )
    return calibrator.finish(origin)
