"""A GPU driver that is none: device memory is host memory of this process, and everything can be made to fail."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence

from kvstore.config import ServiceConfig
from kvstore.device.base import Device
from kvstore.device.gpu import GpuDriver, GpuDriverError, GpuInfo
from kvstore.device.opening import open_device

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
INVALID_HANDLE = "CUDA_ERROR_INVALID_HANDLE"


def gpu_infos(*ordinals: int) -> list[GpuInfo]:
    """Devices 0, 1, ... of this process whose UUIDs belong to the given cards: CUDA_VISIBLE_DEVICES=2,0 permutes."""
    return [GpuInfo(seen, bytes([0xA0 + card]) * 16, f"Fake {card}") for seen, card in enumerate(ordinals)]


class FakeGpuDriver(GpuDriver):
    """Devices with `capacity` bytes together.

    Memory that is created is a memfd, so that its descriptor can be mapped elsewhere; an IPC handle opens the memory in
    this process (`open_handle`), and is stale once that is freed. `fail_next` makes a call fail; `used` is what is
    allocated, `cleared` what was cleared.
    """

    def __init__(self, devices: Sequence[GpuInfo] = (), capacity: int = 1 << 30, *, exports: bool = True) -> None:
        self.opened: int | None = None
        self.used = 0
        self.cleared: list[tuple[int, int]] = []
        self._devices = list(devices) or gpu_infos(0)
        self._capacity = capacity
        self._exports = exports
        self._failures: dict[str, deque[str]] = {}
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._handles: dict[bytes, int] = {}

    def fail_next(self, call: str, status: str = OUT_OF_MEMORY) -> None:
        """The next call of this name raises GpuDriverError."""
        self._failures.setdefault(call, deque()).append(status)

    def open_handle(self, handle: bytes) -> memoryview:
        """What an importer sees. GpuDriverError for a handle of memory that was freed."""
        with self._lock:
            address = self._handles.get(handle)
            if address is None or address not in self._maps:
                raise GpuDriverError("open_handle", INVALID_HANDLE, out_of_memory=False)
            return memoryview(self._maps[address])

    def device_for(self, config: ServiceConfig) -> Device:
        """The device of a configuration on this driver."""
        return open_device(config, lambda: self)

    def devices(self) -> list[GpuInfo]:
        """As given."""
        return self._devices

    def open(self, ordinal: int) -> None:
        """Notes the device."""
        self._may_fail("open")
        self.opened = ordinal

    def use_runtime(self) -> None:
        """Does nothing."""

    def exports_descriptors(self) -> bool:
        """As given."""
        return self._exports

    def memory_info(self) -> tuple[int, int]:
        """What is left of the capacity."""
        self._may_fail("memory_info")
        return self._capacity - self.used, self._capacity

    def create(self, nbytes: int) -> tuple[int, int]:
        """A memfd."""
        self._may_fail("create")
        self._take("create", nbytes)
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._keep(mmap.mmap(fd, nbytes)), fd

    def unmap(self, address: int, nbytes: int) -> None:
        """Drops the mapping. Views that somebody holds keep the pages."""
        self._drop("unmap", address, nbytes)

    def malloc(self, nbytes: int) -> int:
        """Anonymous memory."""
        self._may_fail("malloc")
        self._take("malloc", nbytes)
        return self._keep(mmap.mmap(-1, nbytes))

    def free(self, address: int) -> None:
        """Drops the memory; its handles are stale from now on."""
        self._drop("free", address, len(self._maps[address]))

    def ipc_handle(self, address: int) -> bytes:
        """64 random bytes."""
        self._may_fail("ipc_handle")
        handle = secrets.token_bytes(64)
        self._handles[handle] = address
        return handle

    def clear(self, address: int, nbytes: int) -> None:
        """Writes zeros."""
        self._may_fail("clear")
        self.cleared.append((address, nbytes))
        ctypes.memset(address, 0, nbytes)

    def read(self, address: int, nbytes: int) -> memoryview:
        """Copies."""
        self._may_fail("read")
        return memoryview(bytearray(ctypes.string_at(address, nbytes)))

    def write(self, address: int, data: bytes) -> None:
        """Copies."""
        self._may_fail("write")
        ctypes.memmove(address, data, len(data))

    def _may_fail(self, call: str) -> None:
        with self._lock:
            failures = self._failures.get(call)
            if failures:
                status = failures.popleft()
                raise GpuDriverError(call, status, out_of_memory=status == OUT_OF_MEMORY)

    def _take(self, call: str, nbytes: int) -> None:
        with self._lock:
            if self.used + nbytes > self._capacity:
                raise GpuDriverError(call, OUT_OF_MEMORY, out_of_memory=True)
            self.used += nbytes

    def _keep(self, mapping: mmap.mmap) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self._lock:
            self._maps[address] = mapping
        return address

    def _drop(self, call: str, address: int, nbytes: int) -> None:
        self._may_fail(call)
        with self._lock:
            mapping = self._maps.pop(address)
            assert len(mapping) == nbytes
            self.used -= nbytes
