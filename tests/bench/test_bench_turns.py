"""Caches that decode in turns: order, times, and what happens when one of them fails."""

import time

import pytest
import torch

from kvstore.bench.turns import TurnClock, Turns, in_turns


def play(log, name, steps, pause_s=0.0, fails_at=None):
    def answer(clock):
        for step in range(steps):
            if step == fails_at:
                raise ValueError(name)
            time.sleep(pause_s)
            log.append(name)
            clock(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 4))
        return name

    return answer


def clocks_of(turns, count, chunk):
    return [TurnClock(turns, player, chunk, lambda: None) for player in range(count)]


@pytest.mark.parametrize(("chunk", "order"), [(1, "ababab"), (2, "aabbab"), (5, "aaabbb")])
def test_each_has_a_chunk_in_turn(chunk, order):
    log, turns = [], Turns(2, 10)
    clocks = clocks_of(turns, 2, chunk)
    assert in_turns([play(log, "a", 3), play(log, "b", 3)], clocks, turns) == ["a", "b"]
    assert "".join(log) == order


def test_the_longer_one_goes_on_alone_and_only_own_turns_count():
    log, turns = [], Turns(2, 10)
    clocks = clocks_of(turns, 2, 2)
    in_turns([play(log, "a", 2), play(log, "b", 6, pause_s=0.02)], clocks, turns)
    assert "".join(log) == "aabbbbbb"
    assert [len(clock.chunks_ms) for clock in clocks] == [2, 4]
    assert sum(clocks[1].chunks_ms) >= 120
    assert sum(clocks[0].chunks_ms) < 100, "the other's time"


def test_one_that_fails_leaves_the_others_and_is_raised():
    log, turns = [], Turns(2, 10)
    with pytest.raises(ValueError, match="b"):
        in_turns([play(log, "a", 4), play(log, "b", 4, fails_at=2)], clocks_of(turns, 2, 1), turns)
    assert "".join(log) == "ababaa"


def test_one_that_hangs_is_not_waited_for_for_ever():
    turns = Turns(2, 0.05)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        in_turns([play([], "a", 1, pause_s=0.5), play([], "b", 1)], clocks_of(turns, 2, 1), turns)
