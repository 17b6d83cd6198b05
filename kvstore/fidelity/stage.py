"""What the parts of a measurement share: settings, rows, progress, and when to begin nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.progress import Progress, TaskID

from kvstore.demo.claims import Row
from kvstore.fidelity.settings import NEEDLE_DEPTHS, PROBE_TOKENS, Settings

# Cost of a token by what is done with it, relative to a pass of a codec of ours; for the time that is left.
_AT_ONCE, _IN_PASSES, _CODEC, _PEER, _OWN_CACHE, _LAYER, _STEP = 0.4, 0.8, 1.0, 0.4, 2.0, 0.05, 6.0


class Stage:
    """Rows, progress and deadlines.

    Invariants: `rows` grows only; a variant may use an equal share of the time that was left when it began.
    """

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        peers: int,
        caches: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self._progress = progress
        self._clock = clock
        self._peers, self._caches = peers, caches
        self._deadline = clock() + 60 * settings.max_minutes
        self._variants_left = len(settings.variants)
        self._share = self._deadline
        self._task: TaskID = progress.add_task("loading", total=len(settings.variants) * self._cost_of_variant())
        self._done_variants = 0

    def begin_variant(self, name: str) -> None:
        """Starts a variant's share of the time, whatever the one before left undone."""
        now = self._clock()
        self._share = now + max(0.0, self._deadline - now) / max(1, self._variants_left)
        self._variants_left -= 1
        self._progress.update(
            self._task, description=name, completed=self._done_variants * self._cost_of_variant()
        )  # fmt: skip
        self._done_variants += 1

    def doing(self, what: str) -> None:
        """What the progress bar says."""
        self._progress.update(self._task, description=what)

    def done(self, kind: str, tokens: int) -> None:
        """Advances the progress bar: `kind` is what was done with so many tokens."""
        self._progress.advance(self._task, _WEIGHTS[kind] * tokens)

    def out_of_time(self) -> bool:
        """Whether nothing new of this variant should be begun."""
        return self._clock() >= self._share

    @property
    def over(self) -> bool:
        """Whether nothing new at all should be begun."""
        return self._clock() >= self._deadline

    def finish(self) -> None:
        """Everything is done, whatever it cost."""
        self._progress.update(
            self._task, description="done", completed=len(self.settings.variants) * self._cost_of_variant()
        )

    def add(self, measure: str, **fields: Any) -> None:
        """One more row."""
        self.rows.append({"measure": measure, **fields})

    def skip(self, what: str, variant: str, reason: str) -> None:
        """A row that says what was left out and why."""
        self.add("skipped", what=what, variant=variant, reason=reason)

    def fail(self, what: str, variant: str, error: BaseException) -> None:
        """A row with an error's text, which the user sees at once."""
        self.add("failed", what=what, variant=variant, error=f"{type(error).__name__}: {error}")
        self.say(f"failed: {what}, {variant}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        self._progress.console.print(f"  {text}", markup=False, highlight=False)

    def _cost_of_variant(self) -> float:
        settings = self.settings
        codecs = len(settings.codecs)
        tokens = settings.windows * settings.window
        # Each in steps and as a prompt; passthrough in steps, and the native cache so, too.
        cost = tokens * (_AT_ONCE + 2 * codecs * _CODEC + self._peers * _PEER)
        cost += settings.window * self._caches * _OWN_CACHE
        if "passthrough" in settings.codecs:
            cost += tokens * (_IN_PASSES - _CODEC)
        cost += min(PROBE_TOKENS, settings.window) * _LAYER * (codecs + self._peers)
        cost += (codecs + 1) * settings.greedy * _STEP
        if settings.needle:
            cost += (codecs + 1) * len(NEEDLE_DEPTHS) * settings.window * _AT_ONCE
        return cost


_WEIGHTS = {
    "at once": _AT_ONCE,
    "in passes": _IN_PASSES,
    "codec": _CODEC,
    "peer": _PEER,
    "own cache": _OWN_CACHE,
    "layers": _LAYER,
    "step": _STEP,
}
