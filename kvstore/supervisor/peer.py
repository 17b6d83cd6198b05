"""Who is at the other end of a Unix socket, and a process descriptor that tells when it dies."""

import errno
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

# linux/socket.h; Python 3.11 has no name for it. Kernels before 6.5 answer ENOPROTOOPT.
SO_PEERPIDFD = 77


class PeerError(Exception):
    """What the client sent is no descriptor of its own process."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Process, user and group of a peer as the kernel knows them. `pid` is 0 in a foreign pid namespace."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """SO_PEERCRED of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Credentials(*struct.unpack("3i", raw))


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process that connected; None where the kernel can't give one. PeerError when it is dead."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, struct.calcsize("i"))
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            raise PeerError("the process that connected is dead. Expected a living one: connect again") from None
        return None
    fd: int = struct.unpack("i", raw)[0]
    os.set_inheritable(fd, False)
    return fd


def verified_pidfd(sock: socket.socket, sent: int | None, credentials: Credentials) -> int | None:
    """The pidfd to watch a client by, the caller's to close, or None where there is none; takes over `sent`.

    PeerError when `sent` is no pidfd, or one of another process than the one that connected.
    """
    try:
        own = peer_pidfd(sock)
    except PeerError:
        if sent is not None:
            os.close(sent)
        raise
    if sent is None:
        return own
    try:
        _check_same(sent, own, credentials)
    except (PeerError, OSError):
        os.close(sent)
        raise
    finally:
        if own is not None:
            os.close(own)
    return sent


def _check_same(sent: int, own: int | None, credentials: Credentials) -> None:
    pid = _pid_of(sent)
    if own is not None:
        same = _identity(sent) == _identity(own) and pid == _pid_of(own)
    else:
        # Pids are 0 across pid namespaces; then nothing can be compared.
        same = not pid or not credentials.pid or pid == credentials.pid
    if not same:
        raise PeerError(
            f"the pidfd names process {pid}, but process {credentials.pid} connected. Expected the client's own "
            "pidfd: open the connection in the process that uses it"
        )


def _pid_of(fd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line[4:])
    raise PeerError("the descriptor sent with hello is no pidfd. Expected one of os.pidfd_open(os.getpid())")


def _identity(fd: int) -> tuple[int, int]:
    # Where pidfds have a file system of their own (Linux 6.9) the inode names the process; before, all share one.
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
