"""The fast path of a decode step: one query a row over the row's whole history, with everything prepared.

Between two block borders each step reads the same blocks into the same work buffers, so views are made once and a step
is little more than one conversion and one product for each chunk of K and of V.

A number that one core converts and another multiplies has to travel between their caches. So a chunk is cut into
`splits` parts a head, such that heads * splits divides evenly by the threads: conversion and product then give each
thread the same share.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.scratch import SCORE_NUMBERS, TILE_NUMBERS
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable


class _Span(NamedTuple):
    """`blocks` blocks of one slab from the row's block `first` on; `slots` (int64) where they aren't consecutive."""

    slab: Slab
    slot: int
    first: int
    blocks: int
    slots: torch.Tensor | None

    def part(self, codec: TokenCodec, layer: int, name: str) -> torch.Tensor:
        """[blocks, kv_heads, *part.shape]: a view, or a copy of scattered slots."""
        view = self.slab.views(codec.layout)[layer][name]
        return view.narrow(0, self.slot, self.blocks) if self.slots is None else view.index_select(0, self.slots)


class _Chunk(NamedTuple):
    """A span that is converted at once, and the views of the work buffers it uses.

    Sizes: h kv heads, g query heads each, s splits, b blocks a split, n = s * b blocks, t = b * block_tokens tokens.
    """

    span: _Span
    splits: int
    # Written by conversion: [h, n, block_tokens, k_dim] and [h, s, v_dim, b, block_tokens].
    keys: torch.Tensor
    values: torch.Tensor
    # The same memory as the products read it: [h*s, k_dim, t] and [h*s, t, v_dim].
    key_matrix: torch.Tensor
    value_matrix: torch.Tensor
    # Scores, then weights, as the products see them [h*s, g, t], and the same memory as [h, g, s, t].
    raw: torch.Tensor
    raw_by_head: torch.Tensor
    # This chunk's columns of the row's scores [h, g, s, t] and of its scales [h, 1, s, t].
    scores: torch.Tensor
    scales: torch.Tensor
    # [h*s, g, k_dim] and [h*s, g, v_dim].
    query: torch.Tensor
    sums: torch.Tensor


class _Layer(NamedTuple):
    """One layer's codes (per chunk) and scales (per span), in the shapes of the buffers; None: gather at each use."""

    keys: list[torch.Tensor | None]
    values: list[torch.Tensor | None]
    key_scales: list[torch.Tensor | None]
    value_scales: list[torch.Tensor | None]


class RowPlan:
    """Work buffers and views for one row with `blocks` blocks in use.

    Invariants: belongs to one table, so to one thread at a time; valid while `serves` says so; buffers are
    bounded by TILE_NUMBERS and SCORE_NUMBERS; every chunk's splits are the first chunk's, or 1.
    """

    def __init__(self, codec: TokenCodec, table: BlockTable, row: int, blocks: int, group: int) -> None:
        layout = codec.layout
        threads = torch.get_num_threads()
        self.query_shape = (layout.kv_heads, group, layout.k_dim)
        self._row, self._blocks, self._threads, self._version = row, blocks, threads, table.version(row)
        self._codec, self._group = codec, group
        heads, size = layout.kv_heads, layout.block_tokens
        widest_dim = max(layout.k_dim, layout.v_dim)
        self._spans = _spans(table, row, blocks)
        cuts = _cuts(self._spans, max(1, TILE_NUMBERS // (heads * widest_dim * size)), _even_splits(heads, threads))
        self._splits = cuts[0][1]
        # Buffers made in inference mode could not be written outside it later.
        with torch.inference_mode(False):
            self._codes = torch.empty(heads * size * widest_dim * max(span.blocks for span, _ in cuts))
            self._raw = torch.empty(heads * group * size * blocks)
            self._scores = torch.empty(heads, group, blocks * size)
            self._scales = torch.empty(heads, blocks, size)
            self._query = torch.empty(heads, self._splits, group, layout.k_dim)
            self._sums = torch.empty(heads, self._splits, group, layout.v_dim)
        self._chunks = [self._chunk(span, splits) for span, splits in cuts]
        self._layers: list[_Layer | None] = [None] * layout.layers
        self._unused_views: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def serves(self, codec: TokenCodec, table: BlockTable, group: int) -> bool:
        """Whether the plan still fits: same codec and heads, same blocks, as many of them in use, same threads."""
        return (
            codec is self._codec
            and group == self._group
            and table.version(self._row) == self._version
            and -(-table.tokens(self._row) // table.block_tokens) == self._blocks
            and torch.get_num_threads() == self._threads
        )

    def attend(self, query: torch.Tensor, layer: int, tokens: int, scaling: float) -> torch.Tensor:
        """Query float32 [kv_heads, group, k_dim] over the row's `tokens` tokens -> new [kv_heads, group, v_dim]."""
        codec, chunks = self._codec, self._chunks
        own = self._layers[layer]
        if own is None:
            own = self._layers[layer] = self._layer(layer)
        unused = self._unused(tokens)
        factor = codec.query_factor(layer, scaling)
        repeated = query.unsqueeze(1).expand(-1, self._splits, -1, -1)
        torch.mul(repeated, factor if isinstance(factor, float) else factor.unsqueeze(1), out=self._query)
        if codec.scaled:
            self._load_scales(layer, "k_scales", own.key_scales)
        for chunk, keys in zip(chunks, own.keys, strict=True):
            chunk.keys.copy_(self._keys(chunk, layer) if keys is None else keys)
            torch.bmm(chunk.query, chunk.key_matrix, out=chunk.raw)
            if codec.scaled:
                torch.mul(chunk.raw_by_head, chunk.scales, out=chunk.scores)
            else:
                chunk.scores.copy_(chunk.raw_by_head)
        if unused is not None:
            unused[1].fill_(float("-inf"))
        torch.softmax(self._scores, dim=-1, out=self._scores)
        if codec.scaled:
            self._load_scales(layer, "v_scales", own.value_scales)
            if unused is not None:
                # A scale that nobody wrote may be NaN, and NaN times weight 0 is NaN.
                unused[2].zero_()
        for index, (chunk, values) in enumerate(zip(chunks, own.values, strict=True)):
            chunk.values.copy_(self._values(chunk, layer) if values is None else values)
            if codec.scaled:
                torch.mul(chunk.scores, chunk.scales, out=chunk.raw_by_head)
            else:
                chunk.raw_by_head.copy_(chunk.scores)
                if unused is not None and chunk is chunks[-1]:
                    unused[3].zero_()
            if index == 0:
                torch.bmm(chunk.raw, chunk.value_matrix, out=chunk.sums)
            else:
                torch.baddbmm(chunk.sums, chunk.raw, chunk.value_matrix, out=chunk.sums)
        return self._sums.sum(dim=1)

    def _unused(self, tokens: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(tokens, scores, scales, values of the last block) behind the row's tokens; None if every block is full."""
        if tokens == self._scores.shape[2]:
            return None
        if self._unused_views is None or self._unused_views[0] != tokens:
            size = self._codec.layout.block_tokens
            inside = tokens % size
            self._unused_views = (
                tokens,
                self._scores[:, :, tokens:],
                self._scales[:, -1, inside:],
                self._chunks[-1].values[:, -1, :, -1, inside:],
            )
        return self._unused_views

    def _load_scales(self, layer: int, name: str, sources: list[torch.Tensor | None]) -> None:
        for span, source in zip(self._spans, sources, strict=True):
            found = span.part(self._codec, layer, name).transpose(0, 1) if source is None else source
            target = self._scales
            if len(sources) > 1:
                target = target.narrow(1, span.first, span.blocks)
            target.copy_(found)

    def _keys(self, chunk: _Chunk, layer: int) -> torch.Tensor:
        return chunk.span.part(self._codec, layer, "k_codes").transpose(0, 1)

    def _values(self, chunk: _Chunk, layer: int) -> torch.Tensor:
        codes = chunk.span.part(self._codec, layer, "v_codes")
        return codes.view(chunk.splits, -1, *codes.shape[1:]).permute(2, 0, 3, 1, 4)

    def _layer(self, layer: int) -> _Layer:
        kept = [chunk if chunk.span.slots is None else None for chunk in self._chunks]
        return _Layer(
            [None if chunk is None else self._keys(chunk, layer) for chunk in kept],
            [None if chunk is None else self._values(chunk, layer) for chunk in kept],
            self._span_scales(layer, "k_scales"),
            self._span_scales(layer, "v_scales"),
        )

    def _span_scales(self, layer: int, name: str) -> list[torch.Tensor | None]:
        if not self._codec.scaled:
            return []
        return [
            span.part(self._codec, layer, name).transpose(0, 1) if span.slots is None else None for span in self._spans
        ]

    def _chunk(self, span: _Span, splits: int) -> _Chunk:
        layout = self._codec.layout
        heads, group, size, blocks = layout.kv_heads, self._group, layout.block_tokens, span.blocks
        each = blocks // splits
        width = each * size
        first, count = span.first * size, blocks * size
        codes = self._codes
        keys = codes[: heads * count * layout.k_dim]
        values = codes[: heads * count * layout.v_dim]
        raw = self._raw[heads * group * first : heads * group * (first + count)]
        query, sums = self._query, self._sums
        if splits == self._splits:
            flat_query, flat_sums = query.flatten(0, 1), sums.flatten(0, 1)
        else:
            flat_query, flat_sums = query[:, 0], sums[:, 0]
        return _Chunk(
            span=span,
            splits=splits,
            keys=keys.view(heads, blocks, size, layout.k_dim),
            values=values.view(heads, splits, layout.v_dim, each, size),
            key_matrix=keys.view(heads * splits, width, layout.k_dim).transpose(1, 2),
            value_matrix=values.view(heads * splits, layout.v_dim, width).transpose(1, 2),
            raw=raw.view(heads * splits, group, width),
            raw_by_head=raw.view(heads, splits, group, width).transpose(1, 2),
            scores=self._scores[:, :, first : first + count].view(heads, group, splits, width),
            scales=self._scales.view(heads, 1, -1)[:, :, first : first + count].view(heads, 1, splits, width),
            query=flat_query,
            sums=flat_sums,
        )


def plan_fits(blocks: int, query_heads: int, block_tokens: int) -> bool:
    """Whether one row's scores stay within SCORE_NUMBERS."""
    return blocks * block_tokens * query_heads <= SCORE_NUMBERS


def _even_splits(heads: int, threads: int) -> int:
    return threads // math.gcd(heads, threads)


def _spans(table: BlockTable, row: int, blocks: int) -> list[_Span]:
    """The row's blocks as runs of consecutive slots; where runs are short, as scattered slots of one slab."""
    entries = table.blocks(row)[:blocks]
    spans: list[_Span] = []
    first = 0
    while first < blocks:
        slab = entries[first].slab
        last = first
        while last < blocks and entries[last].slab is slab:
            last += 1
        slots = [entry.slot for entry in entries[first:last]]
        starts = [0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), len(slots)]
        # Gathering copies codes once more; more than a few runs cost more than that.
        if len(starts) - 1 > 4:
            spans.append(_Span(slab, slots[0], first, len(slots), torch.tensor(slots)))
        else:
            spans.extend(_Span(slab, slots[a], first + a, b - a, None) for a, b in pairwise(starts))
        first = last
    return spans


def _cuts(spans: list[_Span], most: int, splits: int) -> list[tuple[_Span, int]]:
    """Spans cut into near-equal chunks of at most `most` blocks, each with its splits."""
    cuts: list[tuple[_Span, int]] = []
    for span in spans:
        chunks = -(-span.blocks // most)
        each = -(-span.blocks // chunks)
        if each + splits - each % splits <= most and each % splits:
            each += splits - each % splits
        for at in range(0, span.blocks, each):
            count = min(each, span.blocks - at)
            slots = None if span.slots is None else span.slots[at : at + count]
            fitting = splits if count % splits == 0 and (not cuts or cuts[0][1] == splits) else 1
            cuts.append((_Span(span.slab, span.slot + at, span.first + at, count, slots), fitting))
    return cuts
