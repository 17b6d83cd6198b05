"""Plays the scenes: progress, what happens when one fails, what is left afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.demo.claims import Row
from kvstore.demo.errors import DemoError
from kvstore.demo.program import terminate_is_interrupt
from kvstore.demo.scenes import SCENES, Scene
from kvstore.demo.stage import Settings, Stage


@dataclass(slots=True)
class Outcome:
    """Raw rows, and the scenes that failed with why."""

    rows: list[Row] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


def play(settings: Settings, console: Console) -> Outcome:
    """Plays all scenes that the settings ask for. Every process it starts is gone when it returns or raises.

    A failed scene ends the demo, unless `keep_going`: then the others are played all the same.
    """
    scenes = [scene for scene in SCENES if settings.full or not scene.full_only]
    outcome = Outcome()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        terminate_is_interrupt(),
        Progress(*columns, console=console) as progress,
        Stage(settings, lambda text: progress.console.print(f"  note: {text}")) as stage,
    ):
        task = progress.add_task("demo", total=sum(scene.seconds for scene in scenes))
        for scene in scenes:
            progress.update(task, description=scene.title)
            started = time.monotonic()
            failure = _play_one(scene, stage)
            mark = "failed" if failure else "done"
            progress.console.print(f"  {mark}: {scene.title} ({time.monotonic() - started:.1f} s)")
            if failure:
                outcome.failures.append((scene.title, failure))
                if scene.vital or not settings.keep_going:
                    break
            progress.advance(task, scene.seconds)
        outcome.rows = stage.rows
    return outcome


def _play_one(scene: Scene, stage: Stage) -> str:
    try:
        scene.play(stage)
    except DemoError as error:
        return str(error)
    return ""
