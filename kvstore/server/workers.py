"""Threads for slow work, and a watch that tells when one of them hangs."""

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Runs functions in threads, away from the event loop.

    Invariants: at most `threads` run at a time, the rest wait; `stuck` names work that has run for longer than
    `limit_s`, which is far more than any of it takes.
    """

    def __init__(self, *, threads: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._running: dict[int, tuple[str, float]] = {}
        self._ids = itertools.count()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-work")
        self._limit_s = limit_s
        self._clock = clock

    async def run(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `function` in a thread and returns its result. `name` is for `stuck`."""

        def tracked() -> T:
            key = next(self._ids)
            self._running[key] = (name, self._clock())
            try:
                return function(*args, **kwargs)
            finally:
                del self._running[key]

        return await asyncio.get_running_loop().run_in_executor(self._executor, tracked)

    def stuck(self) -> str | None:
        """Work that has run for too long, in words; None when all is well."""
        now = self._clock()
        for name, started in list(self._running.values()):
            if now - started > self._limit_s:
                return f"{name} has run for {now - started:.0f} s. Expected at most {self._limit_s:.0f} s"
        return None

    def close(self) -> None:
        """Lets no more work in; does not wait for what runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
