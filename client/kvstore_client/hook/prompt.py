"""A batch of prompts as the store sees it: rows of token ids without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore_client.hook.digest import TokenIds
from kvstore_client.hook.errors import UnsupportedInputError
from kvstore_client.hook.masks import padding_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids[r]` are row r's tokens; `starts[r]` padding tokens stand before them; starts[r] + len(ids[r]) = length."""

    ids: list[TokenIds]
    starts: list[int]
    length: int


def read_prompt(ids: torch.Tensor, mask: torch.Tensor | None) -> Prompt:
    """From ids and mask [rows, length]. Raises UnsupportedInputError unless all padding is on the left."""
    if ids.dim() != 2 or ids.is_floating_point() or not ids.shape[0] or not ids.shape[1]:
        raise UnsupportedInputError(
            f"input_ids of shape {tuple(ids.shape)} and {ids.dtype}; expected integers [rows, tokens]"
        )
    rows, length = ids.shape
    starts = [0] * rows
    if mask is not None:
        if tuple(mask.shape) != (rows, length):
            raise UnsupportedInputError(f"attention_mask of shape {tuple(mask.shape)}; expected {(rows, length)}")
        starts, ones = padding_of(mask)
        for row in range(rows):
            if starts[row] + ones[row] != length:
                raise UnsupportedInputError(
                    f"attention_mask of row {row} has zeros that are not all on the left: pad on the left "
                    "(tokenizer.padding_side = 'left')"
                )
    plain = ids.detach().to("cpu", torch.int64).numpy()
    return Prompt([plain[row, start:].copy() for row, start in enumerate(starts)], starts, length)


def inferred_mask(ids: torch.Tensor, pad: Any, eos: Any) -> torch.Tensor | None:
    """The mask that generate() makes up when it is given none: pad tokens are padding unless they end a text."""
    if pad is None:
        return None
    pad_id = int(pad)
    ends = (
        []
        if eos is None
        else [int(e) for e in (eos if isinstance(eos, (list, tuple)) else torch.as_tensor(eos).flatten().tolist())]
    )
    if pad_id in ends or not bool((ids == pad_id).any()):
        return None
    return (ids != pad_id).long()


def read_unmasked_prompt(ids: torch.Tensor, pad: Any, eos: Any) -> Prompt:
    """From ids without a mask, read the way generate() reads them. Raises UnsupportedInputError."""
    mask = inferred_mask(ids, pad, eos) if ids.dim() == 2 else None
    try:
        return read_prompt(ids, mask)
    except UnsupportedInputError as error:
        if mask is None:
            raise
        # The caller passed no mask: a word about one would say nothing to them.
        raise UnsupportedInputError(
            f"input_ids without an attention_mask: pad ids ({int(pad)}) inside the text were taken for padding; pass "
            "attention_mask explicitly, with ones for all tokens of the text (and padding, if any, on the left)"
        ) from error


def positions_of(starts: list[int], first: int, last: int) -> torch.Tensor:
    """Positions of the batch's columns [first, last) in each row's own sequence, int64 [rows, last - first]."""
    columns = torch.arange(first, last).view(1, -1)
    return (columns - torch.tensor(starts).view(-1, 1)).clamp_min(0)
