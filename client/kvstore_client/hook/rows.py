"""Which slots a cache's rows hold, counted, so that beams, branches and batches share a past by reference."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from kvstore_kernels.codecs import make_codec

from kvstore_client.device_work import Done
from kvstore_client.hook.digest import TokenIds
from kvstore_client.hook.streams import current_stream, ended, together, work_so_far

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import Codec
    from kvstore_kernels.table import BlockTable

    from kvstore_client.blocks import Block
    from kvstore_client.hook.seam import RequestLike
    from kvstore_client.namespace import Namespace


_CPU = torch.device("cpu")
_codecs: weakref.WeakKeyDictionary[Namespace, Codec] = weakref.WeakKeyDictionary()
_codecs_lock = threading.Lock()


def codec_of(namespace: Namespace) -> Codec:
    """The namespace's codec: one for all its requests, as it keeps the plan's numbers ready on the device."""
    with _codecs_lock:
        codec = _codecs.get(namespace)
        if codec is None:
            _codecs[namespace] = codec = make_codec(namespace.layout, namespace.plan)
        return codec


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
    `chain` the digests of the full blocks of `ids`, and the first `sealed` blocks need no commit any more. The blocks
    `own_only` aren't committed: part of what they hold was quantized twice.
    """

    start: int = 0
    blocks: list[Held] = field(default_factory=list)
    ids: TokenIds = field(default_factory=no_ids)
    chain: list[bytes] = field(default_factory=list)
    sealed: int = 0
    own_only: frozenset[int] = frozenset()

    def copy(self) -> Row:
        """A row over the same blocks; the caller counts them."""
        return Row(self.start, list(self.blocks), self.ids, list(self.chain), self.sealed, self.own_only)


class BlockPool:
    """The slots of one request, for the caches that share it (a cache and its deep copies).

    Invariants: a block is written only while one row points at it and it isn't sealed; it is given back when no row
    points at it, behind the device work that may still read it; the request is closed with the last cache. Safe from
    several threads.
    """

    def __init__(self, request: RequestLike, namespace: Namespace, device: torch.device = _CPU) -> None:
        self.request = request
        self.namespace = namespace
        # Where the model computes.
        self.device = device
        self.codec = codec_of(namespace)
        self.block_tokens = namespace.layout.block_tokens
        # Re-entrant: a finalizer may run in a thread that holds it.
        self._lock = threading.RLock()
        self._caches = 0
        self._depth = 0
        self._orphans: list[tuple[list[Row], Done | None]] = []
        # What closed caches have sent to the device and hasn't ended.
        self._outstanding: list[Done] = []

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

    def take_all(self, digests: Sequence[bytes | None]) -> list[Held]:
        """A slot to write into for each. Never waits; raises LocalBudgetExceeded, and nothing is taken then."""
        with self._working():
            return [Held(block, sealed=False) for block in self.request.take_all(digests)]

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
            self._drop(blocks, None)

    def _drop(self, blocks: Sequence[Held], after: Done | None) -> None:
        for held in blocks:
            held.refs -= 1
            if held.refs == 0:
                if after is None:
                    after = work_so_far(current_stream(self.device))
                if self._outstanding and after is not None:
                    after = together([after, *self._outstanding])
                self.request.give_back(held.block, after=after)

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
            # This thread's kernels so far include those that wrote the blocks.
            after = work_so_far(current_stream(self.device))
            self.request.commit([(held.block, digest, parent) for held, digest, parent in entries], after=after)

    def ensure_ahead(self, count: int) -> None:
        """Asks for `count` slots to lie ready, in the background."""
        with self._working():
            self.request.ensure_ahead(count)

    def release_ahead(self) -> None:
        """Gives back the slots that lie ready."""
        with self._working():
            self.request.release_ahead(work_so_far(current_stream(self.device)))

    def open_cache(self) -> None:
        """One more cache uses this pool."""
        with self._lock:
            self._caches += 1

    def close_cache(self, rows: list[Row], after: Done | None = None) -> None:
        """A cache with these rows is gone; the device reads them until `after`.

        Callable from a finalizer: it only counts and enqueues.
        """
        with self._lock:
            self._caches -= 1
            self._outstanding = [work for work in self._outstanding if not ended(work)]
            if after is not None:
                self._outstanding.append(after)
            if self._caches == 0:
                self._orphans.clear()
                self.request.close(after=together(self._outstanding))
                return
            self._orphans.append((rows, after))
            # Inside another call of this thread (a finalizer may come at any time) that call sweeps at its end.
            if not self._depth:
                self._sweep()

    def _sweep(self) -> None:
        while self._orphans:
            rows, after = self._orphans.pop()
            for row in rows:
                self._drop(row.blocks, after)


def make_room(pool: BlockPool, rows: Sequence[Row], table: BlockTable, length: int, new: int, *, named: bool) -> bool:
    """Every row gets writable blocks for its tokens up to batch position length + new; True if any was taken.

    `named`: blocks are taken by the digests of the rows' chains. Raises LocalBudgetExceeded; what was taken stays.
    """
    took = False
    size = pool.block_tokens
    for index, row in enumerate(rows):
        have = max(0, length - row.start)
        want = max(0, length + new - row.start)
        blocks = -(-want // size)
        chain = row.chain if named else []
        for block in range(have // size, min(blocks, len(row.blocks))):
            digest = chain[block] if block < len(chain) else None
            held = pool.own(row.blocks[block], max(0, have - block * size), digest)
            if held is not row.blocks[block]:
                row.blocks[block] = held
                # What is written from here on isn't what was committed.
                row.sealed = min(row.sealed, block)
                table.replace_block(index, block, held.block.slab, held.block.slot)
                took = True
        if len(row.blocks) < blocks:
            wanted = [chain[block] if block < len(chain) else None for block in range(len(row.blocks), blocks)]
            taken = pool.take_all(wanted)
            row.blocks += taken
            table.append_blocks(index, [held.block for held in taken])
            took = True
    return took


def read_layer(
    pool: BlockPool, table: BlockTable | None, layer: int, length: int, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's K and V: float32 [rows, kv_heads, length, dim], each row's tokens at its end, zeros before them."""
    layout = pool.namespace.layout
    keys = torch.zeros(len(tokens), layout.kv_heads, length, layout.k_dim, device=pool.device)
    values = torch.zeros(len(tokens), layout.kv_heads, length, layout.v_dim, device=pool.device)
    for row, count in enumerate(tokens):
        if table is not None and count:
            k, v = pool.codec.read(layer, table, row, 0, count)
            keys[row, :, length - count :], values[row, :, length - count :] = k, v
    return keys, values
