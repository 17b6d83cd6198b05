"""From a prompt to a cache that already holds what the store has of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from kvstore_client.blocks import Block, Match
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.digest import chain_digests
from kvstore_client.hook.errors import UnsupportedInputError
from kvstore_client.hook.firsttoken import FirstKV
from kvstore_client.hook.prompt import Prompt
from kvstore_client.hook.report import HitReport, RowReport, describe
from kvstore_client.hook.rows import BlockPool
from kvstore_client.hook.state import BLOCKS_AHEAD, CacheState
from kvstore_client.hook.streams import on_device

if TYPE_CHECKING:
    from kvstore_client.hook.seam import RequestLike, StoreLike
    from kvstore_client.namespace import Namespace

_CPU = torch.device("cpu")
# No wait for another worker lasts longer, whatever the estimate.
MAX_WAIT_S = 30.0
_WAIT_SLICE_MS = 500
NO_PADDING = "the model's attention is its own, so the cache can't tell it where a padded row begins"
# Slots without a digest for each row: the copied last block, and what comes next.
_ANONYMOUS = 1 + BLOCKS_AHEAD
_COMMITTED, _IN_FLIGHT = "committed", "in_flight"


def open_cache(
    store: StoreLike,
    namespace: Namespace,
    prompt: Prompt,
    *,
    device: torch.device = _CPU,
    keep_last: bool = True,
    repeats: int = 1,
    tokens_per_s: float | None = None,
    salt: bytes = b"",
    max_block_error: float | None = None,
    background: bool = False,
    first_token: Callable[[bytes, int], FirstKV] | None = None,
    gathers: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> KVStoreCache:
    """A cache with the prompt's held prefix, slots reserved for the rest; its `report` says what was found.

    `device`: where the model computes. `keep_last`: leave at least the last token to compute. `repeats`: rows that
    will be made of each (beams). `tokens_per_s`: how fast this worker computes a prompt, which bounds the wait for
    another one that is at it. `max_block_error`: held blocks with a larger error aren't used. `background`: returns
    before the store has answered; the cache is filled at its first use, which then raises what would have been raised
    here. `first_token` gives the exact K and V of a token that prompts begin with, of the model of a fingerprint.
    `gathers`: see CacheState. Raises LocalBudgetExceeded when not even the used part of a block can be copied;
    UnsupportedInputError for padding that such a cache can't have.
    """
    if gathers and any(prompt.starts):
        raise UnsupportedInputError(NO_PADDING)
    report = HitReport(path="kvstore", rows=[RowReport(prompt_tokens=len(ids)) for ids in prompt.ids])
    request = store.open_request(namespace, max_block_error=max_block_error)
    pool = BlockPool(request, namespace, device)
    state = CacheState(pool, clock, gathers=gathers)
    cache = KVStoreCache(state)
    try:
        state.report = report
        state.fresh_report = True
        state.start_rows(prompt.starts)
        for row, ids in zip(state.rows, prompt.ids, strict=True):
            row.ids = ids
            row.chain = chain_digests(ids, pool.block_tokens, salt=salt)
        opening = _Opening(
            request,
            prompt,
            report,
            keep_last=keep_last,
            tokens_per_s=tokens_per_s,
            first_token=first_token,
            clock=clock,
        )
        state.opening = opening
        opening.begin(state, repeats, background=background)
        if not background:
            state.ready()
    except BaseException:
        cache.close()
        raise
    return cache


class _Opening:
    """What happens between a look-up and a filled cache. Holds no cache, so that a dropped one goes at once.

    Invariants: look-up and reservation are made once, in a thread of their own if the caller has better things to do
    than to wait; `fill` waits for them, and for other workers' blocks until the deadline.
    """

    def __init__(
        self,
        request: RequestLike,
        prompt: Prompt,
        report: HitReport,
        *,
        keep_last: bool,
        tokens_per_s: float | None,
        first_token: Callable[[bytes, int], FirstKV] | None,
        clock: Callable[[], float],
    ) -> None:
        self._request = request
        self._first_token = first_token
        self._prompt = prompt
        self._report = report
        self._keep_last = keep_last
        self._tokens_per_s = tokens_per_s
        self._clock = clock
        self._matches: list[Match] = []
        self._deadline = 0.0
        self._reserved: Future[dict[bytes, str]] = Future()

    def begin(self, state: CacheState, repeats: int, *, background: bool) -> None:
        """Leases what is held, and asks for slots for the rest: `fill` waits for that."""
        chains = [row.chain for row in state.rows]
        arguments = (state.device, chains, state.block_tokens, repeats)
        if background:
            threading.Thread(target=self._ask, args=arguments, name="kvstore-open", daemon=True).start()
        else:
            self._ask(*arguments)

    def _ask(self, device: torch.device, chains: list[list[bytes]], block_tokens: int, repeats: int) -> None:
        try:
            with on_device(device):
                self._look_up(chains, block_tokens, len(chains) * repeats * _ANONYMOUS)
                wanted, anonymous = _wanted(chains, self._matches, repeats)
                statuses = self._request.reserve([b"".join(digests) for digests in wanted], anonymous)
        except BaseException as error:  # noqa: BLE001  raised by `fill`, in the caller's thread
            self._reserved.set_exception(error)
        else:
            digests = [digest for row in wanted for digest in row]
            self._reserved.set_result(dict(zip(digests, statuses, strict=True)))

    def _look_up(self, chains: list[list[bytes]], block_tokens: int, anonymous: int) -> None:
        request, clock = self._request, self._clock
        began = clock()
        joined = [b"".join(chain) for chain in chains]
        matches = request.match(joined, anonymous=anonymous) if any(joined) else [Match() for _ in joined]
        waiting = clock()
        missing = max(
            len(ids) - len(match.blocks) * block_tokens for ids, match in zip(self._prompt.ids, matches, strict=True)
        )
        rate = self._tokens_per_s
        self._deadline = waiting + min(MAX_WAIT_S, missing / rate if rate else 0.0)
        self._matches = _wait(request, joined, matches, self._deadline, clock)
        self._report.wait_ms += (clock() - waiting) * 1e3
        self._report.match_ms += (clock() - began) * 1e3

    def fill(self, state: CacheState) -> None:
        """Puts the held prefix into the cache's rows. Raises LocalBudgetExceeded."""
        request, clock, report = self._request, self._clock, self._report
        # The calls behind it have deadlines of their own.
        reserved = self._reserved.result()
        began = clock()
        if _IN_FLIGHT in reserved.values() and clock() < self._deadline:
            # Somebody began between our look-up and our reservation.
            waiting = clock()
            before, chains = self._matches, _chains(state)
            found = request.match(chains)
            # A service that goes away in between must not cost what is leased already.
            if _blocks(found) >= _blocks(before):
                self._matches = _wait(request, chains, found, self._deadline, clock)
            report.wait_ms += (clock() - waiting) * 1e3
            _unreserve(request, state, before, self._matches, reserved)
        matches = self._matches
        state.held_elsewhere = {digest for digest, status in reserved.items() if status == _COMMITTED}
        for row, match in zip(state.rows, matches, strict=True):
            state.held_elsewhere.update(row.chain[: len(match.blocks)])
        report.match_ms += (clock() - began) * 1e3
        past = min(
            start + min(len(match.blocks) * state.block_tokens, len(ids) - (1 if self._keep_last else 0))
            for start, ids, match in zip(self._prompt.starts, self._prompt.ids, matches, strict=True)
        )
        state.adopt(past, [match.blocks for match in matches])
        if self._first_token is not None:
            state.know_first_tokens(self._first_token)
        _describe(state, matches, report)


def _chains(state: CacheState) -> list[bytes]:
    return [b"".join(row.chain) for row in state.rows]


def _blocks(matches: Sequence[Match]) -> int:
    return sum(len(match.blocks) for match in matches)


def _wait(
    request: RequestLike,
    chains: Sequence[bytes],
    matches: list[Match],
    deadline: float,
    clock: Callable[[], float],
) -> list[Match]:
    """Looks again while somebody is writing what we miss, until `deadline`."""
    while any(match.reason == "in-flight" for match in matches):
        left_ms = int((deadline - clock()) * 1e3)
        if left_ms <= 0:
            break
        found = request.match(chains, wait_ms=min(left_ms, _WAIT_SLICE_MS))
        # A service that goes away in between must not cost what is leased already.
        if _blocks(found) < _blocks(matches):
            break
        matches = found
    return matches


def _wanted(chains: Sequence[list[bytes]], matches: Sequence[Match], repeats: int) -> tuple[list[list[bytes]], int]:
    """Digests of the blocks that each row will compute, each once; and how many more slots will be needed."""
    wanted: list[list[bytes]] = []
    seen: set[bytes] = set()
    anonymous = 0
    for chain, match in zip(chains, matches, strict=True):
        own = [digest for digest in chain[len(match.blocks) :] if digest not in seen]
        seen.update(own)
        wanted.append(own)
        # Repeated blocks, and a batch's blocks beyond the shared past.
        anonymous += len(chain) - len(match.blocks) - len(own)
        anonymous += repeats * _ANONYMOUS
    return wanted, anonymous


def _unreserve(
    request: RequestLike,
    state: CacheState,
    before: Sequence[Match],
    after: Sequence[Match],
    reserved: dict[bytes, str],
) -> None:
    """Gives the slots back of blocks that somebody else has written meanwhile."""
    for row, old, new in zip(state.rows, before, after, strict=True):
        for digest in row.chain[len(old.blocks) : len(new.blocks)]:
            if reserved.pop(digest, None) is not None:
                request.give_back(request.take(digest))


def _describe(state: CacheState, matches: Sequence[Match], report: HitReport) -> None:
    size = state.block_tokens
    blocks: set[Block] = set()
    for index, (row, match) in enumerate(zip(state.rows, matches, strict=True)):
        line = report.rows[index]
        line.reused_tokens = state.tokens(index)
        line.matched_tokens = len(match.blocks) * size
        left = line.reused_tokens
        for writer, count in match.writers:
            taken = min(left, count * size)
            if taken:
                line.written_by.append((writer, taken))
            left -= taken
        blocks.update(match.blocks[: -(-line.reused_tokens // size)])
        if not row.chain:
            line.why_no_more = f"text shorter than a block ({line.prompt_tokens} tokens < {size})"
        elif match.reason:
            line.why_no_more = describe(match.reason)
        elif line.reused_tokens < line.matched_tokens:
            alone = line.reused_tokens == line.prompt_tokens - 1
            line.why_no_more = (
                "the last token is always computed" if alone else "another row of the batch has less in common"
            )
    report.shared_bytes = len(blocks) * state.pool.namespace.layout.block_bytes
