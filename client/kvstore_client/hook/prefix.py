"""From a prompt to a cache that already holds what the store has of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore_client.blocks import Block, Match
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.digest import chain_digests
from kvstore_client.hook.prompt import Prompt
from kvstore_client.hook.report import HitReport, RowReport, describe
from kvstore_client.hook.rows import BlockPool
from kvstore_client.hook.state import BLOCKS_AHEAD, CacheState

if TYPE_CHECKING:
    from kvstore_client.hook.seam import RequestLike, StoreLike
    from kvstore_client.namespace import Namespace

# No wait for another worker lasts longer, whatever the estimate.
MAX_WAIT_S = 30.0
_WAIT_SLICE_MS = 500
_COMMITTED, _IN_FLIGHT = "committed", "in_flight"


def open_cache(
    store: StoreLike,
    namespace: Namespace,
    prompt: Prompt,
    *,
    keep_last: bool = True,
    repeats: int = 1,
    tokens_per_s: float | None = None,
    salt: bytes = b"",
    clock: Callable[[], float] = time.monotonic,
) -> KVStoreCache:
    """A cache with the prompt's held prefix, slots reserved for the rest; its `report` says what was found.

    `keep_last`: leave at least the last token to compute. `repeats`: rows that will be made of each (beams).
    `tokens_per_s`: how fast this worker computes a prompt, which bounds the wait for another one that is at it.
    Raises LocalBudgetExceeded when not even the used part of a block can be copied.
    """
    report = HitReport(path="kvstore", rows=[RowReport(prompt_tokens=len(ids)) for ids in prompt.ids])
    request = store.open_request(namespace)
    pool = BlockPool(request, namespace)
    state = CacheState(pool, clock)
    cache = KVStoreCache(state)
    try:
        state.report = report
        state.fresh_report = True
        state.start_rows(prompt.starts)
        for row, ids in zip(state.rows, prompt.ids, strict=True):
            row.ids = ids
            row.chain = chain_digests(ids, pool.block_tokens, salt=salt)
        matches = _match_and_reserve(request, state, prompt, report, repeats, tokens_per_s, clock)
        size = pool.block_tokens
        past = min(
            start + min(len(match.blocks) * size, len(ids) - (1 if keep_last else 0))
            for start, ids, match in zip(prompt.starts, prompt.ids, matches, strict=True)
        )
        state.adopt(past, [match.blocks for match in matches])
        _describe(state, matches, report)
    except BaseException:
        cache.close()
        raise
    return cache


def _match_and_reserve(
    request: RequestLike,
    state: CacheState,
    prompt: Prompt,
    report: HitReport,
    repeats: int,
    tokens_per_s: float | None,
    clock: Callable[[], float],
) -> list[Match]:
    began = clock()
    chains = [b"".join(row.chain) for row in state.rows]
    matches = request.match(chains) if any(chains) else [Match() for _ in chains]
    waiting = clock()
    missing = max(
        len(ids) - len(match.blocks) * state.block_tokens for ids, match in zip(prompt.ids, matches, strict=True)
    )
    deadline = waiting + min(MAX_WAIT_S, missing / tokens_per_s if tokens_per_s else 0.0)
    matches = _wait(request, chains, matches, deadline, clock)
    report.wait_ms += (clock() - waiting) * 1e3

    reserved = _reserve(request, state, matches, repeats)
    if _IN_FLIGHT in reserved.values() and clock() < deadline:
        # Somebody began between our look-up and our reservation.
        waiting = clock()
        before = matches
        matches = request.match(chains)
        matches = _wait(request, chains, matches, deadline, clock)
        report.wait_ms += (clock() - waiting) * 1e3
        _unreserve(request, state, before, matches, reserved)
    state.held_elsewhere = {digest for digest, status in reserved.items() if status == _COMMITTED}
    for row, match in zip(state.rows, matches, strict=True):
        state.held_elsewhere.update(row.chain[: len(match.blocks)])
    report.match_ms = (clock() - began) * 1e3
    return matches


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
        if sum(len(m.blocks) for m in found) < sum(len(m.blocks) for m in matches):
            break
        matches = found
    return matches


def _reserve(request: RequestLike, state: CacheState, matches: Sequence[Match], repeats: int) -> dict[bytes, str]:
    """Reserves a slot for every block that will be computed; the status of each digest for which it is one."""
    chains: list[bytes] = []
    digests: list[bytes] = []
    anonymous = 0
    for row, match in zip(state.rows, matches, strict=True):
        wanted = [digest for digest in row.chain[len(match.blocks) :] if digest not in digests]
        digests += wanted
        chains.append(b"".join(wanted))
        # Repeated blocks, a batch's blocks beyond the shared past, the copied last block, and what comes next.
        anonymous += len(row.chain) - len(match.blocks) - len(wanted)
        anonymous += repeats * (1 + BLOCKS_AHEAD)
    statuses = request.reserve(chains, anonymous)
    return dict(zip(digests, statuses, strict=False))


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
