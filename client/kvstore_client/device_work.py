"""Work on a CUDA device, as the client's threads wait for it: never without a deadline. Imports torch when needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kvstore_client.errors import CudaError

DEADLINE_S = 60.0
"""How long the background waits for a device that is at work on blocks."""
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3
_threads = threading.local()


class Done(Protocol):
    """Device work that ends at some time: a torch.cuda.Event, or several as one."""

    def query(self) -> bool:
        """Whether it has ended. Never waits; RuntimeError when the device has failed."""


class Pending:
    """Device work that something waits for, with the deadline that begins now. `done` None: nothing to wait for."""

    def __init__(self, done: Done | None, deadline_s: float = DEADLINE_S) -> None:
        self._done = done
        self._until = time.monotonic() + deadline_s
        self.problem = ""
        """Why it will not end: "device-late" or "device-failed"."""

    def settled(self) -> bool:
        """Whether it has ended, in order or not. Never waits."""
        if self._done is None or self.problem:
            return True
        try:
            if self._done.query():
                self._done = None
        except RuntimeError:
            self.problem = "device-failed"
        else:
            if self._done is not None and time.monotonic() > self._until:
                self.problem = "device-late"
        return self._done is None or bool(self.problem)


class Settled:
    """Several pending works as one that ends when each has, or was given up on."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def query(self) -> bool:
        """Whether they have. Never waits."""
        return all(work.settled() for work in self._works)


def device_name(device: object) -> str:
    """A device's name with its ordinal: "cpu", "cuda:0". Takes torch devices and their names."""
    text = str(device)
    if text != "cuda":
        return text
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def is_cuda(device: str) -> bool:
    """Whether a device, by its name, is a CUDA device."""
    return device.startswith("cuda")


@contextmanager
def on_side_stream(device: Any) -> Iterator[None]:
    """Runs the block's kernels and copies on this thread's own stream, and waits for them at its end.

    `device`: a torch.device; nothing happens for a CPU. The caller knows that what is read is complete. Raises
    CudaError when the device is not done in time.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    streams: dict[Any, Any] = _threads.__dict__.setdefault("streams", {})
    stream = streams.get(device)
    if stream is None:
        make: Any = torch.cuda.Stream
        stream = streams[device] = make(device)
    with torch.cuda.stream(stream):
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise CudaError(f"{device} has no memory left for a copy of a few blocks: {error}") from None
        done = sent_so_far(stream)
    wait(done, f"copies and checksums on {device}")


def sent_so_far(stream: Any) -> Done:
    """Everything sent to a torch.cuda.Stream until now."""
    import torch

    make: Any = torch.cuda.Event
    event = make()
    event.record(stream)
    done: Done = event
    return done


def wait(done: Done, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits until the work has ended, without holding the interpreter. Raises CudaError past the deadline."""
    until = time.monotonic() + deadline_s
    nap_s = _FIRST_NAP_S
    try:
        while not done.query():
            if time.monotonic() > until:
                raise CudaError(f"{what} took more than {deadline_s:.0f} s; is the device stuck?")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    except RuntimeError as error:
        raise CudaError(f"{what} failed: {error}") from error


def default_stream_done(device: str) -> Done | None:
    """Everything sent so far to the default stream of a device; None for a CPU, or a device that has failed. Never
    waits.
    """
    if not is_cuda(device):
        return None
    import torch

    try:
        return sent_so_far(torch.cuda.default_stream(torch.device(device)))
    except RuntimeError:
        # It does nothing any more, so nothing has to be waited for.
        return None
