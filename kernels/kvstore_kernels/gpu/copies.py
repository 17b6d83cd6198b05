"""Copies on a stream of their own: the one place that calls the CUDA driver."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Protocol

import torch

from kvstore_kernels.errors import KernelError

_HOST, _DEVICE = 1, 2


class Copies(Protocol):
    """What the fetch ring needs of a device. Marks say how far a stream has come."""

    def copy_rows(self, target: int, source: int, pitch: int, nbytes: int, rows: int, *, from_host: bool) -> None:
        """Copies `rows` rows of `nbytes`, `pitch` apart at the source and packed at the target, behind all copies."""

    def copied(self) -> Any:
        """A mark behind the copies given so far."""

    def computed(self) -> Any:
        """A mark behind the work of the calling thread's stream so far."""

    def copies_wait(self, mark: Any) -> None:
        """Later copies start behind the mark."""

    def work_waits(self, mark: Any) -> None:
        """Later work of the calling thread's stream starts behind the mark."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, which copies may write as long as it lives."""

    def finish(self) -> None:
        """Waits until all copies are done."""


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(_Memcpy2D), ctypes.c_void_p)
    return library


class CudaCopies:
    """Copies from pinned host memory, or from a peer device, on one stream of a device.

    Torch's own copy_ of strided host memory gathers on the host first and waits; the driver's copy of a rectangle
    does neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._copy = _driver().cuMemcpy2DAsync_v2

    def copy_rows(self, target: int, source: int, pitch: int, nbytes: int, rows: int, *, from_host: bool) -> None:
        """See Copies. Raises KernelError with the driver's number."""
        rectangle = _Memcpy2D(
            source_pitch=pitch, target_type=_DEVICE, target_device=target, target_pitch=nbytes, width=nbytes,
            height=rows,
        )  # fmt: skip
        if from_host:
            rectangle.source_type, rectangle.source_host = _HOST, source
        else:
            rectangle.source_type, rectangle.source_device = _DEVICE, source
        code = self._copy(ctypes.byref(rectangle), self._stream.cuda_stream)
        if code:
            raise KernelError(
                f"copying {rows} rows of {nbytes} bytes to {self._device} failed with CUDA error {code}: expected "
                "registered host memory or a peer device that is mapped for this process"
            )

    def copied(self) -> torch.cuda.Event:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def computed(self) -> torch.cuda.Event:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copies_wait(self, mark: torch.cuda.Event) -> None:
        """See Copies."""
        self._stream.wait_event(mark)

    def work_waits(self, mark: torch.cuda.Event) -> None:
        """See Copies."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """See Copies."""
        with torch.inference_mode(False):
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Torch must not give the memory to others before the copies into it are done.
        made.record_stream(self._stream)
        return made

    def finish(self) -> None:
        """See Copies."""
        self._stream.synchronize()
