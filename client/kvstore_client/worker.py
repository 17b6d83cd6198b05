"""The one background thread of a store: commits, top-ups and returns, in order."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvstore_client.holdings import Debt

log = logging.getLogger("kvstore_client")
# How soon a return that the service did not answer is tried again.
RETRY_S = 0.5


class Job(Protocol):
    """Work for the background thread. run() handles the service's errors itself."""

    def run(self) -> None: ...
    def drop(self) -> None: ...


class Returns:
    """A job that gives things back. Neighbours in the queue merge, so it is never dropped and needs no bound."""

    def __init__(self, debts: dict[int, Debt], run: Callable[[dict[int, Debt]], None]) -> None:
        self.debts = debts
        self._run = run

    def merge(self, other: Returns) -> None:
        """Takes over what `other` was to give back."""
        for epoch, debt in other.debts.items():
            self.debts.setdefault(epoch, Debt()).add(debt)

    def run(self) -> None:
        """Hands everything over to be given back."""
        self._run(self.debts)

    def drop(self) -> None:
        """Nothing to undo: the service takes everything back when this process ends."""


class Worker:
    """Runs jobs in order in a daemon thread; `idle` runs between them and at least every RETRY_S while it wants to.

    Invariants: at most `limit` droppable jobs wait, more are dropped at once; put() never waits; nothing here is called
    from a finalizer but poke(), which takes no lock.
    """

    def __init__(self, name: str, limit: int, idle: Callable[[], bool]) -> None:
        """`idle()` does deferred work and says whether it wants to be called again soon."""
        self._limit = limit
        self._idle = idle
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._droppable = 0
        self._wake: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Queues a job that may be dropped. False when it was."""
        with self._lock:
            full = self._stopping.is_set() or self._droppable >= self._limit
            if full:
                self.dropped += 1
            else:
                self._droppable += 1
                self._jobs.append(job)
        if full:
            job.drop()
        else:
            self._wake.put(None)
        return not full

    def give_back(self, returns: Returns) -> None:
        """Queues returns, after the jobs before them."""
        with self._lock:
            last = self._jobs[-1] if self._jobs else None
            if isinstance(last, Returns):
                last.merge(returns)
            else:
                self._jobs.append(returns)
        self._wake.put(None)

    def poke(self, action: Callable[[], None]) -> None:
        """Has `action` called soon. Safe in a finalizer."""
        self._wake.put(action)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all jobs queued so far are done and `idle` has nothing left. False when time is up."""
        deadline = time.monotonic() + timeout_s
        done = threading.Event()
        marker = _Marker(self._idle, done)
        with self._lock:
            if self._stopping.is_set():
                return not self._jobs
            self._jobs.append(marker)
        self._wake.put(None)
        return done.wait(max(0.0, deadline - time.monotonic())) and marker.settled

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the job under way; drops the others. The thread itself may call it too."""
        self._stopping.set()
        self._wake.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        with self._lock:
            left = list(self._jobs)
            self._jobs.clear()
        for job in left:
            job.drop()

    def __len__(self) -> int:
        return len(self._jobs)

    def _run(self) -> None:
        soon = False
        while not self._stopping.is_set():
            self._hear(RETRY_S if soon else None)
            while not self._stopping.is_set() and (job := self._next()) is not None:
                try:
                    job.run()
                except Exception:
                    # A bug in one job must not end the thread that gives everything back; the job is undone.
                    log.exception("background job failed")
                    job.drop()
            if not self._stopping.is_set():
                soon = self._idle()

    def _hear(self, timeout_s: float | None) -> None:
        """Waits for a wake-up, then does all that was poked: before the jobs, so that flush() covers it."""
        try:
            action = self._wake.get(timeout=timeout_s)
            while True:
                if action is not None:
                    action()
                action = self._wake.get_nowait()
        except queue.Empty:
            return

    def _next(self) -> Job | None:
        with self._lock:
            if not self._jobs:
                return None
            job = self._jobs.popleft()
            if not isinstance(job, Returns | _Marker):
                self._droppable -= 1
            return job


class _Marker:
    """A place in the queue that somebody waits for."""

    def __init__(self, settle: Callable[[], bool], done: threading.Event) -> None:
        self._settle = settle
        self._done = done
        self.settled = False

    def run(self) -> None:
        self.settled = not self._settle()
        self._done.set()

    def drop(self) -> None:
        self._done.set()
