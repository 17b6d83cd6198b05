"""The one background thread of a store: commits, top-ups and returns, in order."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvstore_client.device_work import Done, Pending
from kvstore_client.holdings import Debt

log = logging.getLogger("kvstore_client")
# How soon a return that the service did not answer is tried again.
RETRY_S = 0.5
# How often a device is asked whether it is done with the first job's blocks.
POLL_S = 2e-3


class Job(Protocol):
    """Work for the background thread. run() handles the service's errors itself.

    ready() says whether it may run now: a device may still be at work on its blocks. The jobs behind it wait with it.
    """

    def ready(self) -> bool: ...
    def run(self) -> None: ...
    def drop(self) -> None: ...


class Returns:
    """A job that gives things back. Neighbours in the queue merge, so it is never dropped and needs no bound."""

    def __init__(
        self, debts: dict[int, Debt], run: Callable[[dict[int, Debt]], None], after: Done | None = None
    ) -> None:
        """`after`: the device work that still uses what is to be given back."""
        self._parts = [(debts, Pending(after))]
        self._run = run

    def merge(self, other: Returns) -> None:
        """Takes over what `other` was to give back."""
        for debts, using in other._parts:
            if not using.settled() or using.problem:
                self._parts.append((debts, using))
                continue
            for epoch, debt in debts.items():
                self._parts[0][0].setdefault(epoch, Debt()).add(debt)

    def ready(self) -> bool:
        """Whether no device uses any of it any more, or is given up on."""
        return all(using.settled() for _, using in self._parts)

    def run(self) -> None:
        """Hands over what no device uses any more; the rest stays ours until this process ends."""
        for debts, using in self._parts:
            if using.problem:
                log.warning("blocks stay with this process, its device may still use them: %s", using.problem)
            else:
                self._run(debts)

    def drop(self) -> None:
        """Nothing to undo: the service takes everything back when this process ends."""


class Worker:
    """Runs jobs in order in a daemon thread, urgent ones first; `idle` runs between them and at least every RETRY_S
    while it wants to.

    Invariants: at most `limit` droppable jobs wait, more are dropped at once; put() never waits; a job that isn't ready
    holds back those behind it, but neither urgent ones nor actions; nothing here is called from a finalizer but poke(),
    which takes no lock; every action poked is run, by whoever finds the thread ended if need be.
    """

    def __init__(self, name: str, limit: int, idle: Callable[[], bool]) -> None:
        """`idle()` does deferred work and says whether it wants to be called again soon."""
        self._limit = limit
        self._idle = idle
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._urgent: deque[Job] = deque()
        self._ended = threading.Event()
        self._droppable = 0
        self._wake: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job, *, urgent: bool = False) -> bool:
        """Queues a job that may be dropped. False when it was. `urgent`: before those that are no such."""
        with self._lock:
            full = self._stopping.is_set() or self._droppable >= self._limit
            if full:
                self.dropped += 1
            else:
                self._droppable += 1
                (self._urgent if urgent else self._jobs).append(job)
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
        if self._ended.is_set():
            self._hear(0.0)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all jobs queued so far are done and `idle` has nothing left. False when time is up."""
        deadline = time.monotonic() + timeout_s
        done = threading.Event()
        marker = _Marker(self._idle, done)
        with self._lock:
            if self._stopping.is_set():
                return not len(self)
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
            left = [*self._urgent, *self._jobs]
            self._urgent.clear()
            self._jobs.clear()
        for job in left:
            job.drop()
        self._ended.set()
        self._hear(0.0)

    def __len__(self) -> int:
        return len(self._jobs) + len(self._urgent)

    def _run(self) -> None:
        soon = False
        while not self._stopping.is_set():
            # A device says nothing when it is done: it is asked.
            waiting = len(self) > 0
            woken = self._hear(POLL_S if waiting else RETRY_S if soon else None)
            while not self._stopping.is_set() and (job := self._next()) is not None:
                woken = True
                try:
                    job.run()
                except Exception:
                    # A bug in one job must not end the thread that gives everything back; the job is undone.
                    log.exception("background job failed")
                    job.drop()
            if not self._stopping.is_set() and (woken or not waiting):
                soon = self._idle()

    def _hear(self, timeout_s: float | None) -> bool:
        """Waits for a wake-up, then does all that was poked: before the jobs, so that flush() covers it. Whether there
        was one.
        """
        woken = False
        try:
            action = self._wake.get(block=timeout_s != 0.0, timeout=timeout_s)
            woken = True
            while True:
                if action is not None:
                    action()
                action = self._wake.get_nowait()
        except queue.Empty:
            return woken

    def _next(self) -> Job | None:
        with self._lock:
            jobs = self._urgent or self._jobs
            # Under the lock, for returns may merge with it; the question to the driver takes a few microseconds.
            if not jobs or not jobs[0].ready():
                return None
            job = jobs.popleft()
            if not isinstance(job, Returns | _Marker):
                self._droppable -= 1
            return job


class _Marker:
    """A place in the queue that somebody waits for."""

    def __init__(self, settle: Callable[[], bool], done: threading.Event) -> None:
        self._settle = settle
        self._done = done
        self.settled = False

    def ready(self) -> bool:
        return True

    def run(self) -> None:
        self.settled = not self._settle()
        self._done.set()

    def drop(self) -> None:
        self._done.set()
