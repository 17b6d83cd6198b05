"""A codec of ours, measured through the product: a model attached to an embedded store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvstore.bench.models import twin
from kvstore.demo.arms import SharedArm
from kvstore.fidelity.interpose import Rounding
from kvstore.fidelity.measures import Cut, logits_in_passes


def open_store(device: str) -> Any:
    """A store with a service of its own on `device`."""
    from kvstore_client import connect

    return connect("embedded", name="fidelity", required=True, device=device)


class Ours:
    """One codec on one variant of a model. Attaching calibrates the codec, on a text of the client's own."""

    def __init__(self, store: Any, model: Any, tokenizer: Any, codec: str) -> None:
        self.codec = codec
        self.model = twin(model)
        self.arm = SharedArm(store, self.model, tokenizer, codec)

    @property
    def bits(self) -> float:
        """Bits of a block a number in it, K and V together."""
        return float(self.arm.attachment.namespace().layout.bits)

    @property
    def origin(self) -> str:
        """What the codec was calibrated on."""
        return str(self.arm.attachment.namespace().plan.origin)

    def logits(self, ids: torch.Tensor, cut: Cut) -> Iterator[torch.Tensor]:
        """Logits of a window, pass by pass."""
        with self.arm.attachment.cache(ids[:, :1]) as cache:
            yield from logits_in_passes(self.model, ids, cache, cut)

    def rounding(self, exact: list[tuple[torch.Tensor, torch.Tensor]], ids: torch.Tensor) -> Rounding:
        """What the cache gives back when these K and V of the layers, of `ids` [1, tokens], are written to it."""
        with torch.no_grad(), self.arm.attachment.cache(ids[:, :1]) as cache:
            for layer, (key, value) in enumerate(exact):
                cache.update(key, value, layer)
            read = [cache.read(layer) for layer in range(len(exact))]

        def look_up(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return read[layer][0].to(key), read[layer][1].to(value)

        return look_up

    def close(self) -> None:
        """Detaches the model."""
        self.arm.attachment.detach()
