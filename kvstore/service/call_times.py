"""How long calls took. Plain numbers, so that an observation costs a look-up and three additions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds in seconds; a last bucket without a bound follows.
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Times:
    """Calls of one method with one outcome. `buckets[i]` counts those up to BOUNDS_S[i], each call in one bucket."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0


class CallTimes:
    """Times by (method, name of the gRPC code)."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], Times] = {}

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one call."""
        times = self.times.get((method, code))
        if times is None:
            times = self.times[method, code] = Times()
        times.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        times.seconds += seconds
