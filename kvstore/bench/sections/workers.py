"""A second worker process gets the prompt that the first one computed."""

from __future__ import annotations

from kvstore.bench.sections.runs import ensure_arm
from kvstore.bench.shapes import Run
from kvstore.bench.stage import Stage

ARM = "int8"


def launch(stage: Stage) -> None:
    """Both workers."""
    for worker in ("main", "second"):
        stage.worker(worker, start_only=True)


def play(stage: Stage) -> None:
    """Time to first token, warm in the second worker against cold in the first; bytes that the second one adds."""
    shape = stage.settings.shape
    for worker in ("main", "second"):
        ensure_arm(stage, worker, ARM)
    for tokens, repeats in ((shape.history, 3), (shape.longest, 2)):
        # The first prompt compiles and maps in both workers; it is kept as a row and left out of the claims.
        for repeat in range(repeats + 1):
            _one_prompt(stage, tokens, repeat)
        history = Run(1, tokens, 17)
        step = stage.run("main", "dynamic-flash", history)["step_ms"]
        stage.add("eager-step", tokens=tokens, step_ms=step)
        stage.clear("main", ARM)
    stage.add_driver("two workers on one service")


def _one_prompt(stage: Stage, tokens: int, repeat: int) -> None:
    seed, run = stage.next_seed(), Run(1, tokens, 1)
    cold = stage.run("main", ARM, run, seed=seed)
    stage.flush("main", ARM)
    stage.workers["main"].ask("drop", 60.0)
    stage.flush("main", ARM)
    before = stage.committed_bytes("main", ARM)
    warm = stage.run("second", ARM, run, seed=seed)
    stage.flush("second", ARM)
    after = stage.committed_bytes("second", ARM)
    stage.add(
        "second-worker",
        tokens=tokens,
        repeat=repeat,
        first=repeat == 0,
        cold_ms=cold["ms"],
        warm_ms=warm["ms"],
        cold_reused=cold["reused"],
        warm_reused=warm["reused"],
        match_ms=warm["match_ms"],
        shared_bytes_added=after - before,
        own_bytes=warm["service_kv"] - before,
    )
    stage.clear("second", ARM)
