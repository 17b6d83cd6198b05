"""Which codec each layer of a model gets."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import codec_of_layers, codecs_by_layer

from kvstore_client.hook.errors import AttachError
from kvstore_client.hook.plan import ModelPlan


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
