"""The device layer: who makes slabs. One ABC; `cpu` here, CUDA later, a fake in kvstore.testing."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SlabMemory(ABC):
    """One allocation, exported whole by a descriptor.

    Owned by whoever holds the object: `close()` drops the owner's mapping and descriptor; other processes that hold
    the descriptor keep the memory alive.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the allocation."""

    @property
    @abstractmethod
    def fd(self) -> int:
        """Writable descriptor, owned by this object. Raises ValueError after close()."""

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The bytes (format "B", writable), where the CPU can address them. Raises ValueError after close()."""

    @abstractmethod
    def read_only_fd(self) -> int:
        """A new descriptor that can't be mapped for writing; the caller closes it."""

    @abstractmethod
    def discard(self) -> None:
        """Gives the pages back to the system at once, whoever still maps them (they read zeros afterwards)."""

    @abstractmethod
    def close(self) -> None:
        """Drops mapping and descriptor. Idempotent."""


class Device(ABC):
    """A device that can hold slabs."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in configuration and reports: "cpu", "cuda:0", ..."""

    @abstractmethod
    def create_slab(self, nbytes: int) -> SlabMemory:
        """Allocates and pre-faults `nbytes` zeroed bytes. Thread-safe; may take a third of a second a GiB.

        Raises
        ------
        OutOfMemoryError
            Names what was wanted and what is there; raised before anything is touched that can't be had.
        """
