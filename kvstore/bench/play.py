"""Plays the sections: what happens when one fails, what is left afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console

from kvstore.bench.sections import SECTIONS, Section
from kvstore.bench.stage import Settings, Stage
from kvstore.demo.claims import Row
from kvstore.demo.errors import DemoError
from kvstore.demo.program import terminate_is_interrupt


def play(
    settings: Settings, only: Sequence[str], console: Console, keep: Callable[[list[Row]], None] = lambda _: None
) -> list[Row]:
    """Plays the sections named in `only` and returns their rows. A section that fails is a row; the next one goes on.
    Every process it starts is gone when it returns or raises. `keep` gets all rows so far, now and then.
    """
    with (
        terminate_is_interrupt(),
        Stage(settings, lambda text: console.print(f"  {text}", markup=False), keep) as stage,
    ):
        chosen = [section for section in SECTIONS if section.name in only]
        _load_all(stage, chosen)
        for section in chosen:
            if stage.out_of_time(section.title):
                continue
            started = time.monotonic()
            console.print(f"{section.title} ...")
            try:
                section.play(stage)
            except DemoError as error:
                stage.fail(section.name, error)
                stage.add("section-failed", section=section.name, error=str(error))
                for name in list(stage.workers):
                    stage.recover(name, error)
            seconds = time.monotonic() - started
            stage.add("section", section=section.name, seconds=seconds)
            console.print(f"  {seconds:.1f} s")
            stage.save()
        return stage.rows


def _load_all(stage: Stage, sections: Sequence[Section]) -> None:
    """All workers at the same moment. One that fails is started again, and reported, by the section that needs it."""
    for section in sections:
        section.launch(stage)
    for name in list(stage.workers):
        try:
            stage.worker(name)
        except DemoError as error:
            stage.fail(f"worker {name}", error)
            stage.end_worker(name)
