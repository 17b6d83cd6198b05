"""Blocks that lie elsewhere (in pinned host memory, on a peer device), brought to the compute device layer by layer."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore_kernels.gpu.copies import Copies
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab

# Layers in flight: one attended, one that has come, one on its way.
DEPTH = 3


class _Rows(NamedTuple):
    """`blocks` neighbouring slots of one slab, for the ring's places `first` on."""

    slab: Slab
    slot: int
    first: int
    blocks: int


class _Fetched(NamedTuple):
    layer: int
    buffer: int
    mark: Any


class FetchRing:
    """DEPTH buffers of one layer of all fetched blocks, filled ahead of the layers that read them.

    Invariants: memory is DEPTH * blocks * layer_bytes; a buffer is overwritten only behind the work that read it, and
    read only behind the copy that filled it; `_coming` is in the order of use, the layer being read first. Blocks are
    immutable while a table holds them, so what was fetched ahead for the next step stays right until the
    blocks change. Slabs are kept until the last copy from them is done. One thread at a time.
    """

    def __init__(self, layout: BlockLayout, copies: Copies, layers: Sequence[int] | None = None) -> None:
        """`layers`: those of the layout's codec, in order; None: all."""
        order = range(layout.layers) if layers is None else layers
        self._following = dict(zip(order, [*order[1:], order[0]], strict=True))
        self._offsets = {layer: layout.layer_offset(layer) for layer in order}
        self._layer_bytes = layout.layer_bytes
        self._copies = copies
        self._rows: list[_Rows] = []
        self._blocks = 0
        self._buffer: torch.Tensor | None = None
        self._capacity = 0
        self._coming: deque[_Fetched] = deque()
        # Per buffer: a mark behind the last work that read it.
        self._read: list[Any] = [None] * DEPTH
        self._next = 0
        # Copies in flight read these slabs.
        self._kept: list[Slab] = []
        weakref.finalize(self, _drain, copies, self._kept)

    def aim(self, blocks: Mapping[tuple[Slab, int], int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Fetches these (slab, slot) -> place from now on; int64 [DEPTH, blocks]: where each comes to lie."""
        rows = _runs(blocks)
        if rows != self._rows:
            # What is on its way is of the old blocks.
            self._drop()
            self._rows, self._blocks = rows, len(blocks)
            if self._blocks > self._capacity:
                self._capacity = max(self._blocks, self._capacity + self._capacity // 2)
                self._buffer = None
                self._buffer = self._copies.buffer(DEPTH * self._capacity * self._layer_bytes)
                # The memory may have been in use by work that isn't done yet.
                self._copies.copies_wait(self._copies.computed())
            slabs = {row.slab for row in rows}
            if not slabs.issuperset(self._kept):
                # A slab that leaves may be unmapped, and copies from it may be on their way.
                self._copies.finish()
            self._kept[:] = slabs
        assert self._buffer is not None
        places = np.arange(self._blocks, dtype=np.int64) * self._layer_bytes
        bases = self._buffer.data_ptr() + np.arange(DEPTH, dtype=np.int64) * (self._capacity * self._layer_bytes)
        return bases[:, None] + places[None, :]

    def acquire(self, layer: int) -> int:
        """The buffer with this layer; later work of the calling thread's stream waits for the copy."""
        coming = self._coming
        if not any(item.layer == layer for item in coming):
            self._drop()
            self._fetch(layer)
        while coming[0].layer != layer:
            coming.popleft()
        self._copies.work_waits(coming[0].mark)
        return coming[0].buffer

    def release(self) -> None:
        """The work that reads the layer acquired last is given: its buffer is free behind it. Fetches what comes next.

        Behind the last layer that is the next step's first.
        """
        done = self._coming.popleft()
        self._read[done.buffer] = self._copies.computed()
        last = self._coming[-1].layer if self._coming else done.layer
        while len(self._coming) < DEPTH:
            last = self._following[last]
            self._fetch(last)

    def _fetch(self, layer: int) -> None:
        assert self._buffer is not None
        buffer = self._next
        self._next = (buffer + 1) % DEPTH
        if self._read[buffer] is not None:
            self._copies.copies_wait(self._read[buffer])
        base = self._buffer.data_ptr() + buffer * self._capacity * self._layer_bytes
        for slab, slot, first, blocks in self._rows:
            self._copies.copy_rows(
                base + first * self._layer_bytes,
                slab.address(slot) + self._offsets[layer],
                slab.slot_bytes,
                self._layer_bytes,
                blocks,
                from_host=slab.device.type == "cpu",
            )
        self._coming.append(_Fetched(layer, buffer, self._copies.copied()))

    def _drop(self) -> None:
        """Forgets what was fetched ahead. Later copies go behind it on their stream, and behind the work so far."""
        if self._coming or any(mark is not None for mark in self._read):
            self._coming.clear()
            self._copies.copies_wait(self._copies.computed())
            self._read = [None] * DEPTH


def _runs(blocks: Mapping[tuple[Slab, int], int]) -> list[_Rows]:
    rows: list[_Rows] = []
    for (slab, slot), place in sorted(blocks.items(), key=lambda item: item[1]):
        last = rows[-1] if rows else None
        if last is not None and last.slab is slab and last.slot + last.blocks == slot:
            rows[-1] = last._replace(blocks=last.blocks + 1)
        else:
            rows.append(_Rows(slab, slot, place, 1))
    return rows


def _drain(copies: Copies, kept: list[Slab]) -> None:
    """Copies in flight must not outlive the mappings they read: a few milliseconds, once a table."""
    if kept:
        copies.finish()
        kept.clear()
