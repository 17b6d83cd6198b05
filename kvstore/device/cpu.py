"""Slabs in host memory: sealed memfds, every page there before anybody maps them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from kvstore.device.base import Device, SlabMemory
from kvstore.device.headroom import Headroom, memory_headroom
from kvstore.errors import InvalidRequestError, OutOfMemoryError

_CHUNK = 64 << 20
# Left to everybody else in the same control group, so that a slab never takes the last page.
_RESERVE = 32 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
# Never F_SEAL_FUTURE_WRITE: it is final for the inode and would lock out the service's own next mapping.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CpuSlabMemory(SlabMemory):
    """A memfd of mode 0600 whose size is sealed.

    Invariant: while open, `_fd` and `_map` are both valid and every page is allocated; after close both are gone.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self._fd = fd
        self._map = mapping
        self._view = memoryview(mapping)
        self._nbytes = len(mapping)

    @property
    def nbytes(self) -> int:
        """Bytes of the memfd."""
        return self._nbytes

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

    def read_only_fd(self) -> int:
        """Reopens the memfd O_RDONLY: it can't be mapped for writing (by another uid, not even by a detour)."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def discard(self) -> None:
        """Punches a hole over the whole memfd."""
        if self._fd >= 0:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Drops mapping and descriptor. A slice that somebody still holds keeps the mapping until it is gone."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


class CpuDevice(Device):
    """Host memory. `headroom` tells what can still be touched; a parameter for tests."""

    def __init__(self, headroom: Callable[[], Headroom] = memory_headroom) -> None:
        self._headroom = headroom

    @property
    def name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def create_slab(self, nbytes: int) -> CpuSlabMemory:
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
                length = min(_CHUNK, nbytes - start)
                os.posix_fallocate(fd, start, length)
                _populate(mapping, start, length)
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


def _drop(fd: int, mapping: mmap.mmap | None) -> None:
    if mapping is not None:
        mapping.close()
    os.close(fd)
