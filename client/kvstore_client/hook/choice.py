"""Which codec each layer of a model gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore_kernels.codecs import CodecPlan, names
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import codec_of_layers, codecs_by_layer
from transformers import PreTrainedModel

from kvstore_client.hook.calibration import calibrate
from kvstore_client.hook.errors import AttachError
from kvstore_client.hook.plan import ModelPlan
from kvstore_client.hook.probe import cheapest, layer_errors
from kvstore_client.hook.streams import on_device


class Choice(NamedTuple):
    """The layout's codec; where it was chosen by measuring, each layer's error and the calibration made for that."""

    codec: str
    errors: list[float]
    calibrated: CodecPlan | None


def choose(
    model: PreTrainedModel,
    plan: ModelPlan,
    tokenizer: Any,
    *,
    codec: str,
    overrides: Mapping[int, str] | None,
    max_error: float | None,
) -> Choice:
    """What attach() was asked for. Raises AttachError, UnsupportedModelError."""
    if max_error is None:
        return Choice(choose_codecs(plan, codec, overrides), [], None)
    if not 0 <= max_error < 1 or overrides or codec != "int8":
        raise AttachError(
            f"max_error={max_error!r} with codec={codec!r} and overrides={overrides!r}: expected a part from 0 to "
            "below 1, and no codec beside it: it chooses them"
        )
    with on_device(plan.device):
        calibrated = calibrate(model, plan, "int8", tokenizer)
        errors = layer_errors(model, plan, calibrated, names(), tokenizer)
    by_layer, stated = cheapest(errors, max_error)
    chosen = codec_of_layers(by_layer)
    tensors = {} if chosen == "passthrough" else calibrated.tensors
    return Choice(chosen, stated, CodecPlan(chosen, tensors, calibrated.origin))


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
