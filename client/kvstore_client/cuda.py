"""The one module of the client that touches the CUDA driver: maps memory of other processes, pins memory of this one.

Imports nothing of CUDA until the first call. Everything happens on the primary contexts, the ones torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore_client.errors import CudaError

UUID_BYTES = 16
HANDLE_BYTES = 64
GRANULE = 2 * 2**20
"""Sizes of shared allocations are multiples of this many bytes."""


class Cuda:
    """The driver's calls that sharing memory takes, with typed errors. Threads may share it; a forked child may not.

    `bindings` is the module cuda.bindings.driver, or what stands for it in a test. Sizes are bytes, addresses integers,
    devices ordinals as torch counts them (CUDA_VISIBLE_DEVICES applied).

    Invariants: a call runs with the device's primary context current, and leaves the thread's context as it found it; a
    primary context is retained once and kept until the process ends; a call that raises leaves nothing mapped.
    """

    def __init__(self, bindings: Any) -> None:
        """Initialises the driver. Raises CudaError when there is none, or no device."""
        self._driver = bindings
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)
        count = int(self._call("cuDeviceGetCount"))
        self._ordinals: dict[bytes, int] = {}
        for ordinal in range(count):
            self._ordinals[self._uuid_of(ordinal)] = ordinal
        if not self._ordinals:
            raise CudaError("no CUDA device is visible here; check CUDA_VISIBLE_DEVICES")

    # ---- devices

    def ordinal_of(self, device_uuid: bytes) -> int:
        """The device with that UUID (16 bytes). Raises CudaError when it isn't visible to this process."""
        ordinal = self._ordinals.get(device_uuid)
        if ordinal is None:
            raise CudaError(
                f"device {uuid_text(device_uuid)} is not visible to this process, only {', '.join(self.devices())}; "
                "let CUDA_VISIBLE_DEVICES (or the container) include it"
            )
        return ordinal

    def devices(self) -> list[str]:
        """The devices that this process sees: "cuda:0 GPU-..."."""
        return [f"cuda:{ordinal} {uuid_text(device_uuid)}" for device_uuid, ordinal in self._ordinals.items()]

    def tensor_problem(self, ordinal: int) -> str:
        """Why torch can't use memory of that device; empty if it can. Imports torch."""
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} has no usable CUDA here; install a CUDA build of torch"
        if ordinal >= torch.cuda.device_count():
            return f"torch sees {torch.cuda.device_count()} devices, not cuda:{ordinal}; check CUDA_VISIBLE_DEVICES"
        return ""

    def synchronize(self, ordinal: int) -> None:
        """Waits until the device has done all that this process asked of it. Raises CudaError."""
        with self._current(ordinal):
            self._call("cuCtxSynchronize")

    # ---- descriptors of virtual memory

    def map_descriptor(self, fd: int, nbytes: int, ordinal: int, *, writable: bool) -> int:
        """Maps an allocation that another process exported as a descriptor; its address. `fd` stays the caller's."""
        driver = self._driver
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self._current(ordinal):
            handle = self._call("cuMemImportFromShareableHandle", fd, kind)
            try:
                address = int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))
                mapped = False
                try:
                    self._call("cuMemMap", address, nbytes, 0, handle, 0)
                    mapped = True
                    self._set_access(address, nbytes, ordinal, writable=writable)
                except CudaError:
                    if mapped:
                        self._call("cuMemUnmap", address, nbytes)
                    self._call("cuMemAddressFree", address, nbytes)
                    raise
            finally:
                # The mapping keeps the memory; the handle only names it.
                self._call("cuMemRelease", handle)
        return address

    def set_access(self, address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        """Changes what this process may do with a mapping, in place, after the device has done what it was asked."""
        with self._current(ordinal):
            self._call("cuCtxSynchronize")
            self._set_access(address, nbytes, ordinal, writable=writable)

    def unmap_descriptor(self, address: int, nbytes: int, ordinal: int) -> None:
        """Ends a mapping, after the device has done what it was asked."""
        with self._current(ordinal):
            self._call("cuCtxSynchronize")
            self._call("cuMemUnmap", address, nbytes)
            self._call("cuMemAddressFree", address, nbytes)

    # ---- legacy handles

    def open_handle(self, handle: bytes, ordinal: int) -> int:
        """Opens a cudaIpcMemHandle of another process; its address. Always readable and writable."""
        driver = self._driver
        named = driver.CUipcMemHandle()
        named.reserved = handle
        flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with self._current(ordinal):
            return int(self._call("cuIpcOpenMemHandle", named, flag))

    def close_handle(self, address: int, ordinal: int) -> None:
        """Closes an opened handle, after the device has done what it was asked."""
        with self._current(ordinal):
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", address)

    # ---- host memory

    def register_host(self, address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        """Pins memory of this process for all devices. `writable` says how it is mapped."""
        driver = self._driver
        flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE)
        if not writable:
            flags |= int(driver.CU_MEMHOSTREGISTER_READ_ONLY)
        with self._current(ordinal):
            self._call("cuMemHostRegister", address, nbytes, flags)

    def unregister_host(self, address: int, ordinal: int) -> None:
        """Unpins, after the device has done what it was asked."""
        with self._current(ordinal):
            self._call("cuCtxSynchronize")
            self._call("cuMemHostUnregister", address)

    # ---- bytes

    def read(self, address: int, nbytes: int, ordinal: int) -> bytes:
        """Copies device memory to the host, and waits for it."""
        into = bytearray(nbytes)
        target = ctypes.addressof((ctypes.c_ubyte * nbytes).from_buffer(into))
        with self._current(ordinal):
            self._call("cuMemcpyDtoH", target, address, nbytes)
        return bytes(into)

    def tensor(self, memory: DeviceMemory) -> Any:
        """A uint8 tensor [nbytes] over `memory`, which it keeps alive. No copy. Raises CudaError."""
        import torch

        # A tensor made in inference mode could not be written outside it later.
        with torch.inference_mode(False):
            tensor = torch.as_tensor(memory, device=f"cuda:{memory.ordinal}")
        if tensor.data_ptr() != memory.address:
            raise CudaError(
                f"torch made a copy of the memory at {memory.address:#x} on cuda:{memory.ordinal}; expected a view. "
                "Does torch count the devices in another order than the driver?"
            )
        return tensor

    # ---- the driver

    def _uuid_of(self, ordinal: int) -> bytes:
        device = self._call("cuDeviceGet", ordinal)
        return bytes(self._call("cuDeviceGetUuid", device).bytes)

    def _set_access(self, address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        driver = self._driver
        flags = driver.CUmemAccess_flags
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is None:
                device = self._call("cuDeviceGet", ordinal)
                context = self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """One call; its result without the status. Raises CudaError."""
        try:
            status, *result = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:
            # What the bindings raise when the driver's library isn't there.
            raise CudaError(f"{name}: {error}; is an NVIDIA driver installed and visible in this container?") from None
        if int(status) != 0:
            text = getattr(status, "name", str(status))
            raise CudaError(f"{name}: {text} ({int(status)}){_remedy(int(status))}")
        return result[0] if result else None


class DeviceMemory:
    """A run of device memory as torch reads it. `owner` is kept alive; watch this object to learn of its last use.

    It never says that it is read-only, for torch takes no such memory: Slab.writable keeps codecs from writing, and the
    mapping itself does where it can.
    """

    def __init__(self, address: int, nbytes: int, ordinal: int, owner: object = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class OpenHandles:
    """The legacy handles that this process has open: one a slab and server process, shared by all stores.

    Invariants: a handle is opened once, by the first use, and closed once, after the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], tuple[int, int]] = {}

    def acquire(self, cuda: Cuda, boot_id: bytes, slab_id: int, handle: bytes, ordinal: int) -> int:
        """The address of an allocation. Raises CudaError; nothing is held then."""
        key = (boot_id, slab_id)
        with self._lock:
            address, uses = self._open.get(key, (0, 0))
            if not uses:
                address = cuda.open_handle(handle, ordinal)
            self._open[key] = (address, uses + 1)
            return address

    def release(self, cuda: Cuda, boot_id: bytes, slab_id: int, ordinal: int) -> None:
        """Ends one use. Raises CudaError when the last one can't be ended in order."""
        key = (boot_id, slab_id)
        with self._lock:
            address, uses = self._open[key]
            if uses > 1:
                self._open[key] = (address, uses - 1)
                return
            del self._open[key]
            cuda.close_handle(address, ordinal)

    def __len__(self) -> int:
        return len(self._open)


HANDLES = OpenHandles()


def get() -> Cuda:
    """The driver. Raises CudaError with the remedy when it, a device or its bindings are missing."""
    return _load()


def uuid_text(device_uuid: bytes) -> str:
    """A device's UUID as nvidia-smi writes it."""
    return f"GPU-{uuid.UUID(bytes=device_uuid)}" if len(device_uuid) == UUID_BYTES else repr(device_uuid)


@functools.lru_cache(maxsize=1)
def _load() -> Cuda:
    try:
        # By name: the bindings are untyped, and only there with one of the extras.
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaError(
            f"the Python package cuda-bindings is missing ({error}); install the extra for your driver: "
            "pip install 'gpu-kvstore[cuda13]' (or [cuda12])"
        ) from None
    return Cuda(driver)


def _remedy(status: int) -> str:
    return {
        2: "; the device is out of memory",
        100: "; no CUDA device is visible: check CUDA_VISIBLE_DEVICES",
        201: "; it can't be opened in this process: the exporter has the same pid, or is gone",
        217: "; the two devices have no peer access",
        400: "; the exporter has freed it, or the handle is of another machine",
        712: "; this memory is pinned already",
        801: "; this device or system does not support it",
    }.get(status, "")
