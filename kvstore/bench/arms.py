"""The caches that are compared, behind one call. Same model object, same generate(), same handling of logits: each
prefill keeps its last token's logits only.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache

# Arms that are transformers' own.
NATIVE = ("dynamic", "dynamic-flash", "static", "hqq8", "no-cache")
_MIB = 2**20


@dataclass(slots=True)
class Measured:
    """One run. Times in ms; sizes in bytes; None where this device has no such figure.

    `step_ms` is the median time between two steps' logits, without the first. `peak` and `held` are torch's allocator
    above `base`: what was allocated before the run (transformers' caches) or before the first attach (ours).
    """

    ms: float
    tokens_out: int
    step_ms: float | None
    peak: int | None
    held: int | None
    worker_kv: int
    reused: int = 0
    why_no_more: str = ""
    warnings: list[str] = field(default_factory=list)


class StepClock(LogitsProcessor):
    """Notes when each step's logits are asked for. Reads nothing from the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return scores

    @property
    def step_ms(self) -> float | None:
        """Median time of a step; None with fewer than two."""
        gaps = [after - before for before, after in itertools.pairwise(self.times[1:])]
        return 1e3 * median(gaps) if gaps else None


class Meter:
    """Torch's allocator on one device; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> int | None:
        """Frees what nobody uses, starts a new peak; bytes allocated now."""
        gc.collect()
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def answered(self) -> None:
        """Until the answer is there: what this thread's stream was given. Work beside it (checksums) may go on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def peak_above(self, base: int | None) -> int | None:
        """Largest allocation since settle(), above `base`."""
        return None if base is None else torch.cuda.max_memory_allocated(self.device) - base

    def held_above(self, base: int | None) -> int | None:
        """Allocated now, above `base`."""
        return None if base is None else torch.cuda.memory_allocated(self.device) - base


def backends(arm: str) -> AbstractContextManager[None]:
    """The attention that torch may choose from in an arm.

    By default that is cuDNN's on Hopper, which makes a plan for every new length, so in every step of a first answer:
    53 ms a token of the seed's model, 15 to 17 once its plans are there (one H200, torch 2.11). "dynamic-flash" leaves
    cuDNN out.
    """
    if arm != "dynamic-flash":
        return contextlib.nullcontext()
    kernels: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return kernels


def native_cache(arm: str, config: Any, length: int) -> Any:
    """A fresh cache of transformers' own. ImportError when what it needs isn't installed."""
    if arm in ("dynamic", "dynamic-flash"):
        return DynamicCache(config=config)
    if arm == "static":
        return StaticCache(config=config, max_cache_len=length)
    if arm == "hqq8":
        from transformers import QuantizedCache

        return QuantizedCache("hqq", config, nbits=8, axis_key=1, axis_value=1)
    raise ValueError(f"{arm!r} is no cache of transformers; expected one of {', '.join(NATIVE)}")


def forward_without_cache(model: Any, ids: torch.Tensor, meter: Meter) -> Measured:
    """The same forward with use_cache=False and the same logits_to_keep: what a prompt's peak is compared with."""
    base = meter.settle()
    start = time.perf_counter()
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        logits.argmax(dim=-1)
    meter.answered()
    ms = 1e3 * (time.perf_counter() - start)
    return Measured(ms, 1, None, meter.peak_above(base), 0, 0)


def generate(
    model: Any,
    ids: torch.Tensor,
    tokens_out: int,
    meter: Meter,
    *,
    cache: Callable[[], Any] | None,
    base: int | None,
    bound_s: float,
) -> tuple[Measured, Any]:
    """Greedy generate() until `tokens_out` tokens came or `bound_s` is over; also returns the cache, still held.

    `cache` makes transformers' own; None leaves the choice to the model (ours, where it is attached). `base`: see
    Measured; None = allocated before the run.
    """
    before = meter.settle()
    base = before if base is None else base
    clock = StepClock()
    start = time.perf_counter()
    options = {} if cache is None else {"past_key_values": cache()}
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens_out,
            do_sample=False,
            max_time=bound_s,
            logits_processor=LogitsProcessorList([clock]),
            return_dict_in_generate=True,
            **options,
        )
    meter.answered()
    ms = 1e3 * (time.perf_counter() - start)
    meter.wait()
    peak = meter.peak_above(base)
    held = output.past_key_values
    tokens = output.sequences.shape[1] - ids.shape[1]
    del output
    gc.collect()
    worker_kv = tensor_bytes(held) if cache is not None else 0
    return Measured(ms, tokens, clock.step_ms, peak, meter.held_above(base), worker_kv), held


def tensor_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache's layers hold, codes, scales and zeros included; each storage once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        _collect(vars(layer), storages)
    return sum(storages.values())


def _collect(value: Any, storages: dict[int, int]) -> None:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, storages)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, storages)
