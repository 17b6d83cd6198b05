"""Which codec each layer of a model gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from kvstore_kernels.codecs import CodecPlan, names
from kvstore_kernels.errors import LayoutError, PlanError
from kvstore_kernels.layout import codec_of_layers, codecs_by_layer
from transformers import PreTrainedModel

from kvstore_client.hook.calibration import calibrate
from kvstore_client.hook.errors import AttachError
from kvstore_client.hook.plan import ModelPlan
from kvstore_client.hook.probe import cheapest, measure_layers
from kvstore_client.hook.selfcheck import layout_of
from kvstore_client.hook.streams import on_device
from kvstore_client.plans import NOISE_LIMIT, read_plan

if TYPE_CHECKING:
    from kvstore_client.hook.seam import StoreLike


LAYER_ERROR = "layer_error"
"""Tensor of a codec plan: what the codec of each layer changed of its attention output where it was chosen [layers]."""
HEADROOM = 1.1
"""What a bound leaves to other texts: their noisiest blocks have some percent more noise than the measured one's, and a
block that misses the bound ends what can be shared of its text.
"""
_LARGEST = torch.finfo(torch.float32).max


class Choice(NamedTuple):
    """The layout's codec; where it was chosen by measuring, each layer's error and the codec plan made for that."""

    codec: str
    errors: list[float]
    plan: CodecPlan | None


def choose(
    store: StoreLike,
    fingerprint: bytes,
    model: PreTrainedModel,
    plan: ModelPlan,
    tokenizer: Any,
    *,
    codec: str,
    overrides: Mapping[int, str] | None,
    max_error: float | None,
) -> Choice:
    """What attach() was asked for. A choice for a bound that somebody made for these weights (`fingerprint`) is
    adopted: nothing is measured then. Raises AttachError, UnsupportedModelError.
    """
    if max_error is None:
        return Choice(choose_codecs(plan, codec, overrides), [], None)
    if not 0 <= max_error < 1:
        raise AttachError(f"max_error={max_error!r}: expected a part of the attention output, from 0 to below 1")
    if overrides or codec != "int8":
        raise AttachError(
            f"max_error={max_error!r} with codec={codec!r} and overrides={overrides!r}: it chooses the codecs, so "
            "leave those two out"
        )
    for data in store.named_plans(fingerprint, bound_name(max_error)):
        adopted = _adopted(data, plan, max_error)
        if adopted is not None:
            return adopted
    with on_device(plan.device):
        return measured(model, plan, tokenizer, max_error)


def bound_name(max_error: float, codec: str = "") -> str:
    """What a plan for a bound is kept under; with `codec`, one whose codec wasn't chosen for these weights."""
    name = f"max_error={float(max_error)!r}"
    return f"{name} {hashlib.sha256(codec.encode()).hexdigest()[:16]}" if codec else name


def measured(model: PreTrainedModel, plan: ModelPlan, tokenizer: Any, max_error: float, codec: str = "") -> Choice:
    """Measures the codecs (of a `codec` that stays, those it has), and makes the plan for the bound."""
    fixed = codecs_by_layer(codec, plan.layers) if codec else None
    calibrated = calibrate(model, plan, "int8", tokenizer)
    found = measure_layers(model, plan, calibrated, [n for n in names() if fixed is None or n in fixed], tokenizer)
    if fixed is None:
        by_layer, errors = cheapest(found.errors, max_error / HEADROOM)
    else:
        by_layer, errors = list(fixed), [found.errors[name][layer] for layer, name in enumerate(fixed)]
    # Noise and error grow alike: a block of the text may have so many times its noise until it would miss the bound.
    limits = torch.stack([found.noise[name][layer] for layer, name in enumerate(by_layer)])
    stated = torch.tensor(errors).nan_to_num(nan=_LARGEST)
    factors = torch.where(stated > 0, max_error / stated, torch.ones_like(stated))
    limits = (limits * factors[:, None]).clamp_(max=_LARGEST)
    chosen = codec_of_layers(by_layer)
    tensors = {} if chosen == "passthrough" else dict(calibrated.tensors)
    tensors |= {LAYER_ERROR: stated, NOISE_LIMIT: limits}
    return Choice(chosen, errors, CodecPlan(chosen, tensors, calibrated.origin))


def _adopted(data: bytes, plan: ModelPlan, max_error: float) -> Choice | None:
    """The choice in a kept plan, if it is one for this model that holds the bound."""
    try:
        kept = CodecPlan.from_bytes(data)
        errors = kept.tensor(LAYER_ERROR, (plan.layers,))
        by_layer = codecs_by_layer(kept.codec, plan.layers)
        sound = read_plan(data, layout_of(plan, kept.codec)) is not None and NOISE_LIMIT in kept.tensors
    except (LayoutError, PlanError):
        return None
    # What passthrough changes is rounding, whatever the bound.
    exact = torch.tensor([name == "passthrough" for name in by_layer])
    if not sound or not bool(((errors <= max_error * (1 + 1e-6)) | exact).all()):
        return None
    return Choice(kept.codec, errors.tolist(), kept)


def choose_codecs(plan: ModelPlan, codec: str, overrides: Mapping[int, str] | None) -> str:
    """The layout's codec: `codec` for every layer but those in `overrides` (negative: from the last). AttachError."""
    try:
        chosen = list(codecs_by_layer(codec, plan.layers))
        for layer, name in (overrides or {}).items():
            if not -plan.layers <= layer < plan.layers:
                raise AttachError(
                    f"layer {layer} in overrides={dict(overrides or {})!r}: {plan.name} has {plan.layers} layers, so "
                    f"expected {-plan.layers} to {plan.layers - 1}"
                )
            chosen[layer] = codecs_by_layer(name, 1)[0]
    except LayoutError as error:
        raise AttachError(f"codec={codec!r}, overrides={overrides!r}: {error}") from error
    return codec_of_layers(chosen)
