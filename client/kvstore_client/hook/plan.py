"""What the hook must know of a model before the first token, and the models it refuses by name and reason."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvstore_client.hook.errors import UnsupportedModelError

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# A layer with a window keeps all its tokens, too: its attention looks at the last ones.
_SERVED_LAYERS = ("full_attention", "sliding_attention")
_ROPE_WITH_REGIMES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Shapes, limits and device of a model that can be served. `max_positions` is 0 when the config has no limit.

    `gathers` says why the model's own attention computes on K and V that are dequantized for it; empty where the cache
    attends on its blocks.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    max_positions: int
    device: torch.device
    gathers: str = ""

    @property
    def layer_group(self) -> str:
        """Name of its one layer group."""
        return f"full:0-{self.layers - 1}"


def model_name(model: PreTrainedModel) -> str:
    """A name for people: where the model came from, else its class."""
    return str(model.config.name_or_path or type(model).__name__)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of token ids the model embeds."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.num_embeddings)


def layer_types(config: Any) -> list[str]:
    """The kind of each layer, from `layer_types` or from the fields that imply it."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [str(kind) for kind in types]
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    return [kind] * int(config.num_hidden_layers)


def check_ready(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError while the model is in a state for training."""
    name = model_name(model)
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode; the cache is for inference only: call model.eval()")
    if getattr(model, "is_gradient_checkpointing", False):
        raise UnsupportedModelError(
            f"{name} has gradient checkpointing on; the cache is for inference only: "
            "call model.gradient_checkpointing_disable()"
        )


def model_plan(model: Any) -> ModelPlan:
    """The plan of a model that this version serves exactly. Raises UnsupportedModelError naming model and reason."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers PreTrainedModel; a PEFT wrapper's prompt tokens are not "
            "covered by the cache's digests: attach model.get_base_model() (LoRA stays active in it)"
        )
    name = model_name(model)
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} ({config.model_type}) is an encoder-decoder; only decoders are served")
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no generate(): use its ...ForCausalLM class")
    check_ready(model)
    _check_layers(name, config)
    _check_attention(name, model)
    device = _device_of(name, model)
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return ModelPlan(
        name=name,
        layers=int(config.num_hidden_layers),
        query_heads=int(config.num_attention_heads),
        kv_heads=heads,
        k_dim=head_dim,
        v_dim=head_dim,
        dtype=_DTYPES[model.dtype],
        max_positions=_max_positions(config),
        device=device,
        gathers=_own_attention(model),
    )


def _max_positions(config: Any) -> int:
    """What a config calls the longest sequence; 0 if it says nothing."""
    for name in ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _check_layers(name: str, config: Any) -> None:
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is multimodal: its keys depend on more than token ids, which this version "
            "doesn't cover; attach a text model"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): {config.num_kv_shared_layers} layers share the K and V of others, "
            "which this version doesn't serve"
        )
    if not getattr(config, "num_hidden_layers", None) or not getattr(config, "num_attention_heads", None):
        raise UnsupportedModelError(f"{name} ({config.model_type}) has no attention layers in its config")
    for index, kind in enumerate(layer_types(config)):
        if kind not in _SERVED_LAYERS:
            raise UnsupportedModelError(
                f"{name} ({config.model_type}): layer {index} is {kind}; this version serves models whose layers are "
                f"all {' or '.join(_SERVED_LAYERS)}"
            )
    rope = getattr(config, "rope_parameters", None)
    regimes = [rope] if isinstance(rope, dict) and "rope_type" in rope else list((rope or {}).values())
    for parameters in regimes:
        rope_type = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if rope_type in _ROPE_WITH_REGIMES:
            raise UnsupportedModelError(
                f"{name} ({config.model_type}) has RoPE of type {rope_type!r}: its keys depend on the sequence's final "
                "length, so blocks can't be shared"
            )


def _check_attention(name: str, model: PreTrainedModel) -> None:
    kind = model.config.model_type
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} ({kind}) has recurrent state, which this version doesn't serve")
    implementation = str(model.config._attn_implementation or "eager")  # noqa: SLF001  no public name
    if "flash" in implementation or "flex" in implementation or "paged" in implementation:
        raise UnsupportedModelError(
            f"{name} runs with attention {implementation!r}, whose calls the hook can't pass on: "
            "call model.set_attn_implementation('sdpa') first"
        )
    chosen = getattr(model.generation_config, "cache_implementation", None)
    if chosen not in (None, "dynamic", "hybrid"):
        raise UnsupportedModelError(
            f"{name} has generation_config.cache_implementation {chosen!r}, which chooses another cache: set it to None"
        )


def _own_attention(model: PreTrainedModel) -> str:
    """Why the cache can't compute this model's attention, but the model itself on tensors; empty if it can."""
    if not getattr(model, "_supports_attention_backend", False):
        return "it has attention code of its own instead of transformers' attention interface"
    if getattr(model.config, "kv_lora_rank", None):
        return "it caches latents, which it expands for its attention"
    if getattr(model.config, "reorder_and_upcast_attn", False):
        return "it has reorder_and_upcast_attn, which the cache's attention hasn't"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids, so padded rows can't be given their own positions"
    return ""


def _device_of(name: str, model: PreTrainedModel) -> torch.device:
    """The one device that all parameters lie on."""
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{name} has parameters on {', '.join(devices)}; this version serves models that lie on one device: load "
            f"it with device_map={devices[-1]!r}, or call model.to({devices[-1]!r})"
        )
    device = torch.device(devices[0])
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(
            f"{name} has its parameters on {device}; this version serves models on the CPU or on one CUDA device: "
            "load its weights there before attach()"
        )
    if model.dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{name} has dtype {model.dtype}; expected float32, bfloat16 or float16: model.to(torch.bfloat16)"
        )
    return device
