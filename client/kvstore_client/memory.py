"""Shared mappings through libc: Python's mmap can neither replace one in place nor name its address."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from functools import lru_cache

_MAP_FIXED = 0x10
_MADV_DONTFORK = 10
_FAILED = ctypes.c_void_p(-1).value


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def map_shared(fd: int, nbytes: int, *, writable: bool, address: int | None = None) -> int:
    """Maps the first `nbytes` of `fd`; the address. With `address`, replaces the mapping that lies there, atomically.

    The mapping is not inherited by a fork. Raises OSError.
    """
    libc = _libc()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (0 if address is None else _MAP_FIXED)
    result = libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    if libc.madvise(result, nbytes, _MADV_DONTFORK):
        code = ctypes.get_errno()
        # A mapping that was replaced stays: others read it.
        if address is None:
            libc.munmap(result, nbytes)
        raise OSError(code, f"madvise(MADV_DONTFORK) of {nbytes} bytes: {os.strerror(code)}")
    return int(result)


def unmap(address: int, nbytes: int) -> None:
    """Ends a mapping. Raises OSError."""
    if _libc().munmap(address, nbytes):
        code = ctypes.get_errno()
        raise OSError(code, f"munmap of {nbytes} bytes: {os.strerror(code)}")


def buffer_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory as a buffer. It does not keep the mapping: watch it with weakref.finalize."""
    return (ctypes.c_ubyte * nbytes).from_address(address)


def can_shrink(fd: int) -> bool:
    """Whether the file behind `fd` could be truncated under a mapping, which would end readers with SIGBUS."""
    try:
        return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return True
