"""Two caches that decode in turns: what the host does beside them falls on both alike.

A long answer takes a minute, and a shared host is not the same a minute later: the same two caches, one after the
other, were 0.82 and 1.07 of each other on one machine. Here each decodes a few tokens, waits for the device, and lets
the other go on, in threads of one process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import LogitsProcessor

_T = TypeVar("_T")


class Turns:
    """Whose turn it is among `count` players. Who has left is passed over; nobody waits longer than `most_s`."""

    def __init__(self, count: int, most_s: float) -> None:
        self._playing = list(range(count))
        self._most_s = most_s
        self._condition = threading.Condition()

    def wait(self, player: int) -> None:
        """Until it is this player's turn. Raises TimeoutError."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._playing[0] == player, self._most_s):
                raise TimeoutError(f"no turn within {self._most_s:g} s: another cache hangs")

    def pass_on(self, player: int) -> None:
        """The next one's turn."""
        with self._condition:
            if self._playing[0] == player:
                self._playing.append(self._playing.pop(0))
            self._condition.notify_all()

    def leave(self, player: int) -> None:
        """Takes a player out, whoever's turn it is."""
        with self._condition:
            if player in self._playing:
                self._playing.remove(player)
            self._condition.notify_all()


class TurnClock(LogitsProcessor):
    """Passes the turn on behind every `chunk` tokens of one generate(), and adds up the time of its own turns.

    `chunks_ms` has the time of each turn, from when it began until the device had done all of it.
    """

    def __init__(self, turns: Turns, player: int, chunk: int, settle: Callable[[], None]) -> None:
        self.chunks_ms: list[float] = []
        self._turns = turns
        self._player = player
        self._chunk = chunk
        self._settle = settle
        self._steps = 0
        self._began = 0.0

    def begin(self) -> None:
        """Waits for the first turn."""
        self._turns.wait(self._player)
        self._began = time.perf_counter()

    def end(self) -> None:
        """The last turn is over."""
        self._note()
        self._turns.leave(self._player)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:  # noqa: ARG002
        self._steps += 1
        if self._steps % self._chunk == 0:
            self._note()
            self._turns.pass_on(self._player)
            self.begin()
        return scores

    def _note(self) -> None:
        self._settle()
        self.chunks_ms.append(1e3 * (time.perf_counter() - self._began))


def in_turns(plays: Sequence[Callable[[TurnClock], _T]], clocks: Sequence[TurnClock], turns: Turns) -> list[_T]:
    """Runs each play in a thread of its own with its clock; their results. Raises what the first of them raised."""
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def run(player: int) -> None:
        clock = clocks[player]
        try:
            clock.begin()
            results[player] = plays[player](clock)
            clock.end()
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            errors.append(error)
        finally:
            turns.leave(player)

    threads = [threading.Thread(target=run, args=(player,), name=f"turn-{player}") for player in range(len(plays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[player] for player in range(len(plays))]
