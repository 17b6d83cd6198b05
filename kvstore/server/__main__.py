"""`python -m kvstore.server --control-fd N --parent-pid PID`: the supervisor's child."""

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys

from kvstore.server.process import run

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> bool:
    """Asks the kernel to kill this process when its parent dies. False when the parent is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def main() -> int:
    parser = argparse.ArgumentParser(description="The server process of `kvstore serve`, which starts it.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args()
    if not _die_with(options.parent_pid):
        return 1
    # Ctrl-C goes to the whole process group; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=options.control_fd)
    control.set_inheritable(False)
    return asyncio.run(run(control))


if __name__ == "__main__":
    sys.exit(main())
