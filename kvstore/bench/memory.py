"""Bytes by namespace, seen from outside: the service's admin API."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType

from kvstore.demo.admin import Admin
from kvstore.demo.errors import DemoError

MIB = 2**20


def children_of(pid: int) -> list[int]:
    """Pids of the processes that `pid` started and theirs; empty when it is gone."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                started = [int(word) for word in path.read_text().split()]
                found += started
                waiting += started
    return found


def held_bytes(admin: Admin, codec: str) -> tuple[int, int]:
    """(bytes of slots that are not free, bytes of committed ones) in all namespaces of a codec."""
    held = committed = 0
    for space in admin.namespaces():
        if space.codec == codec:
            held += (space.committed + space.private + space.condemned) * space.block_bytes
            committed += space.committed * space.block_bytes
    return held, committed


class Sampler:
    """Asks a service every `pause_s` seconds how much a codec holds, in a thread, until the `with` block ends.

    `peak` is the most it ever said, in bytes. Its end waits for the last answer, which has a deadline.
    """

    def __init__(self, admin: Admin | None, codec: str, pause_s: float) -> None:
        self.peak = 0
        self.samples = 0
        self._admin = admin
        self._codec = codec
        self._pause_s = pause_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-sampler", daemon=True)

    def sample(self) -> None:
        """One more look."""
        if self._admin is not None:
            self.peak = max(self.peak, held_bytes(self._admin, self._codec)[0])
            self.samples += 1

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            # A service that dies in between is noticed by the run itself.
            with contextlib.suppress(DemoError):
                self.sample()

    def __enter__(self) -> Sampler:
        if self._admin is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._admin is not None:
            self._thread.join(timeout=30.0)
