"""The sections of the benchmark, in order: what claims need comes first.

Each measures one thing and leaves rows on the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.bench.sections import fidelity, mappings, placement, runs, turns, workers
from kvstore.bench.stage import Stage


@dataclass(frozen=True, slots=True)
class Section:
    """`name` is what --only takes. `launch` starts its workers, so that all load at the same moment, before anything is
    measured.
    """

    name: str
    title: str
    launch: Callable[[Stage], None]
    play: Callable[[Stage], None]


SECTIONS: tuple[Section, ...] = (
    Section("runs", "the runs, ours beside DynamicCache", runs.launcher("main"), runs.play),
    Section("turns", "the long answer, ours and DynamicCache in turns", turns.launch, turns.play),
    Section("workers", "a second worker with the same prompt", workers.launch, workers.play),
    Section("placement", "blocks in host memory, computing on the device", workers.launch, placement.play),
    Section("fidelity", "int8 on a real text: this device against the CPU", fidelity.launch, fidelity.play),
    Section("mappings", "the same bytes in another process; read-only mappings", mappings.launch, mappings.play),
    Section(
        "embedded",
        "the runs, ours with the service in the worker's process",
        runs.launcher("embedded"),
        runs.play_embedded,
    ),
    Section("peers", "the runs, transformers' other caches", runs.launcher("peers"), runs.play_peers),
)
NAMES = tuple(section.name for section in SECTIONS)
