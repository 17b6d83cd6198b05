"""Blocks lie in host memory, the model computes on the device: fetched a layer ahead and dequantized there."""

from __future__ import annotations

from kvstore.bench.sections.runs import ensure_arm
from kvstore.bench.shapes import Run
from kvstore.bench.stage import Stage

ARM = "int8-host"
LOCAL = "int8"
# Of some dozen steps each: with two that count, one disturbed run decides.
_STEP_REPEATS = 9


def play(stage: Stage) -> None:
    """A history in host memory: time to first token warm against cold, and a step against what bounds it."""
    shape = stage.settings.shape
    served = stage.service("host", "cpu")
    for worker in ("main", "second"):
        ensure_arm(stage, worker, LOCAL)
        stage.attach(worker, ARM, "int8", served.address)
    rate = stage.workers["main"].ask("pinned_rate", 60.0)
    first_token, decode = Run(1, shape.history, 1), Run(1, shape.history, shape.steps + 1)
    seed = 0
    for repeat in range(4):
        seed = stage.next_seed()
        cold = stage.run("main", ARM, first_token, seed=seed)
        stage.flush("main", ARM)
        warm = stage.run("second", ARM, first_token, seed=seed)
        stage.add(
            "placement-first-token",
            repeat=repeat,
            first=repeat == 0,
            tokens=shape.history,
            cold_ms=cold["ms"],
            warm_ms=warm["ms"],
            cold_reused=cold["reused"],
            warm_reused=warm["reused"],
        )
        stage.workers["second"].ask("drop", 60.0)
    # The last prompt again, for its steps; the same with local placement, on the same worker.
    local_seed = stage.next_seed()
    stage.run("main", LOCAL, first_token, seed=local_seed)
    stage.flush("main", LOCAL)
    for repeat in range(_STEP_REPEATS):
        # In turns: a busy host falls on both.
        host = stage.run("second", ARM, decode, seed=seed)
        local = stage.run("second", LOCAL, decode, seed=local_seed)
        block_bytes = stage.attached["second"][ARM]["block_bytes"]
        stage.add(
            "placement-step",
            repeat=repeat,
            first=repeat == 0,
            tokens=shape.history,
            steps=shape.steps,
            step_ms=host["step_ms"],
            local_step_ms=local["step_ms"],
            history_bytes=host["reused"] // 64 * block_bytes,
            pinned_bytes_per_s=rate,
            reused=host["reused"],
            local_reused=local["reused"],
            worker_kv_bytes=host["worker_kv"],
        )
    stage.add_driver("placement cpu")
    for worker, arm in (("second", ARM), ("main", ARM), ("main", LOCAL)):
        stage.clear(worker, arm)
