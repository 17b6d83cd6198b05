"""Workers that die, workers that stop, workers with threads: nobody else notices, and the text stays the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from kvstore.demo import texts
from kvstore.demo.admin import Admin
from kvstore.demo.compare import compare_tokens
from kvstore.demo.errors import DemoError
from kvstore.demo.stage import BLOCK_TOKENS, RUN_S, Stage, budget_for

_STOP_S = 30.0


def kills(stage: Stage) -> None:
    """A kill -9 while a worker writes a document, and while one reads it in place."""
    settings = stage.settings
    reference = stage.run("worker-b", "int8", stage.prompts[1], settings.new_tokens)
    for case in ("mid-write", "mid-read"):
        name = f"victim-{case}"
        stage.start_worker(name, ("int8",))
        victim = stage.workers[name]
        if case == "mid-write":
            start = 40 * settings.document_tokens
            prompt = stage.documents(name, settings.document_tokens, start, texts.QUESTIONS[:1])[0]
            victim.send("run", arm="int8", tokens=prompt, new_tokens=200, exact=True)
            held = _holds(stage.admin, name, "private_slots")
        else:
            victim.send("run", arm="int8", tokens=stage.prompts[2], new_tokens=200, exact=True, announce=True)
            victim.wait_event(RUN_S)
            held = _holds(stage.admin, name, "leases")
        stage.admin.wait_until(held, 30.0, f"the victim holds something in {case}", pause=0.002)
        before = stage.admin.stats()
        session = next(session for session in stage.admin.sessions() if session.name == name)
        expected = sum(device.slots_private for device in before.devices) - session.private_slots
        os.kill(victim.process.pid, signal.SIGKILL)
        back_s = stage.admin.wait_until(_gone(stage.admin, name, expected), 30.0, f"slots came back after {case}")
        stage.workers.pop(name).kill()
        problems = stage.admin.problems()
        stage.add(
            "kill",
            case=case,
            private_slots=session.private_slots,
            leases=session.leases,
            back_s=back_s,
            problems=len(problems),
            details=problems,
        )
        after = stage.run("worker-b", "int8", stage.prompts[1], settings.new_tokens)
        _fault(stage, f"another worker after kill -9 in {case}", reference, after)


def stopped_worker(stage: Stage) -> None:
    """A worker stands still for 30 s in the middle of its answer while others need the room its blocks lie in."""
    settings = stage.settings
    # Room for three such documents: the second one of the others already pushes.
    block_bytes = stage.admin.namespace(settings.model, "int8").block_bytes
    slots = 3 * (settings.short_tokens // BLOCK_TOKENS + 3)
    service, admin = stage.start_service("pressure", budget=budget_for(slots, block_bytes))
    names = ("sleeper", "pusher")
    for name in names:
        stage.start_worker(name, ("int8",), address=service.address)
    sleeper = stage.workers["sleeper"]
    prompt = stage.documents("sleeper", settings.short_tokens, 0, texts.QUESTIONS[:1])[0]
    stage.run("sleeper", "int8", prompt, 2)
    stage.flush("sleeper")
    reference = stage.run("sleeper", "int8", prompt, 60, exact=True)
    sleeper.send("run", arm="int8", tokens=prompt, new_tokens=60, exact=True, announce=True)
    sleeper.wait_event(RUN_S)
    evictions = admin.stats().evictions
    sleeper.signal_group(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        number = 0
        while time.monotonic() - stopped < _STOP_S:
            start = (50 + number) * settings.document_tokens
            other = stage.documents("pusher", settings.short_tokens, start, texts.QUESTIONS[:1])[0]
            stage.run("pusher", "int8", other, 2)
            number += 1
    finally:
        sleeper.signal_group(signal.SIGCONT)
    answer = sleeper.receive(RUN_S)
    evictions = admin.stats().evictions - evictions
    if not evictions:
        raise DemoError("nothing was evicted while the worker stood still: the budget of this scene is too large")
    _fault(stage, "worker stopped for 30 s under eviction", reference, answer, evictions=int(evictions))
    problems = admin.problems()
    stage.add("kill", case="stopped", back_s=0.0, problems=len(problems), details=problems)
    for name in names:
        stage.end_worker(name)


def threads(stage: Stage) -> None:
    """Four threads generate on one attached model: each gets its serial text."""
    new = stage.settings.new_tokens
    prompts = stage.documents("worker-b", stage.settings.short_tokens, 0, texts.QUESTIONS)
    for prompt in prompts:
        stage.run("worker-b", "int8", prompt, 2)
    stage.flush("worker-b")
    serial = [stage.run("worker-b", "int8", prompt, new) for prompt in prompts]
    together = stage.workers["worker-b"].ask("threads", RUN_S, arm="int8", prompts=prompts, new_tokens=new)
    for number, (alone, tokens) in enumerate(zip(serial, together, strict=True)):
        _fault(stage, f"thread {number} of 4", alone, {"tokens": tokens})


def _fault(stage: Stage, case: str, reference: dict[str, Any], answer: dict[str, Any], **fields: Any) -> None:
    found = compare_tokens(reference["tokens"], answer["tokens"])
    stage.add("fault", case=case, equal=found.equal, first_difference=found.first_difference, **fields)


def _holds(admin: Admin, name: str, what: str) -> Callable[[], bool]:
    return lambda: any(session.name == name and getattr(session, what) > 0 for session in admin.sessions())


def _gone(admin: Admin, name: str, private_slots: int) -> Callable[[], bool]:
    """Whether a session is over and the service has no more private slots than the others have."""

    def gone() -> bool:
        if any(session.name == name for session in admin.sessions()):
            return False
        return sum(device.slots_private for device in admin.stats().devices) <= private_slots

    return gone
