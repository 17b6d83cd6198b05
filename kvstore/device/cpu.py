"""Slabs in host memory: sealed memfds, every page there before anybody maps them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable

from kvstore_kernels import direct

from kvstore.device.base import ALLOCATION_ID_BYTES, MEMFD, Device, Pace, SlabMemory, let_go
from kvstore.device.headroom import Headroom, memory_headroom
from kvstore.errors import InvalidRequestError, OutOfMemoryError

_CHUNK = 64 << 20
# Touched in one go: small, because the interpreter's lock is held meanwhile, and the event loop waits for it.
_PIECE = 2 << 20
# Left to everybody else in the same control group, so that a slab never takes the last page.
_RESERVE = 32 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
# Never F_SEAL_FUTURE_WRITE: it is final for the inode and would lock out the service's own next mapping.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CpuSlabMemory(SlabMemory):
    """A memfd of mode 0600 whose size is sealed, published in kvstore_kernels.direct while it is open.

    Invariant: while open, `_fd` and `_map` are both valid and every page is allocated; after close both are gone here.
    The mapping itself goes with its last reference: whoever found it in this process may read on.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = mapping
        self._view = memoryview(mapping)
        self._nbytes = len(mapping)
        self._allocation_id = secrets.token_bytes(ALLOCATION_ID_BYTES)
        # Also when nobody gets to close it: a call that waited for it may be gone.
        self._let_go = weakref.finalize(self, let_go, self._allocation_id, fd)
        # Not at the exit of the interpreter, when a service of this process is still being stopped.
        self._let_go.atexit = False
        direct.publish(self._allocation_id, _address(mapping), self._nbytes, mapping)

    @property
    def nbytes(self) -> int:
        """Bytes of the memfd."""
        return self._nbytes

    @property
    def kind(self) -> str:
        """Always a memfd."""
        return MEMFD

    @property
    def device_uuid(self) -> bytes:
        """Always empty."""
        return b""

    @property
    def allocation_id(self) -> bytes:
        """Drawn at random."""
        return self._allocation_id

    @property
    def fd(self) -> int:
        """Writable descriptor. Raises ValueError after close()."""
        if self._fd < 0:
            raise ValueError("the slab is closed: its descriptor can't be used any more")
        return self._fd

    @property
    def view(self) -> memoryview:
        """The bytes, writable. Slices of it keep the mapping alive past close()."""
        if self._fd < 0:
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

    def read_only_fd(self) -> int:
        """Reopens the memfd O_RDONLY: it can't be mapped for writing (by another uid, not even by a detour)."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def discard(self) -> None:
        """Punches a hole over the whole memfd."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Drops mapping and descriptor. Whoever holds a slice or found it by its id keeps the mapping until then."""
        if self._fd < 0:
            return
        self._let_go()
        self._fd = -1
        self._map = None
        self._view = memoryview(b"")


class CpuDevice(Device):
    """Host memory. `headroom` tells what can still be touched; a parameter for tests."""

    def __init__(self, headroom: Callable[[], Headroom] = memory_headroom) -> None:
        self._headroom = headroom

    @property
    def name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    @property
    def kind(self) -> str:
        """Its slabs are memfds."""
        return MEMFD

    @property
    def uuid(self) -> bytes:
        """It has none."""
        return b""

    def create_slab(self, nbytes: int, pace: Pace | None = None) -> CpuSlabMemory:
        """A zeroed, pre-faulted memfd. Raises OutOfMemoryError before touching what is not there."""
        if nbytes <= 0:
            raise InvalidRequestError(f"a slab of {nbytes} bytes was asked for: expected at least 1")
        self._require(nbytes, nbytes)
        fd = os.memfd_create("kvstore-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        mapping: mmap.mmap | None = None
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, nbytes)
            for start in range(0, nbytes, _CHUNK):
                self._require(nbytes, nbytes - start)
                end = min(start + _CHUNK, nbytes)
                for piece in range(start, end, _PIECE):
                    began = time.monotonic()
                    length = min(_PIECE, end - piece)
                    os.posix_fallocate(fd, piece, length)
                    _populate(mapping, piece, length)
                    if pace is not None:
                        pace(time.monotonic() - began)
            mapping.madvise(mmap.MADV_DONTFORK)
        except OSError as error:
            _drop(fd, mapping)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
                raise OutOfMemoryError(self._shortage(nbytes, self._headroom())) from error
            raise
        except BaseException:
            _drop(fd, mapping)
            raise
        return CpuSlabMemory(fd, mapping)

    def _require(self, total: int, missing: int) -> None:
        headroom = self._headroom()
        if missing + _RESERVE > headroom.nbytes:
            raise OutOfMemoryError(self._shortage(total, headroom))

    def _shortage(self, nbytes: int, headroom: Headroom) -> str:
        return (
            f"a slab of {nbytes} bytes can't be had: {headroom.nbytes} bytes are available ({headroom.limit}), of "
            f"which {_RESERVE} stay untouched. Lower the budget of device cpu or raise that limit"
        )


def _populate(mapping: mmap.mmap, start: int, length: int) -> None:
    """Touches every page, so that no worker pays for it."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel before 5.14. The pages are allocated already, so that touching them can't fail.
        for page in range(start, start + length, mmap.PAGESIZE):
            mapping[page] = 0


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _drop(fd: int, mapping: mmap.mmap | None) -> None:
    if mapping is not None:
        mapping.close()
    os.close(fd)
