"""The CUDA driver, and nothing else: the one module of the service that touches it. What is done with it: `gpu`.

Everything happens on the device's *primary* context, the one that torch and the CUDA runtime use: a service inside a
worker's process shares it, another context would cost half a GiB. The context is pushed for each call and popped after
it, so that any thread may call, and keeps the device it had. Copies and clearing run on a stream of their own that does
not wait for the default one, on which the worker may have seconds of work.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from kvstore.config import ConfigurationError
from kvstore.device.gpu import GpuDriver, GpuDriverError, GpuInfo

_OUT_OF_MEMORY = ("CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation")


class CudaDriver(GpuDriver):
    """One device through cuda-bindings; IPC handles through cupy. Call `open` before anything but `devices`."""

    def __init__(self) -> None:
        """ConfigurationError without cuda-bindings, without a driver, or without a device."""
        try:
            # Takes a moment, and only services on a GPU need it.
            from cuda.bindings import driver
        except ImportError as error:
            raise ConfigurationError(
                f"the package cuda-bindings is not there ({error}). Expected it for --device cuda: install it with "
                "pip install 'gpu-kvstore[server,cuda13]' (or cuda12), or serve with --device cpu"
            ) from None
        self._cu: Any = driver
        self._ordinal = -1
        self._context: Any = None
        self._stream: Any = None
        self._runtime: Any = None
        try:
            self._call("cuInit", 0)
        except (RuntimeError, GpuDriverError) as error:
            raise ConfigurationError(
                f"no CUDA device can be used ({error}). Expected an NVIDIA driver and a device that this process sees: "
                "check nvidia-smi and CUDA_VISIBLE_DEVICES, or serve with --device cpu"
            ) from None

    def devices(self) -> list[GpuInfo]:
        """See the base class."""
        found = []
        for ordinal in range(int(self._call("cuDeviceGetCount"))):
            device = self._call("cuDeviceGet", ordinal)
            name = self._call("cuDeviceGetName", 256, device)
            uuid = bytes(self._call("cuDeviceGetUuid", device).bytes)
            found.append(GpuInfo(ordinal, uuid, name.decode(errors="replace").strip("\0 ")))
        return found

    def open(self, ordinal: int) -> None:
        """See the base class."""
        self._ordinal = ordinal
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))
        with self._current():
            self._stream = self._call("cuStreamCreate", int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def use_runtime(self) -> None:
        """See the base class."""
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            raise ConfigurationError(
                f"the package cupy is not there ({error}). Expected it for --slab-kind legacy: install it with "
                "pip install 'gpu-kvstore[server,cuda13]' (or cuda12), or use --slab-kind vmm"
            ) from None
        self._runtime = runtime

    def exports_descriptors(self) -> bool:
        """See the base class."""
        attribute = self._cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return bool(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", self._ordinal)))

    def memory_info(self) -> tuple[int, int]:
        """See the base class."""
        with self._current():
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def create(self, nbytes: int) -> tuple[int, int]:
        """See the base class."""
        cu = self._cu
        where = self._properties()
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self._current():
            handle = self._call("cuMemCreate", nbytes, where, 0)
            try:
                address = self._call("cuMemAddressReserve", nbytes, 0, 0, 0)
                try:
                    self._call("cuMemMap", address, nbytes, 0, handle, 0)
                    try:
                        access = cu.CUmemAccessDesc()
                        access.location = where.location
                        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                        self._call("cuMemSetAccess", address, nbytes, [access], 1)
                        fd = int(self._call("cuMemExportToShareableHandle", handle, kind, 0))
                    except BaseException:
                        self._call("cuMemUnmap", address, nbytes)
                        raise
                except BaseException:
                    self._call("cuMemAddressFree", address, nbytes)
                    raise
            finally:
                # The mapping and the descriptor keep the memory.
                self._call("cuMemRelease", handle)
        return int(address), fd

    def unmap(self, address: int, nbytes: int) -> None:
        """See the base class."""
        with self._current():
            # In a worker's process its kernels may be at work on it still.
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", address, nbytes)
            self._call("cuMemAddressFree", address, nbytes)

    def malloc(self, nbytes: int) -> int:
        """See the base class."""
        with self._current():
            return int(self._runtime_call("malloc", nbytes))

    def free(self, address: int) -> None:
        """See the base class."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._runtime_call("free", address)

    def ipc_handle(self, address: int) -> bytes:
        """See the base class."""
        with self._current():
            return bytes(self._runtime_call("ipcGetMemHandle", address))

    def clear(self, address: int, nbytes: int) -> None:
        """See the base class."""
        with self._current():
            self._call("cuMemsetD8Async", address, 0, nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def read(self, address: int, nbytes: int) -> memoryview:
        """See the base class."""
        buffer = bytearray(nbytes)
        if nbytes:
            target = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            with self._current():
                self._call("cuMemcpyDtoHAsync", target, address, nbytes, self._stream)
                self._call("cuStreamSynchronize", self._stream)
        return memoryview(buffer)

    def write(self, address: int, data: bytes) -> None:
        """See the base class."""
        if data:
            source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
            with self._current():
                self._call("cuMemcpyHtoDAsync", address, source, len(data), self._stream)
                self._call("cuStreamSynchronize", self._stream)

    def _properties(self) -> Any:
        cu = self._cu
        where = cu.CUmemAllocationProp()
        where.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        where.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        where.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.location.id = self._ordinal
        return where

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._cu, name)(*arguments)
        if status != self._cu.CUresult.CUDA_SUCCESS:
            raise GpuDriverError(name, status.name, out_of_memory=status.name in _OUT_OF_MEMORY)
        return values[0] if len(values) == 1 else tuple(values)

    def _runtime_call(self, name: str, argument: int) -> Any:
        """A runtime call; the pushed context makes it one of the right device."""
        try:
            self._runtime.setDevice(self._ordinal)
            return getattr(self._runtime, name)(argument)
        except self._runtime.CUDARuntimeError as error:
            status = str(error).split(":", 1)[0]
            raise GpuDriverError(f"cuda runtime {name}", status, out_of_memory=status in _OUT_OF_MEMORY) from None
