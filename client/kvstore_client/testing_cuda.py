"""For tests: a CUDA driver over host memory, to share and map what passes for device memory without a GPU."""

from __future__ import annotations

import ctypes
import enum
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
from kvstore_proto.v1 import blocks_pb2 as pb
from kvstore_proto.v1 import session_pb2

from kvstore_client.cuda import GRANULE, Cuda, DeviceMemory
from kvstore_client.memory import map_shared, unmap
from kvstore_client.testing import LAYOUT, FakeService

UUIDS = (b"uuid of device 0", b"uuid of device 1")
_ACCESS = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)


class Status(enum.IntEnum):
    """What calls answer."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713


class FakeDriver:
    """Stands for the module cuda.bindings.driver, with the devices named. `fail` lets calls fail, `calls` counts them.

    Invariants: "device" memory is a memfd, so other processes can import it, and rights are those of the mapping; a
    call outside of a context fails, as does a handle that is opened twice.
    """

    CUmemAccess_flags = _ACCESS
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_READ_ONLY = 8

    def __init__(self, uuids: Sequence[bytes] = UUIDS) -> None:
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, Status] = {}
        self.registered: dict[int, int] = {}
        """Pinned address -> flags."""
        self.exported: dict[bytes, tuple[int, int]] = {}
        """Legacy handle -> (memfd, bytes)."""
        self._contexts = threading.local()
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._open: dict[int, tuple[bytes, int]] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "cuDeviceGetCount": lambda: (len(uuids),),
            "cuDeviceGet": lambda ordinal: (ordinal,),
            "cuDeviceGetUuid": lambda ordinal: (SimpleNamespace(bytes=uuids[ordinal]),),
            "cuDevicePrimaryCtxRetain": lambda ordinal: (ordinal,),
            "cuCtxPushCurrent": self._push,
            "cuCtxPopCurrent": lambda: (self._stack().pop(),),
            "cuMemImportFromShareableHandle": lambda fd, _kind: (os.dup(fd),),
            "cuMemAddressReserve": self._reserve,
            "cuMemMap": self._map,
            "cuMemSetAccess": self._set_access,
            "cuMemUnmap": self._unmap,
            "cuMemRelease": os.close,
            "cuMemAddressFree": self._free,
            "cuIpcOpenMemHandle": self._open_handle,
            "cuIpcCloseMemHandle": self._close_handle,
            "cuMemHostRegister": self._register,
            "cuMemHostUnregister": self._unregister,
            "cuMemcpyDtoH": ctypes.memmove,
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            free = name.startswith(("cuDevice", "cuInit", "cuCtxP"))
            if name in self.fail or not (free or self._stack()):
                return (self.fail.get(name, Status.CUDA_ERROR_INVALID_CONTEXT),)
            result = self._calls.get(name, lambda: ())(*(() if name == "cuInit" else arguments))
            if isinstance(result, Status):
                return (result,)
            return (Status.CUDA_SUCCESS, *(result if isinstance(result, tuple) else ()))

        return call

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802 - the driver's name
        """An empty one."""
        return SimpleNamespace(location=SimpleNamespace(type=0, id=0), flags=0)

    @staticmethod
    def CUipcMemHandle() -> SimpleNamespace:  # noqa: N802 - the driver's name
        """An empty one."""
        return SimpleNamespace(reserved=b"")

    def export(self, nbytes: int) -> bytes:
        """Makes memory and its legacy handle."""
        handle = os.urandom(64)
        self.exported[handle] = (device_memfd(nbytes), nbytes)
        return handle

    @property
    def mappings(self) -> int:
        """Address ranges and handles in use."""
        return len(self._reserved) + len(self._open)

    def _stack(self) -> list[int]:
        stack: list[int] = self._contexts.__dict__.setdefault("stack", [])
        return stack

    def _push(self, context: int) -> tuple[()]:
        self._stack().append(context)
        return ()

    def _reserve(self, nbytes: int, *_: int) -> tuple[int]:
        fd = device_memfd(nbytes)
        address = map_shared(fd, nbytes, writable=False)
        self._reserved[address] = fd
        return (address,)

    def _map(self, address: int, nbytes: int, _offset: int, handle: int, _flags: int) -> Status | tuple[()]:
        if os.fstat(handle).st_size < nbytes:
            return Status.CUDA_ERROR_INVALID_VALUE
        self._mapped[address] = os.dup(handle)
        return ()

    def _set_access(self, address: int, nbytes: int, access: list[Any], _count: int) -> tuple[()]:
        writable = access[0].flags == _ACCESS.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        map_shared(self._mapped[address], nbytes, writable=writable, address=address)
        return ()

    def _unmap(self, address: int, nbytes: int) -> tuple[()]:
        os.close(self._mapped.pop(address))
        map_shared(self._reserved[address], nbytes, writable=False, address=address)
        return ()

    def _free(self, address: int, nbytes: int) -> tuple[()]:
        os.close(self._reserved.pop(address))
        unmap(address, nbytes)
        return ()

    def _open_handle(self, named: SimpleNamespace, _flags: int) -> Status | tuple[int]:
        if named.reserved not in self.exported:
            return Status.CUDA_ERROR_INVALID_HANDLE
        if any(handle == named.reserved for handle, _ in self._open.values()):
            return Status.CUDA_ERROR_ALREADY_MAPPED
        fd, nbytes = self.exported[named.reserved]
        address = map_shared(fd, nbytes, writable=True)
        self._open[address] = (named.reserved, nbytes)
        return (address,)

    def _close_handle(self, address: int) -> tuple[()]:
        _, nbytes = self._open.pop(address)
        unmap(address, nbytes)
        return ()

    def _register(self, address: int, _nbytes: int, flags: int) -> Status | tuple[()]:
        if address in self.registered:
            return Status.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        self.registered[address] = flags
        return ()

    def _unregister(self, address: int) -> Status | tuple[()]:
        return () if self.registered.pop(address, None) is not None else Status.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED


class FakeCuda(Cuda):
    """The client's CUDA module over a FakeDriver: its tensors are tensors of the host."""

    def __init__(self, driver: FakeDriver | None = None) -> None:
        self.fake = FakeDriver() if driver is None else driver
        super().__init__(self.fake)

    def tensor_problem(self, ordinal: int) -> str:  # noqa: ARG002 - all are the same
        """Torch reads it."""
        return ""

    def tensor(self, memory: DeviceMemory) -> Any:
        """A host tensor."""
        import numpy as np
        import torch

        shown = SimpleNamespace(
            __array_interface__={
                "shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3,
            },
            memory=memory,
        )  # fmt: skip
        return torch.from_numpy(np.asarray(shown))


class LegacyService(FakeService):
    """A FakeService whose slots lie in one slab of "device" memory, opened by a legacy handle.

    `pid` is the exporter's, `change` edits a handle before it is sent.
    """

    def __init__(self, driver: FakeDriver, **fields: Any) -> None:
        super().__init__(**fields)
        self.driver = driver
        self.pid = 1 << 22
        self.change: Callable[[pb.CudaIpcHandle], object] = id
        self.slots = self.room + 1
        self.nbytes = -(-self.slots * LAYOUT.block_bytes // GRANULE) * GRANULE
        self.slab = driver.export(self.nbytes)
        self.probe = driver.export(GRANULE)
        self.nonce = os.urandom(32)
        os.pwrite(driver.exported[self.probe][0], self.nonce, 0)

    def welcome(self) -> session_pb2.Welcome:
        """See FakeService."""
        welcome = super().welcome()
        welcome.device, welcome.device_uuid, welcome.memory = "cuda:5", UUIDS[1], "cuda-legacy"
        return welcome

    def OpenSlab(  # noqa: N802 - the name of the RPC
        self, request: pb.OpenSlabRequest, context: grpc.ServicerContext
    ) -> pb.OpenSlabResponse:
        self._enter("OpenSlab", context)
        return pb.OpenSlabResponse(handle=self._handle(self.slab, request.slab_id, self.nbytes))

    def ProbeHandle(  # noqa: N802 - the name of the RPC
        self, request: pb.ProbeHandleRequest, context: grpc.ServicerContext
    ) -> pb.ProbeHandleResponse:
        self._enter("ProbeHandle", context, request)
        return pb.ProbeHandleResponse(handle=self._handle(self.probe, 0, GRANULE), nonce=self.nonce)

    def _handle(self, handle: bytes, slab_id: int, nbytes: int) -> pb.CudaIpcHandle:
        made = pb.CudaIpcHandle(
            handle=handle,
            device_uuid=UUIDS[1],
            slab_id=slab_id,
            bytes=nbytes,
            slot_bytes=LAYOUT.block_bytes if slab_id else 0,
            slots=self.slots if slab_id else 0,
            boot_id=self.boot_id,
            exporter_pid=self.pid,
            allocation_id=handle[:16],
        )
        self.change(made)
        return made


def device_memfd(nbytes: int) -> int:
    """What passes for device memory."""
    fd = os.memfd_create("device", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd
