"""The device layer: who makes slabs. One ABC; `cpu`, CUDA, and a fake in kvstore.testing."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvstore_kernels import direct

from kvstore.errors import ConflictError, InvalidRequestError

MEMFD = "memfd"
CUDA_VMM = "cuda-vmm"
CUDA_LEGACY = "cuda-legacy"
ALLOCATION_ID_BYTES = 16
UUID_BYTES = 16

Pace = Callable[[float], None]


class SlabMemory(ABC):
    """One allocation, exported whole.

    Owned by whoever holds the object: `close()` drops the owner's mapping and descriptor; other processes that hold
    the descriptor keep the memory alive. `read` and `write` may be called from any thread, also while another one
    closes it.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the allocation."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """How others reach it: MEMFD or CUDA_VMM by a descriptor, CUDA_LEGACY by a handle."""

    @property
    @abstractmethod
    def device_uuid(self) -> bytes:
        """UUID_BYTES of the device that holds it; empty for host memory."""

    @property
    @abstractmethod
    def allocation_id(self) -> bytes:
        """ALLOCATION_ID_BYTES drawn at random; in this process kvstore_kernels.direct finds the memory by them."""

    @property
    @abstractmethod
    def fd(self) -> int | None:
        """Descriptor for others, owned by this object; None for memory that has none. ValueError after close()."""

    @property
    def view(self) -> memoryview:
        """The bytes (format "B", writable), where the CPU can address them; ConflictError elsewhere."""
        raise ConflictError(
            f"{self.kind} memory can't be addressed by the CPU. Expected host memory: use read and write"
        )

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the memory: themselves where the CPU can address them, else a copy. ValueError after close().

        Raises InvalidRequestError for a range that is not inside, DeviceFailedError when the device can't be read.
        """

    @abstractmethod
    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Stores bytes, which are there for every reader when it returns. Raises as `read` does."""

    def ipc_handle(self) -> bytes:
        """The 64 bytes by which another process opens CUDA_LEGACY memory; ConflictError for other kinds."""
        raise ConflictError(
            f"{self.kind} memory has no IPC handle. Expected {CUDA_LEGACY} memory: open it by its descriptor, or start "
            "the service with --slab-kind legacy"
        )

    @abstractmethod
    def discard(self) -> None:
        """Gives the pages back to the system at once where that can be done, whoever maps them (they read zeros)."""

    @abstractmethod
    def close(self) -> None:
        """Drops mapping and descriptor. Idempotent. Memory that kvstore_kernels.direct handed out stays mapped."""

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raises InvalidRequestError for a range that is not inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidRequestError(
                f"bytes {offset} to {offset + nbytes} of a slab: expected a range within its {self.nbytes} bytes"
            )


class Device(ABC):
    """A device that can hold slabs."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in configuration and reports: "cpu", "cuda:0", ..."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of its slabs: MEMFD, CUDA_VMM or CUDA_LEGACY."""

    @property
    @abstractmethod
    def uuid(self) -> bytes:
        """UUID_BYTES; empty for the CPU."""

    @abstractmethod
    def create_slab(self, nbytes: int, pace: Pace | None = None) -> SlabMemory:
        """Allocates and pre-faults `nbytes` zeroed bytes. Thread-safe; may take a third of a second a GiB.

        `pace`, if given, is called after each piece of work with the seconds that it took, and may sleep: for memory
        that nobody waits for.

        Raises
        ------
        OutOfMemoryError
            Names what was wanted and what is there; raised before anything is touched that can't be had.
        DeviceFailedError
            The device's driver reports an error.
        """


def let_go(allocation_id: bytes, fd: int) -> None:
    """What the end of a SlabMemory does, closed or not: nobody finds it any more, its descriptor (-1 = none) closes."""
    direct.withdraw(allocation_id)
    if fd >= 0:
        os.close(fd)
