"""Left padding, read from a 2-D attention mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_client.hook.errors import UnsupportedInputError


def padding_of(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """For each row of a mask [rows, n]: how many zeros stand before the first one, and how many ones there are.

    On a CUDA device this waits for it, once.
    """
    bits = mask if mask.dtype == torch.bool else mask != 0
    # On uint8: bool has no argmax on every backend.
    first, ones = torch.stack((bits.view(torch.uint8).argmax(dim=1), bits.sum(dim=1))).tolist()
    return first, ones


def check_shape(mask: torch.Tensor, *, rows: int, cached: int, new: int) -> None:
    """Raises UnsupportedInputError unless the mask is [rows, cached + new]."""
    total = cached + new
    if tuple(mask.shape) != (rows, total):
        raise UnsupportedInputError(
            f"attention_mask has shape {tuple(mask.shape)}; expected ({rows}, {total}): {cached} cached and {new} new "
            "tokens"
        )


def row_starts(
    mask: torch.Tensor | None, *, rows: int, cached: int, new: int, known: Sequence[int], fixed: bool
) -> list[int]:
    """Padding of each row for a pass over `new` positions behind `cached` ones. O(rows * positions).

    `mask` [rows, cached + new] or None (no padding). `known` is the padding that the cache was filled with; `fixed`
    rows may not change theirs even before their first token. Raises UnsupportedInputError for holes, for padding that
    is not on the left, for another shape, and for padding that contradicts the cache.
    """
    total = cached + new
    if mask is None:
        padded = next((row for row, start in enumerate(known) if start and (cached or fixed)), None)
        if padded is not None:
            raise UnsupportedInputError(
                f"row {padded} has {known[padded]} padding tokens in the cache: pass attention_mask [{rows}, {total}]"
            )
        return [0] * rows
    check_shape(mask, rows=rows, cached=cached, new=new)
    first, ones = padding_of(mask)
    for row in range(rows):
        if not ones[row]:
            # A chunk in which this row has no token yet.
            first[row] = max(known[row], total)
            continue
        if first[row] + ones[row] != total:
            raise UnsupportedInputError(
                f"attention_mask of row {row} has {total - ones[row]} zeros that are not all on the left; pad on the "
                "left (tokenizer.padding_side = 'left')"
            )
        settled = fixed or min(first[row], known[row]) < cached
        if settled and first[row] != known[row]:
            raise UnsupportedInputError(
                f"attention_mask of row {row} has {first[row]} padding tokens; the cache was filled with {known[row]}: "
                "pass the mask of the whole sequence"
            )
    return first
