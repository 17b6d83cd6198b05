"""What an attached model's `generate` does around the stock one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvstore_client.errors import LocalBudgetExceeded
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.call import Call
from kvstore_client.hook.digest import chain_digests
from kvstore_client.hook.errors import CacheStateError, UnsupportedInputError
from kvstore_client.hook.prefix import NO_PADDING
from kvstore_client.hook.prompt import Prompt, positions_of
from kvstore_client.hook.report import HitReport, RowReport
from kvstore_client.hook.state import BLOCKS_AHEAD
from kvstore_client.hook.streams import on_device

if TYPE_CHECKING:
    from kvstore_client.hook.attachment import Attachment


def run_generate(
    attachment: Attachment, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """generate() of an attached model."""
    with on_device(attachment.plan.device):
        return _generate(attachment, stock, args, kwargs)


def _generate(attachment: Attachment, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call(attachment.model, args, kwargs)
    given = call.kwargs.get("past_key_values")
    reason = call.native_reason(attachment.plan.device)
    if not reason and given is None:
        try:
            prompt = call.prompt()
            if attachment.plan.gathers and any(prompt.starts):
                reason = NO_PADDING
        except UnsupportedInputError as error:
            reason = str(error)
    if reason:
        if isinstance(given, KVStoreCache):
            raise UnsupportedInputError(f"a KVStoreCache can't be used here: {reason}; leave past_key_values out")
        return _run_native(attachment, stock, args, kwargs, reason)
    if given is not None:
        return _Run(attachment, stock, call, given).with_callers_cache()
    began = time.monotonic()
    # A shortage must show while the request can still run elsewhere, and before anything is streamed. Else slots are
    # reserved while generate() makes its own preparations.
    early = attachment.fallback == "native" or call.kwargs.get("streamer") is not None
    try:
        cache = attachment.open_cache(prompt, repeats=call.repeats, background=not early)
        try:
            run = _Run(attachment, stock, call, cache, began=began)
            if early:
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
            self._over()
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
            if not state.fresh_report:
                self._reserve_again(prompt.length)
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
        state.padding.looked_at = False
        try:
            if full:
                self._shared_prefill(prompt)
            result = self._stock()
            self._finish(result, full_ids=full)
            return result
        finally:
            self._over()
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
        if repeats > 1 or chunk:
            state.ready()
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
        self.state.padding.in_generate = True
        kwargs = {**self.call.kwargs, "past_key_values": self.cache}
        if self.call.setting("prefill_chunk_size"):
            # What is left is one chunk at most, and in chunks stock prefill wouldn't cut the cached tokens off.
            kwargs["prefill_chunk_size"] = None
        return self.stock(**kwargs)

    def _reserve_again(self, length: int) -> None:
        """Room for a cache that grows again, in one call: what it had ready went back when its last call ended."""
        state = self.state
        wanted = BLOCKS_AHEAD * len(state.rows)
        for row in state.rows:
            wanted += max(0, -(-max(0, length - row.start) // state.block_tokens) - len(row.blocks))
        state.pool.request.reserve([], wanted)

    def _over(self) -> None:
        """What is fed from here on, the caller feeds; what lay ready for more goes back."""
        if not self.state.closed:
            self.state.pool.release_ahead()
        self.state.armed = self.state.padding.in_generate = False

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
            first_token_at = state.second_step_at or ended
            # A CUDA device ends the first pass when its token is known; before, it was only sent there.
            prefilled_at = state.first_step_at if state.device.type == "cpu" else first_token_at
            report.prefill_ms = max(0.0, (prefilled_at - self.began) * 1e3 - report.match_ms)
            report.first_token_ms = (first_token_at - self.began) * 1e3
        report.prefill_tokens = report.prompt_tokens - report.reused_tokens
        report.committed_blocks = state.committed
        report.take(state.pool.request.report())
        self.attachment.record(report)
