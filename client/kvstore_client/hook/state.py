"""The state behind a KVStoreCache: rows of blocks, one length for all layers, one forward pass at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from kvstore_kernels.codecs import SealedCodec
from kvstore_kernels.table import BlockTable

from kvstore_client.blocks import NO_PARENT
from kvstore_client.hook.errors import CacheStateError, UnsupportedInputError
from kvstore_client.hook.padding import Padding
from kvstore_client.hook.rows import BlockPool, Held, Row, make_room, read_layer
from kvstore_client.hook.step import Step, Stored
from kvstore_client.hook.streams import current_stream, work_so_far

if TYPE_CHECKING:
    from kvstore_client.blocks import Block
    from kvstore_client.hook.firsttoken import FirstKV
    from kvstore_client.hook.report import HitReport
    from kvstore_client.hook.seam import OpeningLike

# Slots kept ready for each row, so that a step never waits for one.
BLOCKS_AHEAD = 2


class CacheState:
    """Rows, table and length of one cache.

    Invariants: `length` batch positions are cached in every layer (padding counts); row r holds
    max(0, length - start) tokens, and at least the blocks for them; `table` mirrors the rows' blocks. A forward pass
    takes all its blocks in `begin`, before anything is computed, and counts only when its last layer is written.
    A decode step never waits for the device. One thread at a time; copies may live in other threads.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.monotonic, *, gathers: bool = False) -> None:
        """`gathers`: the model's own attention is given K and V as tensors; rows have no padding then."""
        self.pool = pool
        self.gathers = gathers
        self.opening: OpeningLike | None = None  # to be ended before the first use
        self.device = pool.device
        self.codec = pool.codec
        self.block_tokens = pool.block_tokens
        self.layers = pool.namespace.layout.layers
        self.rows: list[Row] = []
        self.table: BlockTable | None = None
        self.length = 0
        # So many of them were fed by this package itself, and every row's `ids` say what they are.
        self.known = 0
        self.step: Step | None = None
        self.closed = False
        # Set while generate() feeds the ids that `chain` was made of: full blocks are committed as they fill.
        self.armed = False
        # Digests somebody else holds already.
        self.held_elsewhere: set[bytes] = set()
        # The rows may be repeated by the first forward pass that has a multiple of them (beams).
        self.expandable = False
        # The first forward pass is given the full ids; the cached ones are to be cut off.
        self.full_ids_next = False
        self.reused = False
        self.padding = Padding(pool.device)
        self._stream: torch.cuda.Stream | None = None  # where the last pass was sent to
        self.report: HitReport | None = None
        # The report is of the look-up that filled this cache, and no request has run on it yet.
        self.fresh_report = False
        self.clock = clock
        # When the first pass was written, and when the second began: the first token was chosen in between.
        self.first_step_at: float | None = None
        self.second_step_at: float | None = None
        self.committed = 0
        pool.open_cache()

    def ready(self) -> None:
        """Ends what a look-up began. Raises LocalBudgetExceeded, or a ServiceError of a store that is `required`."""
        if self.opening is not None:
            opening, self.opening = self.opening, None
            opening.fill(self)

    def seq_length(self, layer: int = 0) -> int:
        """Batch positions cached in a layer."""
        self.ready()
        step = self.step
        return self.length + (step.q if step is not None and not step.finished and layer < step.done else 0)

    def tokens(self, row: int) -> int:
        """Tokens cached in a row, padding not counted."""
        return max(0, self.length - self.rows[row].start)

    def start_rows(self, starts: Sequence[int]) -> None:
        """Makes the rows of an empty cache."""
        self.check_open()
        if self.rows:
            raise CacheStateError(f"the cache has {len(self.rows)} rows already; reset() it first")
        self.rows = [Row(start) for start in starts]
        self.table = BlockTable(len(starts), block_tokens=self.block_tokens)

    def adopt(self, past: int, blocks: Sequence[Sequence[Block]]) -> None:
        """Fills fresh rows up to batch position `past` from leased blocks; the last one in part, copied.

        Raises LocalBudgetExceeded; the cache is then empty rows again.
        """
        for row, leased in zip(self.rows, blocks, strict=True):
            tokens = max(0, past - row.start)
            full, rest = divmod(tokens, self.block_tokens)
            row.blocks = [self.pool.hold(block) for block in leased[:full]]
            row.sealed = full
            if rest:
                digest = row.chain[full] if full < len(row.chain) else None
                row.blocks.append(self.pool.own(self.pool.hold(leased[full]), rest, digest))
        self.length = self.known = past
        self.reused = any(row.blocks for row in self.rows)
        self._rebuild_table()

    def know_first_tokens(self, first_token: Callable[[bytes, int], FirstKV]) -> None:
        """Tells the exact first token of rows whose first block came from the store, if the codec serves it exactly."""
        table = self.table
        sealed = [each for each in self.codec.members if isinstance(each, SealedCodec)]
        if not sealed or table is None:
            return
        fingerprint = self.pool.namespace.identity.fingerprint
        for index, row in enumerate(self.rows):
            if self.tokens(index) and len(row.ids):
                exact = first_token(fingerprint, int(row.ids[0]))
                for codec in sealed:
                    codec.know_first(table, index, exact)

    # -- one forward pass -------------------------------------------------------------------------------------

    def begin(self, rows: int, q: int, mask: torch.Tensor | None) -> Step:
        """Starts (or, for the same pass, returns) the pass over `q` new batch positions; takes the blocks it needs.

        `mask` is 2-D [rows, length + q], True where there is a token. Raises UnsupportedInputError, CacheStateError,
        LocalBudgetExceeded; the cache is then what it was.
        """
        self.check_open()
        if torch.is_autocast_enabled(self.device.type):
            raise UnsupportedInputError(
                "torch.autocast is active: K and V would be computed in another dtype than the model's, for which this "
                "cache was made; call the model outside of it"
            )
        step = self.step
        if step is not None and not step.finished and step.done:
            raise CacheStateError(
                f"the last forward pass wrote {step.done} of {self.layers} layers and then stopped; call crop(0) to "
                "drop what it wrote"
            )
        self._fit_rows(rows)
        known = [row.start for row in self.rows]
        starts = self.padding.starts(mask, rows=rows, cached=self.length, new=q, known=known, fixed=self.armed)
        if step is not None and not step.finished and step.q == q and step.starts == tuple(starts):
            return step
        self.step = None
        self._stream = current_stream(self.device)
        for row, start in zip(self.rows, starts, strict=True):
            row.start = start
        took = self.make_room(q)
        assert self.table is not None
        mask, look = self.padding.mask_of(starts), not self.padding.looked_at
        self.step = step = Step(
            self.codec, self.table, past=self.length, q=q, starts=starts, mask=mask, reused=self.reused,
            look_at_positions=look,
        )  # fmt: skip
        for index, row in enumerate(self.rows):
            self.table.set_tokens(index, max(0, self.length + q - row.start))
        if took and self.length:
            self.pool.ensure_ahead(BLOCKS_AHEAD * len(self.rows))
        if self.first_step_at is not None and self.second_step_at is None:
            self.second_step_at = self.clock()
        self.full_ids_next = False
        return step

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Stored:
        """Writes one layer's new K and V [rows, kv_heads, q, dim]; what it returns stands for all of the layer's."""
        step = self.step
        if step is None or step.finished or step.q != key.shape[2] or len(step.starts) != key.shape[0]:
            layout = self.pool.namespace.layout
            if (key.shape[1], key.shape[3], value.shape[3]) != (layout.kv_heads, layout.k_dim, layout.v_dim):
                raise CacheStateError(
                    f"K of {key.shape[1]} heads of {key.shape[3]} given to a cache of {layout.kv_heads} heads of "
                    f"{layout.k_dim}: it was made for another model"
                )
            step = self.begin(key.shape[0], key.shape[2], None)
        if layer != step.done:
            raise CacheStateError(f"layer {layer} updated after {step.done} layers; expected layer {step.done}")
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        self.codec.write(layer, key, value, step.table, step.targets)
        step.done += 1
        if step.done == self.layers:
            self._finish(step)
        return Stored(step, layer, key, value)

    def _finish(self, step: Step) -> None:
        step.finished = True
        self.padding.looked_at = True
        self.expandable = False
        known_so_far = self.armed and self.known == self.length
        self.length += step.q
        if known_so_far:
            self.note_known()
        if self.armed:
            self.commit_full_blocks()
        if self.first_step_at is None:
            self.first_step_at = self.clock()

    def note_known(self) -> None:
        """All that is cached was fed by this package: known are those positions whose ids the rows have.

        In decode that is the prompt until generate() returns; one that is cancelled leaves the rest unknown.
        """
        self.known = min([self.length, *(row.start + len(row.ids) for row in self.rows)])

    def commit_full_blocks(self) -> None:
        """Commits the full blocks whose token ids are known and that nobody is known to hold."""
        entries: list[tuple[Held, bytes, bytes]] = []
        for index, row in enumerate(self.rows):
            # Nobody could find what lies behind a block that isn't committed.
            full = min([len(row.chain), self.tokens(index) // self.block_tokens, *row.own_only])
            for block in range(row.sealed, full):
                held, digest = row.blocks[block], row.chain[block]
                if held.sealed or digest in self.held_elsewhere:
                    continue
                entries.append((held, digest, row.chain[block - 1] if block else NO_PARENT))
                self.held_elsewhere.add(digest)
            row.sealed = max(row.sealed, full)
        if entries:
            self.pool.commit(entries)
            self.committed += len(entries)

    def _fit_rows(self, rows: int) -> None:
        if not self.rows:
            self.start_rows([0] * rows)
        elif rows != len(self.rows):
            if not self.expandable or rows % len(self.rows):
                raise CacheStateError(
                    f"{rows} rows given to a cache of {len(self.rows)}; use batch_repeat_interleave() or "
                    "batch_select_indices() to change them"
                )
            repeats = rows // len(self.rows)
            self.select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def make_room(self, q: int) -> bool:
        """Every row gets writable blocks for its tokens up to length + q; True if any was taken."""
        self.ready()
        assert self.table is not None
        return make_room(self.pool, self.rows, self.table, self.length, q, named=self.armed)

    # -- rows -------------------------------------------------------------------------------------------------

    def select(self, chosen: Sequence[int]) -> None:
        """The rows become rows `chosen` of the present ones, which share their blocks; nothing is copied."""
        self.check_settled()
        chosen = [int(row) for row in chosen]
        if chosen == list(range(len(self.rows))):
            return
        if not chosen or any(not 0 <= row < len(self.rows) for row in chosen):
            raise CacheStateError(
                f"rows {chosen} chosen from a cache of {len(self.rows)}: expected 0 to {len(self.rows) - 1}"
            )
        old = self.rows
        new = [old[row].copy() for row in chosen]
        for row in new:
            self.pool.share(row.blocks)
        for row in old:
            self.pool.drop(row.blocks)
        assert self.table is not None
        self.rows = new
        self.table = self.table.select_rows(chosen)

    def crop_to(self, length: int) -> None:
        """Drops everything behind batch position `length`, and what an unfinished pass wrote."""
        self.check_open()
        self.step = None
        self.padding.forget()
        length = max(0, min(length, self.length))
        for index, row in enumerate(self.rows):
            tokens = max(0, length - row.start)
            keep = -(-tokens // self.block_tokens)
            if keep < len(row.blocks):
                self.pool.drop(row.blocks[keep:])
                del row.blocks[keep:]
                assert self.table is not None
                self.table.drop_blocks(index, keep)
            assert self.table is not None
            self.table.set_tokens(index, tokens)
            row.ids = row.ids[:tokens]
            full, rest = divmod(tokens, self.block_tokens)
            del row.chain[full:]
            row.sealed = min(row.sealed, full)
            row.own_only = frozenset(block for block in row.own_only if block < full + bool(rest))
            tail = self.table.tail
            if rest and tail is not None and tail.sealed_until(index) > tokens:
                # Its first part is read back from codes and quantized again: such a block is nobody else's.
                row.own_only |= {full}
        self.length = length
        self.known = min(self.known, length)

    def clear(self) -> None:
        """Back to a cache without rows."""
        self.check_open()
        for row in self.rows:
            self.pool.drop(row.blocks)
        self.rows = []
        self.table = None
        self.length = self.known = 0
        self.step = None
        self.reused = False
        self.padding = Padding(self.device)
        self.armed = False

    def release(self) -> None:
        """Closes: gives all blocks back and keeps nothing that maps a slab, however long this object lives.

        Idempotent; callable from a finalizer.
        """
        if self.closed:
            return
        self.closed = True
        self.opening = None
        rows, table = self.rows, self.table
        self.rows = []
        self.table = self.step = None
        if table is not None:
            # Views of slabs, and whatever was compiled for the table and points back at it.
            table.view_cache.clear()
        self.pool.close_cache(rows, work_so_far(self._stream))

    def fork(self) -> CacheState:
        """A copy that shares all blocks until one of the two writes."""
        self.check_settled()
        other = CacheState(self.pool, self.clock, gathers=self.gathers)
        other.rows = [row.copy() for row in self.rows]
        for row in other.rows:
            self.pool.share(row.blocks)
        other.table = None if self.table is None else self.table.select_rows(range(len(self.rows)))
        other.length, other.known = self.length, self.known
        other.reused = self.reused
        other.padding.looked_at = self.padding.looked_at
        other.held_elsewhere = set(self.held_elsewhere)
        other.report = self.report
        return other

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V dequantized: float32 [rows, kv_heads, length, dim], zeros where there is padding."""
        self.check_settled()
        tokens = [self.tokens(row) for row in range(len(self.rows))]
        return read_layer(self.pool, self.table, layer, self.length, tokens)

    def _rebuild_table(self) -> None:
        self.table = BlockTable(len(self.rows), block_tokens=self.block_tokens)
        for index, row in enumerate(self.rows):
            self.table.append_blocks(index, [held.block for held in row.blocks])
            self.table.set_tokens(index, self.tokens(index))

    def check_open(self) -> None:
        """Raises CacheStateError on a closed cache. Ends what a look-up began."""
        self.ready()
        if self.closed:
            raise CacheStateError("this cache is closed, its blocks may be gone: make a new one with store.cache(...)")

    def check_settled(self) -> None:
        """Raises CacheStateError on a closed cache and between two layers."""
        self.check_open()
        step = self.step
        if step is not None and not step.finished and step.done:
            raise CacheStateError(f"{step.done} of {self.layers} layers are written; finish the pass or call crop(0)")

    def __repr__(self) -> str:
        return f"CacheState(rows={len(self.rows)}, length={self.length}, closed={self.closed})"
