"""Launches compiled kernels through the CUDA driver. The one module here that calls it.

Triton's own launcher parses all arguments in every call; here they lie ready in memory, and a call writes the few that
changed: some microseconds a launch, in a decode step that is nothing but launches.
"""

from __future__ import annotations

import array
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore_kernels.errors import KernelError

_CELL = 8
_SIZES = {"i32": 4, "fp32": 4, "i64": 8}
_NO_CONTEXT = 201


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    launch = library.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    launch.restype = ctypes.c_int
    return library


def error_name(code: int) -> str:
    """The driver's name of an error."""
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"unknown").decode()


class DriverKernel:
    """One compiled Triton kernel, loaded on one device.

    Invariants: takes exactly the arguments of `types` and two scratch pointers that Triton appends and this kernel
    doesn't use; checked against the loaded code when the driver can tell (12.4 and newer).
    """

    def __init__(self, kernel: Any, types: Sequence[str], device: torch.device) -> None:
        """`kernel` is Triton's, `types` its signature without constants; `device` is current."""
        # The first look at it loads the code.
        _ = kernel.run
        self._kernel = kernel  # keeps the code loaded
        self._handle: int = kernel.function
        meta = kernel.metadata
        self.name: str = meta.name
        if meta.num_ctas != 1 or meta.global_scratch_size or meta.profile_scratch_size:
            raise KernelError(
                f"kernel {self.name} wants clusters or scratch memory: expected neither; is instrumentation on?"
            )
        self._threads, self._shared = 32 * meta.num_warps, meta.shared
        self._types, self._device = tuple(types), device
        self._check_parameters()

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Starts it on a stream of the current device. Raises KernelError."""
        self.prepared(grid, arguments, ())(stream)

    def prepared(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], changing: Sequence[int]
    ) -> Callable[..., None]:
        """A call (stream, *values of the arguments `changing`); pointers and integers only may change."""
        if len(arguments) != len(self._types):
            raise KernelError(f"{len(arguments)} arguments for {self.name}: expected {len(self._types)}")
        cells = array.array("Q", map(_cell, arguments, self._types))
        cells.extend((0, 0))
        at = cells.buffer_info()[0]
        places = array.array("Q", [at + _CELL * index for index in range(len(cells))])
        launch, handle, parameters = _driver().cuLaunchKernel, self._handle, places.buffer_info()[0]
        x, y, z = grid
        threads, shared, failed = self._threads, self._shared, self._failed
        indices = tuple(changing)
        # The call keeps the memory it points into.
        kept = (cells, places)

        def call(stream: int, *values: int) -> None:
            cells = kept[0]
            for index, value in zip(indices, values):  # noqa: B905  one launch of many: no work for nothing
                cells[index] = value
            code = launch(handle, x, y, z, threads, 1, 1, shared, stream, parameters, None)
            if code:
                failed(code, lambda: launch(handle, x, y, z, threads, 1, 1, shared, stream, parameters, None))

        return call

    def _failed(self, code: int, again: Callable[[], int]) -> None:
        if code == _NO_CONTEXT:
            # A thread that has called nothing of CUDA's runtime yet; this makes the device's context current in it.
            torch.cuda.mem_get_info(self._device)
            code = again()
        if code:
            raise KernelError(f"launch of {self.name} on {self._device} failed: {error_name(code)} ({code})")

    def _check_parameters(self) -> None:
        info = getattr(_driver(), "cuFuncGetParamInfo", None)
        if info is None:
            return
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while not info(
            ctypes.c_void_p(self._handle), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
        ):
            sizes.append(size.value)
        expected = [_SIZES.get(kind, _CELL) for kind in self._types] + [_CELL, _CELL]
        if sizes != expected:
            raise KernelError(
                f"kernel {self.name} takes parameters of {sizes} bytes, expected {expected}: this version of Triton "
                "compiles to another calling convention than 3.6 and 3.7"
            )


def _cell(value: Any, kind: str) -> int:
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value) & (2**64 - 1)
