"""The table of the bug report: every run with every cache. The ones that claims compare take turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.bench.shapes import Run
from kvstore.bench.stage import Stage
from kvstore.demo.errors import DemoError

# Worker -> its arms, in the order of their turns.
GROUPS: dict[str, tuple[str, ...]] = {
    "main": ("dynamic-flash", "int8", "no-cache", "dynamic", "passthrough"),
    "embedded": ("int8-embedded", "passthrough-embedded"),
    "peers": ("static", "hqq8"),
}
ARMS = tuple(arm for arms in GROUPS.values() for arm in arms)
# Arms that no claim may do without: short runs several times, and long ones to their end, but for the slower of the
# two DynamicCaches.
_CLAIMED = ("dynamic-flash", "int8", "no-cache", "dynamic")
_BOUND = ("dynamic",)
_NOT_OURS = ("dynamic", "dynamic-flash", "static", "hqq8", "no-cache")


def ensure_arm(stage: Stage, worker: str, arm: str) -> None:
    """Worker and attachment are there, also after a failure ended them."""
    stage.worker(worker)
    if arm in _NOT_OURS:
        return
    codec, _, embedded = arm.partition("-")
    address = "embedded" if embedded else stage.service("gpu", stage.settings.device).address
    stage.attach(worker, arm, codec, address)


def launcher(worker: str) -> Callable[[Stage], None]:
    """Starts a group's worker if any of its arms was asked for."""

    def launch(stage: Stage) -> None:
        if any(arm in stage.settings.arms for arm in GROUPS[worker]):
            stage.worker(worker, start_only=True)

    return launch


def play(stage: Stage) -> None:
    """The arms that claims compare, all runs; the worker stays for the sections behind."""
    _play_group(stage, "main")


def play_embedded(stage: Stage) -> None:
    """Ours with the service in the worker's own process."""
    _play_group(stage, "embedded")
    stage.end_worker("embedded")


def play_peers(stage: Stage) -> None:
    """The other caches of transformers."""
    _play_group(stage, "peers")
    stage.end_worker("peers")


def _play_group(stage: Stage, worker: str) -> None:
    chosen = [arm for arm in GROUPS[worker] if arm in stage.settings.arms]
    for run in stage.settings.runs if chosen else ():
        if stage.out_of_time(f"{run.name}, {', '.join(chosen)}"):
            continue
        _one_shape(stage, worker, [arm for arm in chosen if _fits(arm, run)], run)
        stage.save()
    if chosen:
        stage.add_driver(f"{worker} after its runs")


def _one_shape(stage: Stage, worker: str, arms: list[str], run: Run) -> None:
    alive = []
    for arm in arms:
        try:
            ensure_arm(stage, worker, arm)
            # Compiles what this shape needs, and shows what can't run at all.
            stage.run(worker, arm, run.warm_up, bound_s=_bound(stage, arm, run), room=run.tokens_out)
            stage.clear(worker, arm)
            alive.append(arm)
        except DemoError as error:
            _failed(stage, worker, arm, run, error)
    for repeat in range(1 if run.long else stage.settings.repeats):
        for arm in alive if repeat % 2 == 0 else alive[::-1]:
            if repeat and arm not in _CLAIMED:
                continue
            try:
                ensure_arm(stage, worker, arm)
                answer = stage.run(worker, arm, run, bound_s=_bound(stage, arm, run))
                _keep(stage, worker, arm, run, repeat, answer)
                if run.long and arm in ("dynamic-flash", "int8"):
                    stage.add_driver(f"{arm}, {run.name}, the cache kept")
                stage.clear(worker, arm)
            except DemoError as error:
                _failed(stage, worker, arm, run, error)


def _keep(stage: Stage, worker: str, arm: str, run: Run, repeat: int, answer: dict[str, Any]) -> None:
    ours = arm not in _NOT_OURS
    peak = answer["peak"]
    tokens = answer["tokens_out"]
    stage.add(
        "run",
        arm=arm,
        run=run.name,
        repeat=repeat,
        worker=worker,
        batch=run.batch,
        tokens_in=run.tokens_in,
        tokens_out=tokens,
        cut_short=tokens < run.tokens_out,
        ms=answer["ms"],
        ms_per_token=answer["ms"] / tokens,
        step_ms=answer["step_ms"],
        kv_bytes=answer["service_kv"] + answer["worker_kv"],
        kv_peak_bytes=answer["service_kv_peak"] + answer["worker_kv"],
        worker_kv_bytes=answer["worker_kv"],
        torch_peak=peak,
        torch_held=answer["held"],
        # Slots aren't torch's: a peak without them would leave the cache out.
        peak=None if peak is None else peak + (answer["service_kv_peak"] if ours else 0),
        reused=answer["reused"],
        warnings=answer["warnings"],
    )


def _failed(stage: Stage, worker: str, arm: str, run: Run, error: DemoError) -> None:
    text = str(error)
    if "HQQ" in text and "install" in text:
        stage.skip(f"{arm}, {run.name}", "the package hqq is not installed")
    else:
        stage.fail(f"{arm}, {run.name}", error)
        stage.add("run-failed", arm=arm, run=run.name, error=text)
    stage.recover(worker, error)


def _bound(stage: Stage, arm: str, run: Run) -> float:
    whole = arm in _CLAIMED and not (run.long and arm in _BOUND)
    return 240.0 if whole else stage.settings.bound_s


def _fits(arm: str, run: Run) -> bool:
    return arm != "no-cache" or (run.batch == 1 and run.tokens_out == 1)
