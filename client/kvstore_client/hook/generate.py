"""What an attached model's `generate` does around the stock one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from kvstore_client.errors import LocalBudgetExceeded
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.digest import chain_digests
from kvstore_client.hook.errors import CacheStateError, UnsupportedInputError
from kvstore_client.hook.fingerprint import foreign_hook
from kvstore_client.hook.prompt import Prompt, positions_of, read_prompt, read_unmasked_prompt
from kvstore_client.hook.report import HitReport, RowReport

if TYPE_CHECKING:
    from kvstore_client.hook.attachment import Attachment

_POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
# Arguments that don't change what the model makes of the tokens.
_HARMLESS = frozenset(
    {*_POSITIONAL, "input_ids", "attention_mask", "past_key_values", "tokenizer", "assistant_tokenizer",
     "logits_to_keep", "trust_remote_code", "return_dict", "is_assistant"}
)  # fmt: skip
# Generation modes that keep or build caches of their own.
_OWN_CACHE_MODES = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "use_mtp")


class Call:
    """The arguments of one call of generate(), looked up the way generate() does: call, config, model."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.kwargs = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        inputs = self.kwargs.get("inputs")
        self.ids: Any = self.kwargs.get("input_ids") if inputs is None else inputs
        self.mask: Any = self.kwargs.get("attention_mask")

    def setting(self, name: str, default: Any = None) -> Any:
        """A generation setting's value in this call."""
        if self.kwargs.get(name) is not None:
            return self.kwargs[name]
        for config in (self.kwargs.get("generation_config"), self.model.generation_config):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    @property
    def repeats(self) -> int:
        """Rows that generate() makes of each prompt."""
        return max(int(self.setting("num_beams", 1)), int(self.setting("num_return_sequences", 1)))

    def prompt(self) -> Prompt:
        """The rows of this call's ids. Raises UnsupportedInputError."""
        if self.mask is None:
            return read_unmasked_prompt(self.ids, self.setting("pad_token_id"), self.setting("eos_token_id"))
        return read_prompt(self.ids, self.mask)

    def native_reason(self) -> str:
        """Why this call runs on the model's own cache; empty if it needn't."""
        cache = self.kwargs.get("past_key_values")
        if self.setting("use_cache", True) is False:
            return "use_cache=False"
        if cache is not None and not isinstance(cache, KVStoreCache):
            return f"past_key_values is a {type(cache).__name__}"
        chosen = self.setting("cache_implementation")
        if chosen not in (None, "dynamic", "hybrid"):
            return f"cache_implementation={chosen!r}"
        if self.model.training:
            return "the model is in training mode"
        if self.kwargs.get("custom_generate") is not None:
            return "custom_generate"
        if self.kwargs.get("is_assistant") or self.setting("is_assistant", False):
            return "the model is the assistant of another"
        for name in _OWN_CACHE_MODES:
            if self.setting(name):
                return f"{name} keeps caches of its own"
        assistant = self.kwargs.get("assistant_model")
        if assistant is not None and getattr(assistant.config, "target_layer_ids", None) is not None:
            return "the assistant reads the model's hidden states of the whole prompt"
        for name in ("output_attentions", "output_hidden_states"):
            if self.setting(name, False):
                return f"{name}=True needs the whole prompt computed"
        if not isinstance(self.ids, torch.Tensor) or self.ids.dim() != 2 or self.ids.is_floating_point():
            return "no input_ids: only token ids identify a prompt"
        if torch.is_autocast_enabled(self.model.device.type):
            return "torch.autocast is active: K and V are computed in another dtype than the model's"
        hook = foreign_hook(self.model)
        if hook:
            return hook
        known = vars(GenerationConfig())  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        for name, value in self.kwargs.items():
            if value is not None and name not in _HARMLESS and name not in known:
                return f"{name} isn't part of a prompt's digest"
        return ""


def run_generate(
    attachment: Attachment, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """generate() of an attached model."""
    call = Call(attachment.model, args, kwargs)
    given = call.kwargs.get("past_key_values")
    reason = call.native_reason()
    if not reason and given is None:
        try:
            prompt = call.prompt()
        except UnsupportedInputError as error:
            reason = str(error)
    if reason:
        if isinstance(given, KVStoreCache):
            raise UnsupportedInputError(f"a KVStoreCache can't be used here: {reason}; leave past_key_values out")
        return _run_native(attachment, stock, args, kwargs, reason)
    if given is not None:
        return _Run(attachment, stock, call, given).with_callers_cache()
    began = time.monotonic()
    try:
        cache = attachment.open_cache(prompt, repeats=call.repeats)
        try:
            run = _Run(attachment, stock, call, cache, began=began)
            run.reserve_prompt(prompt)
        except BaseException:
            cache.close()
            raise
    except LocalBudgetExceeded as error:
        if attachment.fallback != "native":
            raise
        return _run_native(attachment, stock, args, kwargs, str(error))
    return run.with_own_cache(prompt)


def _run_native(
    attachment: Attachment, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    report = HitReport(path="native")
    report.warn(reason)
    attachment.record(report)
    return stock(*args, **kwargs)


class _Run:
    """One call on one KVStoreCache. The cache is armed (commits what it fills) only while `stock` feeds known ids."""

    def __init__(
        self,
        attachment: Attachment,
        stock: Callable[..., Any],
        call: Call,
        cache: KVStoreCache,
        *,
        began: float | None = None,
    ) -> None:
        self.attachment = attachment
        self.stock = stock
        self.call = call
        self.cache = cache
        self.state = cache.state
        self.began = time.monotonic() if began is None else began

    def reserve_prompt(self, prompt: Prompt) -> None:
        """Takes the prompt's blocks now: a shortage shows before anything is computed or streamed."""
        self.state.armed = True
        self.state.make_room(prompt.length - self.state.length)

    def with_own_cache(self, prompt: Prompt) -> Any:
        """Runs on a cache made for this call; closed at the end unless the caller gets it in the result."""
        keep = False
        try:
            self.state.armed = True
            self._shared_prefill(prompt)
            result = self._stock()
            keep = not isinstance(result, torch.Tensor) and getattr(result, "past_key_values", None) is self.cache
            self._finish(result, full_ids=True)
            return result
        finally:
            self.state.armed = False
            self._report()
            if not keep:
                self.cache.close()

    def with_callers_cache(self) -> Any:
        """Runs on a cache that the caller keeps."""
        state, ids, mask = self.state, self.call.ids, self.call.mask
        state.check_settled()
        if state.pool.namespace.identity.fingerprint != self.attachment.fingerprint():
            raise CacheStateError("this cache was made for another model, or the model's weights have changed since")
        full = mask is None or mask.shape[1] == ids.shape[1]
        if full:
            if state.length > ids.shape[1]:
                raise UnsupportedInputError(
                    f"the cache holds {state.length} positions and input_ids only {ids.shape[1]}: pass the whole "
                    f"sequence, or crop({ids.shape[1] - state.length}) first"
                )
            if state.length == ids.shape[1]:
                # The last token's logits are needed, and exactly one copy of it.
                state.crop_to(state.length - 1)
            prompt = self.call.prompt()
            state.armed = self._learn(prompt)
        state.expandable = self.call.repeats > 1
        if not state.fresh_report or state.report is None:
            state.report = HitReport(path="kvstore")
            if full:
                state.report.rows = [
                    RowReport(len(ids), cached, cached, [("this cache", cached)] if cached else [])
                    for ids, cached in (
                        (ids, max(0, state.length - start))
                        for ids, start in zip(prompt.ids, prompt.starts, strict=True)
                    )
                ]
        state.fresh_report = False
        state.committed = 0
        state.first_step_at = state.second_step_at = None
        try:
            if full:
                self._shared_prefill(prompt)
            result = self._stock()
            self._finish(result, full_ids=full)
            return result
        finally:
            state.armed = False
            state.expandable = False
            self._report()

    def _learn(self, prompt: Prompt) -> bool:
        """Whether all that is cached is known to be this prompt's; then its rows get the prompt's ids and digests."""
        state = self.state
        if not state.rows:
            state.start_rows(prompt.starts)
        if (
            state.known != state.length
            or len(state.rows) != len(prompt.ids)
            or [row.start for row in state.rows] != prompt.starts
        ):
            return False
        for index, (row, ids) in enumerate(zip(state.rows, prompt.ids, strict=True)):
            cached = state.tokens(index)
            # Lengths first: rows may be known shorter than they are, and then nothing can be compared.
            if len(row.ids) < cached or len(ids) < cached or not bool((row.ids[:cached] == ids[:cached]).all()):
                return False
        for index, (row, ids) in enumerate(zip(state.rows, prompt.ids, strict=True)):
            # Digests of ids behind the cached ones may be another prompt's.
            known = row.chain[: state.tokens(index) // state.block_tokens]
            row.ids = ids
            row.chain = chain_digests(ids, state.block_tokens, known=known, salt=self.attachment.salt)
        return True

    def _shared_prefill(self, prompt: Prompt) -> None:
        """What stock prefill would do wrong or twice over a cache that holds a part of the prompt already.

        In chunks it would append the prompt once more from its start; for beams it would compute it once per beam.
        """
        state, repeats = self.state, self.call.repeats
        chunk = self.call.setting("prefill_chunk_size")
        last = prompt.length - 1
        if repeats > 1:
            self._forward(prompt, state.length, last, chunk)
            state.expandable = True
        elif chunk:
            # The same cuts as stock generate's; its last chunk is left to it.
            self._forward(prompt, state.length, (last // int(chunk)) * int(chunk), chunk)
        state.full_ids_next = True

    def _forward(self, prompt: Prompt, first: int, last: int, chunk: int | None) -> None:
        size = int(chunk or max(1, last - first))
        mask = torch.ones(len(prompt.starts), prompt.length, dtype=torch.int64)
        for row, start in enumerate(prompt.starts):
            mask[row, :start] = 0
        while first < last:
            # Chunks end at multiples of their size, whatever was reused.
            end = min(last, (first // size + 1) * size) if chunk else last
            self.attachment.forward(
                self.call.ids[:, first:end], mask[:, :end], positions_of(prompt.starts, first, end), self.cache
            )
            first = end

    def _stock(self) -> Any:
        kwargs = {**self.call.kwargs, "past_key_values": self.cache}
        if self.call.setting("prefill_chunk_size"):
            # What is left is one chunk at most, and in chunks stock prefill wouldn't cut the cached tokens off.
            kwargs["prefill_chunk_size"] = None
        return self.stock(**kwargs)

    def _finish(self, result: Any, *, full_ids: bool) -> None:
        """Remembers which tokens the cache holds now, and commits them if the policy says so."""
        state = self.state
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        report = state.report
        if report is not None:
            report.generated_tokens = max(0, sequences.shape[1] - self.call.ids.shape[1]) * sequences.shape[0]
        beams = int(self.call.setting("num_beams", 1)) > 1
        if not state.armed or beams or not full_ids or sequences.shape[0] != len(state.rows):
            return
        fed = sequences[:, : state.length].detach().to("cpu", torch.int64).numpy()
        for row, ids in zip(state.rows, fed, strict=True):
            row.ids = ids[row.start :].copy()
            if self.attachment.commit == "all":
                row.chain = chain_digests(row.ids, state.block_tokens, known=row.chain, salt=self.attachment.salt)
        # Armed from its first token to its last, so all of it was fed by generate(), and these are the ids.
        state.note_known()
        if self.attachment.commit == "all":
            state.commit_full_blocks()

    def _report(self) -> None:
        state, report = self.state, self.state.report
        if report is None:
            return
        ended = time.monotonic()
        if state.first_step_at is not None:
            report.prefill_ms = max(0.0, (state.first_step_at - self.began) * 1e3 - report.match_ms)
            report.first_token_ms = ((state.second_step_at or ended) - self.began) * 1e3
        report.prefill_tokens = report.prompt_tokens - report.reused_tokens
        report.committed_blocks = state.committed
        report.traffic = state.pool.request.report()
        report.local_blocks = report.traffic.local_blocks
        for reason in report.traffic.short_reasons:
            report.warn(reason)
        self.attachment.record(report)
