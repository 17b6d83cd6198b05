"""Which slots a cache's rows hold, counted, so that beams, branches and batches share a past by reference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from kvstore_kernels.codecs import get_codec

from kvstore_client.hook.digest import TokenIds

if TYPE_CHECKING:
    from kvstore_client.blocks import Block
    from kvstore_client.hook.seam import RequestLike
    from kvstore_client.namespace import Namespace


def no_ids() -> TokenIds:
    """Token ids of an empty sequence."""
    return np.empty(0, dtype=np.int64)


class Held:
    """One slot in use. `refs` rows point at it; a `sealed` one is never written again (leased, or committed)."""

    __slots__ = ("block", "refs", "sealed")

    def __init__(self, block: Block, *, sealed: bool) -> None:
        self.block = block
        self.refs = 1
        self.sealed = sealed


@dataclass(slots=True)
class Row:
    """One sequence of the batch.

    `start` padding tokens stand before its first token: its token t has the batch position start + t. `ids` are the
    tokens that it is to hold as far as this package knows (CacheState.known says how far they were really fed),
    `chain` the digests of the full blocks of `ids`, and the first `sealed` blocks need no commit any more.
    """

    start: int = 0
    blocks: list[Held] = field(default_factory=list)
    ids: TokenIds = field(default_factory=no_ids)
    chain: list[bytes] = field(default_factory=list)
    sealed: int = 0

    def copy(self) -> Row:
        """A row over the same blocks; the caller counts them."""
        return Row(self.start, list(self.blocks), self.ids, list(self.chain), self.sealed)


class BlockPool:
    """The slots of one request, for the caches that share it (a cache and its deep copies).

    Invariants: a block is written only while one row points at it and it isn't sealed; it is given back when no row
    points at it; the request is closed with the last cache. Safe from several threads.
    """

    def __init__(self, request: RequestLike, namespace: Namespace) -> None:
        self.request = request
        self.namespace = namespace
        self.codec = get_codec(namespace.layout.codec)(namespace.layout, namespace.plan)
        self.block_tokens = namespace.layout.block_tokens
        # Re-entrant: a finalizer may run in a thread that holds it.
        self._lock = threading.RLock()
        self._caches = 0
        self._depth = 0
        self._orphans: list[list[Row]] = []

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._sweep()

    def take(self, digest: bytes | None = None) -> Held:
        """A slot to write into. Never waits; raises LocalBudgetExceeded."""
        with self._working():
            return Held(self.request.take(digest), sealed=False)

    def hold(self, block: Block) -> Held:
        """Counts a leased block."""
        return Held(block, sealed=True)

    def share(self, blocks: Sequence[Held]) -> None:
        """One more row points at each of these."""
        with self._working():
            for held in blocks:
                held.refs += 1

    def drop(self, blocks: Sequence[Held]) -> None:
        """One row less points at each of these."""
        with self._working():
            self._drop(blocks)

    def _drop(self, blocks: Sequence[Held]) -> None:
        for held in blocks:
            held.refs -= 1
            if held.refs == 0:
                self.request.give_back(held.block)

    def own(self, held: Held, used: int, digest: bytes | None) -> Held:
        """`held` itself if one row alone may write it, else a copy of its first `used` tokens, code for code."""
        with self._working():
            if held.refs == 1 and not held.sealed:
                return held
            fresh = self.take(digest)
            if used:
                self.codec.copy_tokens(held.block, fresh.block, used)
            self.drop([held])
            return fresh

    def commit(self, entries: Sequence[tuple[Held, bytes, bytes]]) -> None:
        """Makes full blocks visible as (block, digest, parent digest), in the background; they are sealed."""
        with self._working():
            for held, _, _ in entries:
                held.sealed = True
            self.request.commit([(held.block, digest, parent) for held, digest, parent in entries])

    def ensure_ahead(self, count: int) -> None:
        """Asks for `count` slots to lie ready, in the background."""
        with self._working():
            self.request.ensure_ahead(count)

    def open_cache(self) -> None:
        """One more cache uses this pool."""
        with self._lock:
            self._caches += 1

    def close_cache(self, rows: list[Row]) -> None:
        """A cache with these rows is gone. Callable from a finalizer: it only counts and enqueues."""
        with self._lock:
            self._caches -= 1
            if self._caches == 0:
                self._orphans.clear()
                self.request.close()
                return
            self._orphans.append(rows)
            # Inside another call of this thread (a finalizer may come at any time) that call sweeps at its end.
            if not self._depth:
                self._sweep()

    def _sweep(self) -> None:
        while self._orphans:
            for row in self._orphans.pop():
                self._drop(row.blocks)
