"""The scenes of the demo, in order. Each measures one thing and leaves rows on the stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.demo.scenes import equality, faults, outage, sharing, speed
from kvstore.demo.stage import Stage


@dataclass(frozen=True, slots=True)
class Scene:
    """`seconds` is about how long it takes with SmolLM2 on two cores: the progress bar's measure, nothing else."""

    title: str
    play: Callable[[Stage], None]
    seconds: int
    full_only: bool = False
    # Without it there is nothing to go on with.
    vital: bool = False


SCENES: tuple[Scene, ...] = (
    # Needs neither the service nor a worker, and what others compute would be in its figures.
    Scene("look-ups over the socket", speed.look_ups, 5),
    Scene("start the service and two workers", sharing.start, 20, vital=True),
    Scene("worker A cold, worker B warm", sharing.first_tokens, 22),
    Scene("kill worker A, worker C is still warm", sharing.kill_and_return, 14),
    Scene("a second, different model on the same service", sharing.second_model, 8),
    Scene("texts against the native cache", equality.texts_equal, 20),
    Scene("a batch with different padding", equality.batch, 8),
    Scene("two workers cold at the same moment", equality.same_moment, 6),
    Scene("cold prompts beside the native cache", speed.cold_pairs, 20),
    Scene("decode beside the native cache", speed.decode_pairs, 14),
    Scene("the server stopped while workers decode", speed.stopped_server, 60, full_only=True),
    Scene("kill -9 in mid-write and in mid-read", faults.kills, 40, full_only=True),
    Scene("a worker stopped for 30 s under eviction", faults.stopped_worker, 80, full_only=True),
    Scene("four threads on one model", faults.threads, 30, full_only=True),
    Scene("service absent, killed, full", outage.outages, 60, full_only=True),
)
