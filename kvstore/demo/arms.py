"""The two ways a worker generates: the model's own cache, and ours. Same model weights, same generate(), same clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

_Announce = Callable[[], None]


@dataclass(slots=True)
class Answer:
    """One prompt's greedy continuation.

    `times_s[i]` is when token i came, in seconds after the call of generate(). `gaps[i]` is the logit gap between the
    two best tokens at step i (only where it was asked for). Sizes in bytes.
    """

    tokens: list[int]
    times_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reused: int = 0
    why_no_more: str = ""
    written_by: list[tuple[str, int]] = field(default_factory=list)
    match_ms: float = 0.0
    shared_bytes: int = 0
    local_blocks: int = 0
    native_bytes: int = 0
    native_bytes_16bit: int = 0


@dataclass(slots=True)
class BatchAnswer:
    """A left-padded batch: one list a row."""

    tokens: list[list[int]]
    gaps: list[list[float]] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)


class _Clock(BaseStreamer):
    """Notes when each new token comes. The first call of put() brings the prompt."""

    def __init__(self, announce: _Announce | None) -> None:
        self.times: list[float] = []
        self._prompt_seen = False
        self._announce = announce

    def put(self, value: Any) -> None:  # noqa: ARG002
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if len(self.times) == 1 and self._announce is not None:
            self._announce()

    def end(self) -> None:
        """Nothing to do: the times are all there is."""


class _TopTwo(LogitsProcessor):
    """Notes the gap between the two best logits of every row and step."""

    def __init__(self) -> None:
        self.gaps: list[list[float]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:  # noqa: ARG002
        best = scores.topk(2, dim=-1).values
        self.gaps.append((best[:, 0] - best[:, 1]).tolist())
        return scores


class NativeArm:
    """The model with transformers' DynamicCache.

    `split` prefills that many leading tokens in a forward of their own, as a warm worker's hit splits the prompt; the
    prefilled cache is kept for the next prompt with the same beginning.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prefix: tuple[tuple[int, ...], Any] | None = None

    def run(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        *,
        exact: bool = False,
        gaps: bool = False,
        split: int = 0,
        announce: _Announce | None = None,
    ) -> Answer:
        """Greedy continuation. `exact`: exactly `new_tokens` tokens, else until the model ends its answer."""
        cache = self._prefilled(tuple(tokens[:split])) if split else DynamicCache(config=self._model.config)
        answer, _ = _generate(self._model, [list(tokens)], new_tokens, exact, gaps, announce, past_key_values=cache)
        answer.native_bytes, answer.native_bytes_16bit = _cache_bytes(cache)
        surplus = cache.get_seq_length() - split
        if split and surplus:
            cache.crop(-surplus)
        return answer

    def batch(self, rows: Sequence[Sequence[int]], new_tokens: int, pad: int, *, split: int = 0) -> BatchAnswer:
        """The same for a left-padded batch; `split` counts columns."""
        ids, mask = (part.to(self._model.device) for part in pad_left(rows, pad))
        cache = DynamicCache(config=self._model.config)
        if split:
            _prefill(self._model, ids[:, :split], mask[:, :split], cache)
        return _generate_batch(self._model, ids, mask, new_tokens, past_key_values=cache)

    def _prefilled(self, prefix: tuple[int, ...]) -> Any:
        if self._prefix is None or self._prefix[0] != prefix:
            cache = DynamicCache(config=self._model.config)
            ids = torch.tensor([prefix], device=self._model.device)
            _prefill(self._model, ids, torch.ones_like(ids), cache)
            self._prefix = (prefix, cache)
        return self._prefix[1]


class SharedArm:
    """The model attached to a store."""

    def __init__(self, store: Any, model: Any, tokenizer: Any, codec: str) -> None:
        self._store = store
        self._model = model
        self.attachment = store.attach(model, tokenizer, codec=codec)

    def run(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        *,
        exact: bool = False,
        gaps: bool = False,
        announce: _Announce | None = None,
    ) -> Answer:
        """Greedy continuation with plain generate()."""
        answer, _ = _generate(self._model, [list(tokens)], new_tokens, exact, gaps, announce)
        report = self._store.last_report
        row = report.rows[0]
        answer.reused = row.reused_tokens
        answer.why_no_more = row.why_no_more
        answer.written_by = list(row.written_by)
        answer.match_ms = report.match_ms
        answer.shared_bytes = report.shared_bytes
        answer.local_blocks = report.local_blocks
        return answer

    def batch(self, rows: Sequence[Sequence[int]], new_tokens: int, pad: int) -> BatchAnswer:
        """A left-padded batch with plain generate()."""
        ids, mask = (part.to(self._model.device) for part in pad_left(rows, pad))
        answer = _generate_batch(self._model, ids, mask, new_tokens)
        answer.reused = [row.reused_tokens for row in self._store.last_report.rows]
        return answer


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 [rows, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    return ids, mask


def _generate(
    model: Any,
    rows: list[list[int]],
    new_tokens: int,
    exact: bool,
    gaps: bool,
    announce: _Announce | None,
    **options: Any,
) -> tuple[Answer, float]:
    ids = torch.tensor(rows, device=model.device)
    clock, top_two = _Clock(announce), _TopTwo()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens if exact else None,
            do_sample=False,
            streamer=clock,
            logits_processor=LogitsProcessorList([top_two] if gaps else []),
            **options,
        )
    answer = Answer(
        tokens=output[0, ids.shape[1] :].tolist(),
        times_s=[moment - start for moment in clock.times],
        gaps=[step[0] for step in top_two.gaps],
    )
    return answer, start


def _generate_batch(model: Any, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int, **options: Any) -> BatchAnswer:
    top_two = _TopTwo()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=LogitsProcessorList([top_two]),
            **options,
        )
    return BatchAnswer(
        tokens=output[:, ids.shape[1] :].tolist(),
        gaps=[list(row) for row in zip(*top_two.gaps, strict=True)],
        padding=(ids.shape[1] - mask.sum(dim=1)).tolist(),
    )


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> None:
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.inference_mode():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )


def _cache_bytes(cache: Any) -> tuple[int, int]:
    """Bytes that a DynamicCache holds, and what they would be at 2 bytes a number."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors), sum(2 * tensor.numel() for tensor in tensors)
