"""The exact K and V of the tokens behind a row's last whole block, for codecs that quantize whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# K [kv_heads, k_dim] and V [kv_heads, v_dim] of a row's first token.
FirstToken = tuple[torch.Tensor, torch.Tensor]
# A write of at most this many tokens (a decode step, or the few of an assisted one) leaves the block that it began in
# exact until the next write: every token then sees its own block exact, however many come at once.
SHORT_WRITE = 32


class Tail:
    """For each layer and row: the tokens [base, end) exactly, and the row's first token.

    Invariants: base is a multiple of the block size, end - base <= block size + SHORT_WRITE; what lies before
    end - end % block size is in sealed blocks, too; layers may differ while a forward pass is on its way.
    """

    def __init__(self, layers: int, rows: int, block_tokens: int) -> None:
        self.rows, self.block_tokens = rows, block_tokens
        self.capacity = block_tokens + SHORT_WRITE
        self.base = [[0] * rows for _ in range(layers)]
        self.end = [[0] * rows for _ in range(layers)]
        # [rows, kv_heads, capacity, dim] in the model's dtype, made when a layer is first written.
        self.k: list[torch.Tensor | None] = [None] * layers
        self.v: list[torch.Tensor | None] = [None] * layers
        # Each row's first token.
        self.first: list[list[FirstToken | None]] = [[None] * rows for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v) if t is not None)

    def sealed_until(self, row: int) -> int:
        """Up to which token some layer of the row has sealed blocks."""
        return max(end[row] for end in self.end) // self.block_tokens * self.block_tokens

    def buffers(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's buffers, made like k [rows, kv_heads, L, k_dim] and v."""
        held_k, held_v = self.k[layer], self.v[layer]
        if held_k is None or held_v is None or held_k.dtype != k.dtype or held_v.dtype != v.dtype:
            made = []
            with torch.inference_mode(False):
                for held, like in ((held_k, k), (held_v, v)):
                    shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
                    # What lies there before a token is written must not make a sum NaN.
                    new = torch.zeros(shape, dtype=like.dtype, device=like.device)
                    made.append(new if held is None else new.copy_(held))
            held_k, held_v = self.k[layer], self.v[layer] = made[0], made[1]
        return held_k, held_v

    def select(self, rows: Sequence[int]) -> Tail:
        """A tail of its own for these rows of this one."""
        chosen = Tail(len(self.base), len(rows), self.block_tokens)
        index = torch.tensor(list(rows))
        for layer in range(len(self.base)):
            chosen.base[layer] = [self.base[layer][row] for row in rows]
            chosen.end[layer] = [self.end[layer][row] for row in rows]
            chosen.first[layer] = [self.first[layer][row] for row in rows]
            for mine, theirs in ((self.k, chosen.k), (self.v, chosen.v)):
                held = mine[layer]
                if held is not None:
                    # Once a device: the host waits for this copy.
                    index = index.to(held.device)
                    # An inference tensor could not be written outside of the mode it was made in.
                    with torch.inference_mode(False):
                        own = torch.empty((len(rows), *held.shape[1:]), dtype=held.dtype, device=held.device)
                        theirs[layer] = own.copy_(held[index])
        return chosen
