"""Counts what a request costs, from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvstore_client.blocks import RequestTraffic


class Meter:
    """A RequestTraffic behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = RequestTraffic()

    def add(self, **amounts: float) -> None:
        """Adds to counters, by field name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._traffic, name, getattr(self._traffic, name) + amount)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Counts a call of the service that the request's thread waits for, however it ends."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(rpcs=1, rpc_ms=(time.perf_counter() - started) * 1e3)

    def note(self, reason: str) -> None:
        """Records why something fell short."""
        with self._lock:
            self._traffic.note(reason)

    def copy(self) -> RequestTraffic:
        """The counters so far."""
        with self._lock:
            return replace(self._traffic, short_reasons=list(self._traffic.short_reasons))
