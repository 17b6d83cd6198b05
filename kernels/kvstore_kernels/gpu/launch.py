"""Compiles Triton kernels and starts them through the driver: a launch writes what changed and makes one call."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore_kernels.errors import KernelError, TableError
from kvstore_kernels.gpu.driver import DriverKernel

# Kernels run on CPU tensors, slowly and in Python: for tests only, and fixed when triton is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

Pointer = Any
Grid = tuple[int, int, int]


class Call(Protocol):
    """A launch whose arguments are all known but a few: takes the stream and those, in the order they were named."""

    def __call__(self, stream: int, *changing: Any) -> None: ...


class Launch(Protocol):
    """A compiled kernel. Arguments are those that aren't constants, addresses for pointers."""

    def __call__(self, grid: Grid, stream: int, *arguments: Any) -> None:
        """Starts it; its device must be current."""

    def prepared(self, grid: Grid, arguments: Sequence[Any], changing: Sequence[int]) -> Call:
        """The same launch again and again, but for the arguments at the indices `changing`. For one thread at a
        time; whoever keeps it keeps alive what the addresses belong to.
        """


# One for each kernel, shape and device that this process has used: as many as its models need.
_launches: dict[Hashable, Launch] = {}

_TYPES = {
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


def pointer(tensor: torch.Tensor) -> Pointer:
    """What a kernel is given for a tensor: its address; the interpreter wants the tensor itself."""
    return tensor if INTERPRETED else tensor.data_ptr()


def current_stream(device: torch.device) -> int:
    """The calling thread's stream on the device. TableError where another device is current."""
    if INTERPRETED:
        return 0
    # The calls of torch.cuda that these stand for cost a microsecond each, twice a layer.
    current, index = torch._C._cuda_getDevice(), device.index or 0  # noqa: SLF001
    if current != index:
        raise TableError(
            f"the current CUDA device is cuda:{current} and the blocks lie on {device}: "
            "run the layer inside torch.cuda.device(...) of its own device"
        )
    return torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001  what Triton itself calls, once a launch


def pointer_type(dtype: torch.dtype) -> str:
    """Triton's name for a pointer to `dtype`."""
    return _TYPES[dtype]


def source(
    function: Any,
    types: Sequence[str],
    constants: Mapping[str, Any],
    unaligned: frozenset[str] = frozenset(),
    even: frozenset[str] = frozenset(),
) -> Any:
    """A kernel's ASTSource: `types` are of the arguments before the constants.

    Pointers outside `unaligned` are multiples of 16, and so are the numbers in `even`.
    """
    names = function.arg_names
    plain = names[: len(types)]
    if set(names[len(types) :]) != set(constants):
        raise KernelError(f"constants {sorted(constants)} given to a kernel that has {names[len(types) :]}")
    signature = dict(zip(plain, types, strict=True)) | dict.fromkeys(names[len(types) :], "constexpr")
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(zip(plain, types, strict=True))
        if (kind.startswith("*") and name not in unaligned) or name in even
    }
    return ASTSource(function, signature, {name: constants[name] for name in names[len(types) :]}, attributes)


def compiled(ast: Any, target: GPUTarget, options: Mapping[str, Any]) -> Any:
    """The compiled kernel for a target; needs no GPU."""
    return triton.compile(ast, target=target, options=dict(options))


def launcher(
    function: Any,
    types: Sequence[str],
    constants: Mapping[str, Any],
    device: torch.device,
    *,
    unaligned: frozenset[str] = frozenset(),
    even: frozenset[str] = frozenset(),
    **options: Any,
) -> Launch:
    """Compiles `function` for `device` (seconds, once for a machine: Triton keeps the result), ready to be launched.

    Raises KernelError where the device is older than the kernels need.
    """
    if INTERPRETED:
        return _Interpreted(function, constants)
    # Codecs come and go: what was compiled for one serves all of its shape.
    key = (function.__name__, tuple(types), tuple(constants.items()), device, unaligned, even, tuple(options.items()))
    found = _launches.get(key)
    if found is None:
        found = _launches[key] = _launcher(function, types, constants, device, unaligned, even, options)
    return found


def _launcher(
    function: Any,
    types: Sequence[str],
    constants: Mapping[str, Any],
    device: torch.device,
    unaligned: frozenset[str],
    even: frozenset[str],
    options: Mapping[str, Any],
) -> Launch:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise KernelError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: these kernels need 8.0 or "
            "newer; compute on the CPU instead"
        )
    with torch.cuda.device(device):
        ast = source(function, types, constants, unaligned, even)
        kernel = compiled(ast, GPUTarget("cuda", 10 * major + minor, 32), options)
        return DriverKernel(kernel, types, device)


class _Interpreted:
    """A kernel in Triton's interpreter: what it changes, it changes in tensors of this process."""

    def __init__(self, function: Any, constants: Mapping[str, Any]) -> None:
        self._function, self._constants = function, dict(constants)

    def __call__(self, grid: Grid, stream: int, *arguments: Any) -> None:  # noqa: ARG002
        self._function[grid](*arguments, **self._constants)

    def prepared(self, grid: Grid, arguments: Sequence[Any], changing: Sequence[int]) -> Call:
        kept = list(arguments)

        def call(stream: int, *values: Any) -> None:
            for index, value in zip(changing, values, strict=True):
                kept[index] = value
            self(grid, stream, *kept)

        return call


def padded(size: int) -> int:
    """The next power of two, at least 16: what a kernel's tiles are made of."""
    return max(16, 1 << (size - 1).bit_length())
