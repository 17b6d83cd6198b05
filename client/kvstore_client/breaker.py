"""Leaves a service alone that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed: calls pass. Open after `failures` consecutive failures, or a decisive one: no call passes for
    `cooldown_s`. Then half-open: one call probes; its success closes the breaker, its failure opens it again.

    Invariants: at most one probe is under way; a probe that never reports counts as failed after another cooldown.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = 0
        self._quiet_until = 0.0

    @property
    def open(self) -> bool:
        """Whether calls are held back now (half-open counts as open)."""
        with self._lock:
            return self._failed >= self._limit

    def allow(self) -> bool:
        """Whether a call may be made. True while open means: this call is the probe, and must report."""
        with self._lock:
            if self._failed < self._limit:
                return True
            now = self._clock()
            if now < self._quiet_until:
                return False
            self._quiet_until = now + self._cooldown_s
            return True

    def success(self) -> None:
        """The service answered, if only with a refusal."""
        with self._lock:
            self._failed = 0

    def failure(self, *, decisive: bool = False) -> bool:
        """The service did not answer. True when this opened the breaker; a `decisive` one does so alone."""
        with self._lock:
            was_open = self._failed >= self._limit
            self._failed = max(self._failed + 1, self._limit if decisive else 0)
            now_open = self._failed >= self._limit
            if now_open:
                self._quiet_until = self._clock() + self._cooldown_s
            return now_open and not was_open
