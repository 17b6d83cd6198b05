"""A table's tail on a CUDA device: what isn't quantized yet, and each row's first token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore_kernels.gpu.addresses import upload
from kvstore_kernels.gpu.launch import Pointer, pointer
from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec
from kvstore_kernels.table import BlockTable
from kvstore_kernels.tail import SHORT_WRITE, FirstToken, Tail


class DeviceTail:
    """The device side of `table.tail`, which says what is held: kernels write the buffers it points at.

    Invariants: a layer's buffers lie in `table.tail`, in the model's dtype, once the layer was written or attended; the
    first tokens lie in one buffer a layer, and `known` says for which rows. What `table.tail.first` was told stays as
    it is: tables of selected rows have it, too.
    """

    def __init__(self, on: SealedDeviceCodec, rows: int) -> None:
        self._on, self._rows = on, rows
        layers = on.layout.layers
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._firsts: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers
        # Whose exact first tokens lie in the buffers.
        self._holds: list[list[FirstToken | None]] = [[None] * rows for _ in range(layers)]
        self._pointers: list[tuple[Pointer, Pointer, Pointer, Pointer] | None] = [None] * layers
        self._known = torch.zeros(rows, dtype=torch.int32, device=on.device)
        self._known_for = [False] * rows
        self.known = pointer(self._known)

    def follow(self, table: BlockTable, layer: int) -> None:
        """Makes the layer's buffers where they are missing, and brings first tokens that somebody else knew."""
        tail = table.tail
        if tail is None:
            tail = table.tail = Tail(self._on.layout.layers, table.rows, table.block_tokens)
        firsts = self._firsts[layer]
        if firsts is None or tail.k[layer] is not self._held[layer][0]:
            firsts = self._make(tail, layer)
        holds, told = self._holds[layer], tail.first[layer]
        news = [row for row, first in enumerate(told) if first is not holds[row]]
        if news:
            firsts = self.begin_again(layer, news)
            for row in news:
                first = holds[row] = told[row]
                if first is not None:
                    firsts[0][row].copy_(first[0])
                    firsts[1][row].copy_(first[1])
        known = [first is not None for first in told]
        if known != self._known_for:
            self._known_for = known
            upload(np.array(known, np.int32), self._known)

    def pointers(self, layer: int) -> tuple[Pointer, Pointer, Pointer, Pointer]:
        """K and V of the tail, and of the first tokens."""
        found = self._pointers[layer]
        assert found is not None
        return found

    def base(self, table: BlockTable, layer: int, row: int) -> int:
        """The token that the row's tail begins with."""
        assert table.tail is not None
        return table.tail.base[layer][row]

    def end(self, table: BlockTable, layer: int, row: int) -> int:
        """The token behind the row's tail."""
        assert table.tail is not None
        return table.tail.end[layer][row]

    def front(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [kv_heads, capacity, dim] of a row's tail."""
        k, v = self._held[layer]
        return k[row], v[row]

    def move(self, layer: int, row: int, first: int, count: int) -> None:
        """Moves `count` tokens that lie `first` behind the front to it."""
        for held in self.front(layer, row):
            held[:, :count] = held[:, first : first + count].clone()

    def begin_again(self, layer: int, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers for these rows' first tokens, about to be written: new ones if some of them were told before."""
        holds, firsts = self._holds[layer], self._firsts[layer]
        assert firsts is not None
        if any(holds[row] is not None for row in rows):
            with torch.inference_mode(False):
                k, v = (torch.empty_like(held).copy_(held) for held in firsts)
            firsts = self._firsts[layer] = (k, v)
            self._pointers[layer] = (*self.pointers(layer)[:2], pointer(k), pointer(v))
            for row in rows:
                holds[row] = None
        return firsts

    def wrote(self, table: BlockTable, layer: int, row: int, start: int, end: int) -> None:
        """Kernels were sent that write the row's tokens [start, end)."""
        tail = table.tail
        assert tail is not None
        size = table.block_tokens
        tail.base[layer][row] = (start if end - start <= SHORT_WRITE else end) // size * size
        tail.end[layer][row] = end
        if start == 0:
            firsts = self._firsts[layer]
            assert firsts is not None
            tail.first[layer][row] = self._holds[layer][row] = (firsts[0][row], firsts[1][row])

    def _make(self, tail: Tail, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        layout, device, dtype = self._on.layout, self._on.device, self._on.tail_dtype
        made = []
        # A table may be used outside the inference mode it was first written in.
        with torch.inference_mode(False):
            for held, dim in ((tail.k[layer], layout.k_dim), (tail.v[layer], layout.v_dim)):
                new = held
                if held is None or held.dtype != dtype or held.device != device:
                    shape = (self._rows, layout.kv_heads, layout.block_tokens + SHORT_WRITE, dim)
                    new = torch.empty(shape, dtype=dtype, device=device)
                    if held is not None:
                        new.copy_(held)
                assert new is not None
                made.append(new)
            firsts = tuple(
                torch.empty(self._rows, layout.kv_heads, held.shape[3], dtype=dtype, device=device) for held in made
            )
        tail.k[layer], tail.v[layer] = made
        self._held[layer] = (made[0], made[1])
        self._firsts[layer] = (firsts[0], firsts[1])
        self._holds[layer] = [None] * self._rows
        self._pointers[layer] = (pointer(made[0]), pointer(made[1]), pointer(firsts[0]), pointer(firsts[1]))
        return firsts[0], firsts[1]
