"""The padding of a cache's rows in each forward pass: checked without making a decode step wait for its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_client.device_work import Done
from kvstore_client.hook.errors import UnsupportedInputError
from kvstore_client.hook.masks import check_shape, row_starts
from kvstore_client.hook.step import MAX_DECODE_TOKENS
from kvstore_client.hook.streams import current_stream, ended, work_so_far


class Padding:
    """Finds each row's padding, and keeps what the mask function returns for it.

    Invariants: masks on a CPU are read in every pass; on a CUDA device in every pass but single steps. Those of
    generate() have more ones than the pass before and need no look, others get a late one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # generate() feeds: transformers makes masks and positions.
        self.in_generate = False
        # A pass of this call (or of this cache, in a loop of the caller's own) had its mask and positions read.
        self.looked_at = False
        self._late = LateCheck()
        self._mask: tuple[tuple[int, ...], torch.Tensor] | None = None

    def starts(
        self, mask: torch.Tensor | None, *, rows: int, cached: int, new: int, known: Sequence[int], fixed: bool
    ) -> list[int]:
        """See `row_starts`. Raises UnsupportedInputError, for a single step on CUDA maybe one step late."""
        if mask is not None and mask.device.type != "cpu" and (fixed or max(known) < cached):
            if self.in_generate and (fixed or self.looked_at):
                check_shape(mask, rows=rows, cached=cached, new=new)
                return list(known)
            if new <= MAX_DECODE_TOKENS and self.looked_at:
                check_shape(mask, rows=rows, cached=cached, new=new)
                self._late.raise_if_wrong()
                self._late.look(mask, self.mask_of(known)[:, :, 0, 0])
                return list(known)
        return row_starts(mask, rows=rows, cached=cached, new=new, known=known, fixed=fixed)

    def mask_of(self, starts: Sequence[int]) -> torch.Tensor:
        """`starts` as int32 [rows, 1, 1, 1] on the device; made when they change, which is not in decode."""
        wanted = tuple(starts)
        if self._mask is None or self._mask[0] != wanted:
            # A tensor made in inference mode could not be used outside it later.
            with torch.inference_mode(False):
                made = torch.tensor(wanted, dtype=torch.int32, device=self._device).view(-1, 1, 1, 1)
            self._mask = (wanted, made)
        return self._mask[1]

    def forget(self) -> None:
        """Steps were dropped, and what their masks were no longer counts."""
        self._late = LateCheck()


class LateCheck:
    """Compares the masks of single steps with the cache's padding on the device, and never waits for the answer.

    Invariants: a wrong mask is noted on the device for good; `raise_if_wrong` sees it as soon as the device got there,
    which is usually one step later.
    """

    def __init__(self) -> None:
        self._wrong: torch.Tensor | None = None
        self._answer: torch.Tensor | None = None
        self._pending: Done | None = None

    def look(self, mask: torch.Tensor, starts: torch.Tensor) -> None:
        """`mask` [rows, positions], `starts` integers [rows, 1] on the mask's device. A few launches, no more."""
        columns = torch.arange(mask.shape[1], device=mask.device)
        wrong = ((columns >= starts) != mask.to(torch.bool)).any()
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        if self._pending is None:
            if self._answer is None:
                # A buffer made in inference mode could not be written outside it later.
                with torch.inference_mode(False):
                    self._answer = torch.zeros((), dtype=torch.bool, pin_memory=mask.is_cuda)
            self._answer.copy_(self._wrong, non_blocking=True)
            self._pending = work_so_far(current_stream(mask.device)) or _Now()

    def raise_if_wrong(self) -> None:
        """Raises UnsupportedInputError if a mask that the device has looked at was wrong."""
        if self._pending is None or self._answer is None or not ended(self._pending):
            return
        self._pending = None
        if bool(self._answer):
            raise UnsupportedInputError(
                "attention_mask of an earlier step differs from the padding that the cache was filled with: pass the "
                "mask of the whole sequence, with ones for every token behind the padding; crop() the steps since"
            )


class _Now:
    def query(self) -> bool:
        """There was nothing to wait for."""
        return True
