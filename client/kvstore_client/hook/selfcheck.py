"""Compares an attached model with itself on the native cache, before the first token counts."""

from __future__ import annotations

import inspect

import torch
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.layout import BlockLayout
from transformers import DynamicCache, PreTrainedModel

from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.errors import SelfCheckError
from kvstore_client.hook.local import LocalRequest
from kvstore_client.hook.plan import ModelPlan, vocabulary_of
from kvstore_client.hook.rows import BlockPool
from kvstore_client.hook.state import CacheState
from kvstore_client.namespace import FINGERPRINT_BYTES, ModelIdentity, Namespace, Shard

_LENGTHS = (11, 7)
_STEPS = 3
# Largest difference of two logits, as a part of the logits' own spread. Rounding in the model's dtype, with room: a
# wrong position, scale or mask moves logits by about their spread.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}


def layout_of(plan: ModelPlan, codec: str) -> BlockLayout:
    """The block layout of a model under a codec."""
    return BlockLayout.create(
        codec, layers=plan.layers, kv_heads=plan.kv_heads, k_dim=plan.k_dim, v_dim=plan.v_dim, dtype=plan.dtype
    )


def local_cache(plan: ModelPlan, codec_plan: CodecPlan, *, max_blocks: int = 64) -> KVStoreCache:
    """An empty cache in this process's memory, without a store."""
    layout = layout_of(plan, codec_plan.codec)
    identity = ModelIdentity(
        fingerprint=bytes(FINGERPRINT_BYTES),
        model_name=plan.name,
        codec=codec_plan.codec,
        layout=layout,
        shard=Shard(plan.layer_group, 0, plan.kv_heads),
    )
    request = LocalRequest(layout, max_blocks=max_blocks, device=plan.device)
    pool = BlockPool(request, Namespace(identity, codec_plan), plan.device)
    return KVStoreCache(CacheState(pool, gathers=bool(plan.gathers)))


def self_check(model: PreTrainedModel, plan: ModelPlan) -> float:
    """Two rows of different length, prefill and a few steps, exact blocks against the native cache.

    Returns the largest difference of two logits over the logits' spread; raises SelfCheckError if it is too large.
    """
    vocabulary = vocabulary_of(model)
    longest = min(max(_LENGTHS), max(2, (plan.max_positions or 64) - _STEPS))
    lengths = [min(length, longest) for length in _LENGTHS]
    lengths[1] = longest if plan.gathers else max(1, longest - 4)
    ids = torch.arange(2 * longest).mul(7919).add(13).remainder(vocabulary).view(2, longest)
    mask = torch.ones(2, longest, dtype=torch.int64)
    mask[1, : longest - lengths[1]] = 0
    ids, mask = ids.to(plan.device), mask.to(plan.device)
    limit = _TOLERANCE[model.dtype]
    by_step = _differences(model, plan, ids, mask)
    # As torch has it: NaN is the largest.
    largest = float(torch.tensor(by_step).max())
    if not largest <= limit:
        # Whether it comes again tells a wrong attention from a fault of the moment.
        again = _differences(model, plan, ids, mask)
        raise SelfCheckError(
            f"{plan.name}: logits with the cache's attention differ from the native ones by {largest:.2g} of their "
            f"spread; expected at most {limit:.2g}. This model's attention is not served by this version "
            f"(prompt and steps: {_listed(by_step)}; once more: {_listed(again)}; {torch.get_num_threads()} threads)"
        )
    return largest


def _differences(model: PreTrainedModel, plan: ModelPlan, ids: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """Of the prompt's logits and of each step's: the largest difference, over the spread of all."""
    with torch.no_grad(), local_cache(plan, CodecPlan("passthrough", {}, "self-check")) as ours:
        native = DynamicCache(config=model.config)
        expected, chosen = _run(model, ids, mask, native, None)
        found, _ = _run(model, ids, mask, ours, chosen)
    spread = float(torch.cat(expected).float().std()) or 1.0
    # NaN stays NaN here, and is never within a limit.
    return [
        float((theirs.float() - mine.float()).abs().max()) / spread
        for theirs, mine in zip(expected, found, strict=True)
    ]


def _listed(differences: list[float]) -> str:
    return ", ".join(f"{difference:.2g}" for difference in differences)


def _run(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: DynamicCache | KVStoreCache,
    forced: list[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    logits: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for step in range(_STEPS):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        placed = {"position_ids": positions} if takes_positions else {}
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **placed)
        # Padding has no defined logits.
        logits.append(out.logits[mask[:, -ids.shape[1] :].bool()])
        ids = out.logits[:, -1:].argmax(-1) if forced is None else forced[step]
        chosen.append(ids)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    return logits, chosen
