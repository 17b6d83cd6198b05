"""Log lines that can't flood a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvstore_client")
# A condition that lasts is repeated this rarely.
REMINDER_S = 600.0


class Notices:
    """Warnings by kind: at most one line per kind and interval, with the number of those left out in between.

    Kinds are few and fixed in code, so the table needs no bound.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}
        self._over: set[str] = set()
        self._counts: dict[str, int] = {}

    def warn(self, kind: str, text: str, interval_s: float | None = None) -> None:
        """Logs an event, or counts it if its kind was logged a moment ago."""
        interval = self._interval_s if interval_s is None else interval_s
        with self._lock:
            now = self._clock()
            self._counts[kind] = self._counts.get(kind, 0) + 1
            last = self._last.get(kind)
            if last is not None and now - last < interval:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return
            self._last[kind] = now
            self._over.discard(kind)
            left_out = self._left_out.pop(kind, 0)
        suffix = f" ({left_out} like it left out)" if left_out else ""
        log.warning("%s%s", text, suffix)

    def warn_condition(self, kind: str, text: str) -> None:
        """Logs the start of a condition that may last; says it again only every ten minutes, or after over(kind)."""
        with self._lock:
            interval_s = self._interval_s if kind in self._over else REMINDER_S
        self.warn(kind, text, interval_s)

    def over(self, kind: str) -> None:
        """The condition has ended: its next start is logged, though not within the interval of the last."""
        with self._lock:
            self._over.add(kind)

    def counts(self) -> dict[str, int]:
        """Events so far by kind, logged or not."""
        with self._lock:
            return dict(self._counts)
