"""The exact K and V of a prompt's first token, for codecs that serve it exactly.

Attention leans on the first token more than on any other, and its K and V depend on nothing but itself: a worker that
finds a prompt in the store computes them in a pass over one token, once for each token that prompts begin with.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

# [kv_heads, k_dim] and [kv_heads, v_dim] of each layer, in the model's dtype.
FirstKV = list[tuple[torch.Tensor, torch.Tensor]]
# Prompts of one model begin with one token, or with few.
_KEPT = 64


class FirstTokens:
    """K and V of first tokens of one model. Bounded; safe from several threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, int], FirstKV] = OrderedDict()

    def of(self, fingerprint: bytes, token: int) -> FirstKV:
        """Of the model that has this fingerprint now; one forward pass if the token is new."""
        with self._lock:
            found = self._known.get((fingerprint, token))
            if found is not None:
                self._known.move_to_end((fingerprint, token))
                return found
        computed = self._compute(token)
        with self._lock:
            self._known[fingerprint, token] = computed
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return computed

    def __len__(self) -> int:
        return len(self._known)

    def _compute(self, token: int) -> FirstKV:
        cache: Any = DynamicCache()
        ids = torch.tensor([[token]], device=self._model.device)
        with torch.no_grad(), torch.autocast(self._model.device.type, enabled=False):
            self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys[0, :, 0].clone(), layer.values[0, :, 0].clone()) for layer in cache.layers]
