"""The long answer again, ours and DynamicCache in turns: the claim about ms/token is theirs."""

from __future__ import annotations

from kvstore.bench.sections import runs
from kvstore.bench.stage import Stage

_ARMS = ("dynamic-flash", "int8")
_CHUNK = 16
_RUN_S = 300.0


def launch(stage: Stage) -> None:
    """The worker of the runs."""
    if _asked(stage):
        stage.worker("main", start_only=True)


def play(stage: Stage) -> None:
    """Both answers at once in one process, some tokens each."""
    if not _asked(stage):
        return
    run = stage.settings.runs[0]
    for arm in _ARMS:
        runs.ensure_arm(stage, "main", arm)
        stage.run("main", arm, run.warm_up)
        stage.clear("main", arm)
    answer = stage.workers["main"].ask(
        "run_in_turns", _RUN_S, arms=list(_ARMS), tokens_in=run.tokens_in, tokens_out=run.tokens_out,
        seeds=[stage.next_seed() for _ in _ARMS], chunk=_CHUNK,
    )  # fmt: skip
    for arm, chunks in answer.items():
        stage.add(
            "turns", arm=arm, run=run.name, chunk=_CHUNK, chunks_ms=chunks, ms_per_token=sum(chunks) / run.tokens_out
        )
    stage.clear("main", "int8")


def _asked(stage: Stage) -> bool:
    settings = stage.settings
    return bool(settings.runs) and settings.runs[0].one_answer and set(_ARMS) <= set(settings.arms)
