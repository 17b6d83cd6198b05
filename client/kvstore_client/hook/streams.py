"""What a request's kernels on a CUDA device still have to do, as others can ask about it without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from kvstore_client.device_work import Done, sent_so_far


class _All:
    """Several works as one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Done]) -> None:
        self._works = list(works)

    def query(self) -> bool:
        """Whether all have ended; RuntimeError when a device has failed."""
        while self._works and self._works[-1].query():
            self._works.pop()
        return not self._works


def together(works: Sequence[Done]) -> Done | None:
    """All of these as one; None if there are none."""
    return _All(works) if len(works) > 1 else next(iter(works), None)


def ended(work: Done) -> bool:
    """Whether nothing needs to wait for it any more. A device that has failed does nothing more."""
    try:
        return work.query()
    except RuntimeError:
        return True


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a CUDA device the current one, which Triton's launches need; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread's kernels on `device` go to; None on a CPU, where nothing is ever outstanding."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def work_so_far(stream: torch.cuda.Stream | None) -> Done | None:
    """Everything that was sent to `stream` until now. None if there is no stream, or its device has failed."""
    if stream is None:
        return None
    try:
        return sent_so_far(stream)
    except RuntimeError:
        # Also from a finalizer, or behind the error that the caller should see.
        return None
