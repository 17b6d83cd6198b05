"""Devices that are none, for tests of what is built on them."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable

from kvstore.device.base import ALLOCATION_ID_BYTES, MEMFD, Device, Pace, SlabMemory
from kvstore.errors import OutOfMemoryError


class FakeSlabMemory(SlabMemory):
    """Bytes of this process. `discarded` and `closed` tell what was done to it."""

    def __init__(self, nbytes: int, kind: str = MEMFD) -> None:
        self._kind = kind
        self._data = bytearray(nbytes)
        self._view = memoryview(self._data)
        self._allocation_id = secrets.token_bytes(ALLOCATION_ID_BYTES)
        self.discarded = False
        self.closed = False

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return len(self._data)

    @property
    def kind(self) -> str:
        """That of the real memory it stands for."""
        return self._kind

    @property
    def device_uuid(self) -> bytes:
        """None."""
        return b""

    @property
    def allocation_id(self) -> bytes:
        """Drawn at random, published nowhere."""
        return self._allocation_id

    @property
    def fd(self) -> None:
        """There is none."""
        return None

    @property
    def view(self) -> memoryview:
        """The bytes, writable. Raises ValueError after close()."""
        if self.closed:
            raise ValueError("the slab is closed: its bytes can't be read any more")
        return self._view

    def read(self, offset: int, nbytes: int) -> memoryview:
        """A part of `view`."""
        self.check_range(offset, nbytes)
        return self.view[offset : offset + nbytes]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Stores into `view`."""
        self.check_range(offset, len(data))
        self.view[offset : offset + len(data)] = data

    def discard(self) -> None:
        """Zeroes the bytes, as a punched memfd reads."""
        self.discarded = True
        self._view[:] = bytes(len(self._data))

    def close(self) -> None:
        """Notes that it was closed."""
        self.closed = True


class FakeDevice(Device):
    """Makes fake slabs of a kind. `fail_next` lets the next ones fail, `on_create` sees every size asked for."""

    def __init__(self, name: str = "fake", on_create: Callable[[int], None] | None = None, kind: str = MEMFD) -> None:
        self._name = name
        self._kind = kind
        self._on_create = on_create
        self._failures: deque[str] = deque()
        self.created: list[FakeSlabMemory] = []

    @property
    def name(self) -> str:
        """The name given."""
        return self._name

    @property
    def kind(self) -> str:
        """The kind given."""
        return self._kind

    @property
    def uuid(self) -> bytes:
        """None."""
        return b""

    def fail_next(self, times: int = 1, error: str = "no memory (as the test ordered)") -> None:
        """The next `times` allocations raise OutOfMemoryError."""
        self._failures.extend([error] * times)

    def forgive(self) -> None:
        """No allocation is to fail any more."""
        self._failures.clear()

    def create_slab(self, nbytes: int, pace: Pace | None = None) -> FakeSlabMemory:  # noqa: ARG002  # takes no time
        """A zeroed fake slab. Raises OutOfMemoryError when told to."""
        if self._on_create is not None:
            self._on_create(nbytes)
        if self._failures:
            raise OutOfMemoryError(self._failures.popleft())
        memory = FakeSlabMemory(nbytes, self._kind)
        self.created.append(memory)
        return memory
