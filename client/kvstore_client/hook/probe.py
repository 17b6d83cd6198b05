"""What each codec would change in each layer of a model, measured on the model's own keys, values and queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kvstore_kernels.attention.decode import decode_attention
from kvstore_kernels.attention.prefill import prefill_attention
from kvstore_kernels.codecs import Codec, CodecPlan, make_codec, names
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.noise import block_noise
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvstore_client.hook import attention
from kvstore_client.hook.calibration import CALIBRATION_TOKENS, calibration_ids
from kvstore_client.hook.errors import UnsupportedModelError
from kvstore_client.hook.plan import ModelPlan, vocabulary_of
from kvstore_client.hook.step import MAX_DECODE_TOKENS, Stored

PROBE_TOKENS = 512
# Queries are compared at the ends of this many equal parts of the text: over short histories and long ones, and at
# different places inside a block.
_PARTS = 5


class Measured(NamedTuple):
    """By codec. `errors` of each layer: RMS of what the codec changes of the attention output, over the output's own
    RMS. `noise` of each layer: what the noisiest block has for K and V, float32 [layers, 2].
    """

    errors: dict[str, list[float]]
    noise: dict[str, torch.Tensor]


def layer_errors(
    model: PreTrainedModel, plan: ModelPlan, calibrated: CodecPlan, codecs: Sequence[str], tokenizer: Any = None
) -> dict[str, list[float]]:
    """The errors that `measure_layers` finds."""
    return measure_layers(model, plan, calibrated, codecs, tokenizer).errors


def measure_layers(
    model: PreTrainedModel, plan: ModelPlan, calibrated: CodecPlan, codecs: Sequence[str], tokenizer: Any = None
) -> Measured:
    """What each codec would change in each layer.

    One forward pass over text that follows the calibration's, everything exact; each layer's K and V are stored by each
    codec beside it, and its queries attend on them as decode steps do. `calibrated` holds the calibration tensors.
    Deterministic for one model and tokenizer.
    """
    tokens = min(PROBE_TOKENS, plan.max_positions or PROBE_TOKENS)
    ids, _ = calibration_ids(vocabulary_of(model), CALIBRATION_TOKENS + PROBE_TOKENS, tokenizer)
    probe = _Probe(plan, calibrated, codecs)
    attention.install(model.config)
    try:
        with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
            part = ids[:, CALIBRATION_TOKENS : CALIBRATION_TOKENS + tokens].to(plan.device)
            model(input_ids=part, past_key_values=_ProbingCache(probe, plan.layers), use_cache=True, logits_to_keep=1)
    finally:
        attention.uninstall(model.config)
    unseen = [layer for layer in range(plan.layers) if layer not in probe.seen]
    if unseen:
        raise UnsupportedModelError(f"{plan.name}: layers {unseen} didn't call the attention function: no error known")
    return Measured(probe.errors, probe.noise)


def cheapest(errors: dict[str, list[float]], max_error: float) -> tuple[list[str], list[float]]:
    """The smallest codec of each layer whose error is at most `max_error` (else passthrough), and their errors."""
    layers = len(next(iter(errors.values())))
    order = [name for name in reversed(names()) if name in errors]
    chosen, stated = [], []
    for layer in range(layers):
        fits = (name for name in order if errors[name][layer] <= max_error)
        name = next(fits, "passthrough")
        chosen.append(name)
        stated.append(errors[name][layer] if name in errors else 0.0)
    return chosen, stated


class _Probe:
    """Errors by codec and layer, as the layers of one forward pass come by."""

    def __init__(self, plan: ModelPlan, calibrated: CodecPlan, codecs: Sequence[str]) -> None:
        self._plan, self._calibrated = plan, calibrated
        self.errors = {name: [0.0] * plan.layers for name in codecs}
        self.noise = {name: torch.zeros(plan.layers, 2) for name in codecs}
        self.seen: set[int] = set()

    def measure(self, layer: int, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> torch.Tensor:
        """The layer's exact attention; notes what each codec would change."""
        self.seen.add(layer)
        exact: torch.Tensor | None = None
        for name, errors in self.errors.items():
            codec, table = self._codec(name, layer, k)
            if exact is None:
                exact = prefill_attention(query, k, v, codec, 0, None, **options)
            changed = wanted = 0.0
            for first, last in _parts(k.shape[2]):
                begin = max(first, last - MAX_DECODE_TOKENS)
                for start, stop in ((first, begin), (begin, last)):
                    if start < stop:
                        part = slice(start, stop)
                        codec.write(0, k[:, :, part], v[:, :, part], table, [(0, start)])
                table.set_tokens(0, last)
                found = decode_attention(query[:, :, begin:last], codec, 0, table, **options)
                expected = exact[:, begin:last].float()
                changed += float((found.float() - expected).square().sum())
                wanted += float(expected.square().sum())
            errors[layer] = (changed / wanted) ** 0.5 if wanted else 0.0
            full = range(k.shape[2] // table.block_tokens)
            if full:
                slab, _ = table.entry(0, 0)
                self.noise[name][layer] = block_noise(slab, full, codec.layout)[:, 0].amax(0)
        if exact is None:
            raise UnsupportedModelError(f"{self._plan.name}: no codecs to measure")
        return exact

    def _codec(self, name: str, layer: int, k: torch.Tensor) -> tuple[Codec, BlockTable]:
        plan = self._plan
        layout = BlockLayout.create(
            name, layers=1, kv_heads=plan.kv_heads, k_dim=plan.k_dim, v_dim=plan.v_dim, dtype=plan.dtype
        )
        tensors = {} if name == "passthrough" else self._calibrated.tensors
        own = CodecPlan(name, {key: tensor[layer : layer + 1] for key, tensor in tensors.items()}, "probe")
        blocks = -(-k.shape[2] // layout.block_tokens)
        table = BlockTable(1, block_tokens=layout.block_tokens)
        slab = Slab.allocate(layout.block_bytes, blocks, device=k.device)
        for slot in range(blocks):
            table.append_block(0, slab, slot)
        return make_codec(layout, own), table


def _parts(tokens: int) -> list[tuple[int, int]]:
    ends = [tokens * (number + 1) // _PARTS for number in range(_PARTS)]
    return [(first, last) for first, last in zip([0, *ends], ends, strict=False) if first < last]


class _Probed(Stored):
    """A layer's K and V on their way to the attention function, which hands the queries in."""

    __slots__ = ("_probe",)

    def __init__(self, probe: _Probe, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._probe, self._layer, self._key, self._value = probe, layer, key, value

    def attend(
        self,
        module: Any,  # noqa: ARG002  what counts of it is in the options
        query: torch.Tensor,
        mask: Any,  # noqa: ARG002  plain causal: one row, no padding
        scaling: float | None,
        dropout: float,  # noqa: ARG002  attach takes models in eval mode
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """The exact attention -> [rows, L, q_heads, v_dim]."""
        options = {
            "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "softcap": extra.get("softcap"),
            "sliding_window": extra.get("sliding_window"), "sinks": extra.get("s_aux"),
        }  # fmt: skip
        return self._probe.measure(self._layer, query, self._key, self._value, options)


class _ProbingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # untyped __init_subclass__
    is_sliding = False

    def __init__(self, probe: _Probe, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._probe, self._layer = probe, layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:  # noqa: ARG002
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        probed = _Probed(self._probe, self._layer, key_states.detach(), value_states.detach())
        return probed, probed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _ProbingCache(Cache):
    """Lets a probe see every layer. For one forward pass without a past."""

    def __init__(self, probe: _Probe, layers: int) -> None:
        super().__init__(layers=[_ProbingLayer(probe, layer) for layer in range(layers)])
