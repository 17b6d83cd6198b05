"""Shapes of the K and V of models: a few by name, any other from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_kernels.layout import MAX_HEAD_DIM, MODEL_DTYPES

from kvstore.bench.shapes import SHAPES
from kvstore.demo.errors import OptionError

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_WINDOWED = ("sliding_attention", "chunked_attention")
_REMEDY = "give a folder of a model with plain K and V, or one of"
# Fields of models that keep something else than K and V of every layer and head.
_OTHER_CACHES = {
    "text_config": "a model of several parts: give the folder of its text model",
    "kv_lora_rank": "latent attention",
    "num_kv_shared_layers": "layers that share the K and V of others",
    "is_encoder_decoder": "an encoder-decoder",
    "multi_query": "one head of K and V whatever the other fields say",
}


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of a model. `windowed` of its layers look back `window` tokens only; `note` is for the reader."""

    name: str
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str = "bfloat16"
    windowed: int = 0
    window: int = 0
    note: str = ""

    @property
    def numbers(self) -> int:
        """Numbers of one token's K and V, all layers."""
        return self.layers * self.kv_heads * (self.k_dim + self.v_dim)


def named_shapes() -> dict[str, KVShape]:
    """The shapes that have a name, in the order of the table."""
    seed = SHAPES["seed"]
    head_dim = seed.hidden // seed.heads
    shapes = (
        KVShape("seed", seed.layers, seed.heads, head_dim, head_dim, seed.dtype),
        KVShape("llama-3-8b", 32, 8, 128, 128),
        KVShape("qwen2.5-0.5b", 24, 2, 64, 64),
        KVShape("smollm2-135m", 30, 3, 64, 64),
        KVShape("gemma-3-270m", 18, 1, 256, 256, windowed=15, window=512),
    )
    return {shape.name: shape for shape in shapes}


def shapes_for(model: str) -> tuple[KVShape, ...]:
    """The shape called `model`, or that of the model in the folder `model`; all named ones when empty. OptionError."""
    named = named_shapes()
    if not model:
        return tuple(named.values())
    if model.lower() in named:
        return (named[model.lower()],)
    if not Path(model).is_dir():
        raise OptionError(
            f"MODEL {model}: that is neither a folder nor a named shape; expected a transformers folder with "
            f"config.json, or one of {', '.join(named)}: correct it, or leave it out for all of these"
        )
    return (read_shape(Path(model)),)


def read_shape(folder: Path) -> KVShape:
    """The shape in a folder's config.json; weights are not looked at. OptionError names what is missing or wrong."""
    config = _read(folder)
    for field, meaning in _OTHER_CACHES.items():
        if config.get(field):
            raise _wrong(folder, f"{field} is set: {meaning}; expected a decoder with K and V in all layers and heads")
    layers, heads = _number(folder, config, _LAYERS), _number(folder, config, _HEADS)
    kv_heads = _number(folder, config, ("num_key_value_heads",)) if config.get("num_key_value_heads") else heads
    if config.get("head_dim"):
        head_dim = _number(folder, config, ("head_dim",))
    else:
        head_dim = _number(folder, config, _HIDDEN) // heads
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise _wrong(folder, f"a head has {head_dim} channels; expected 1 to {MAX_HEAD_DIM}")
    kinds = _layer_kinds(folder, config, layers)
    windowed = sum(kind in _WINDOWED for kind in kinds)
    window = config.get("attention_chunk_size" if "chunked_attention" in kinds else "sliding_window")
    dtype, note = _dtype(folder, config)
    return KVShape(
        folder.resolve().name,
        layers,
        kv_heads,
        head_dim,
        head_dim,
        dtype,
        windowed,
        window if windowed and isinstance(window, int) else 0,
        note,
    )


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise _wrong(folder, "there is no config.json; expected the folder of a transformers model")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(folder, f"config.json can't be read ({error}); expected what save_pretrained() writes") from None
    if not isinstance(config, dict):
        raise _wrong(folder, f"config.json holds a {type(config).__name__}; expected an object of fields")
    return config


def _number(folder: Path, config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of the fields that is there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _wrong(folder, f"{name} is {value!r}; expected a whole number of at least 1")
        return value
    raise _wrong(folder, f"config.json has no {names[0]}; expected a decoder with attention layers")


def _layer_kinds(folder: Path, config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer, from `layer_types` or from the fields that imply it, as the hook of the client does."""
    kinds = config.get("layer_types")
    if kinds is None:
        if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
            return ["sliding_attention"] * layers
        if config.get("attention_chunk_size") is not None:
            return ["chunked_attention"] * layers
        return ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _wrong(folder, f"layer_types is not a list of {layers} kinds; expected one a layer")
    for kind in kinds:
        if kind not in ("full_attention", *_WINDOWED):
            raise _wrong(folder, f"it has layers of type {kind!r}; expected attention in all layers")
    return kinds


def _dtype(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The dtype of K and V, and what to say about it."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is None:
        return "bfloat16", "config.json names no dtype: bfloat16 is assumed"
    if dtype not in MODEL_DTYPES:
        raise _wrong(folder, f"dtype is {dtype!r}; expected one of {', '.join(MODEL_DTYPES)}")
    return str(dtype), ""


def _wrong(folder: Path, what: str) -> OptionError:
    return OptionError(f"MODEL {folder}: {what}. To go on, {_REMEDY} {', '.join(named_shapes())}")
