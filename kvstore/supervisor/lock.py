"""One service a socket path: a locked file beside the socket, and sockets of dead services out of the way."""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from kvstore.config import AddressInUseError


class ServiceLock:
    """An exclusive lock on `<address>.lock`, which holds the pid of its owner.

    Invariants: the lock belongs to the open file, so it ends with the process however that dies; the file is removed
    only by its owner, and whoever locks a file checks that the path still leads to it.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path

    @classmethod
    def acquire(cls, address: Path) -> "ServiceLock":
        """Locks `address`. AddressInUseError, naming the pid, when a living service has it."""
        path = address.with_name(address.name + ".lock")
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise AddressInUseError(
                    f"{address} is served already by the process with pid {owner}. Expected an address of its own: "
                    f"stop that service (kill {owner}), or choose another one with --address"
                ) from None
            if _leads_to(path, fd):
                break
            os.close(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return cls(fd, path)

    def release(self) -> None:
        """Removes the file and ends the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _leads_to(path: Path, fd: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def remove_stale_socket(path: Path) -> bool:
    """Removes the socket of a dead process. Returns whether there was one.

    The caller holds the lock of the address. AddressInUseError when something else lies there or somebody listens.
    """
    try:
        mode = path.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise AddressInUseError(f"{path} exists and is no socket. Expected a free path: move it, or choose another one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return True
            if error.errno not in (errno.EPROTOTYPE, errno.EAGAIN):
                raise
    raise AddressInUseError(
        f"another program listens on {path} (it holds no {path.name}.lock). Expected a free path: stop it, or "
        "choose another one with --address"
    )
