"""When two greedy texts count as equal: design rule for lossless runs, as one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIE = 1e-4
"""Logit gap between the two best tokens below which either may win: another order of the same sums flips it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first_difference`: index of the first token that differs, or None. `gap`: the reference's top-2 gap there."""

    equal: bool
    first_difference: int | None
    gap: float | None

    def describe(self) -> str:
        """For a table."""
        if self.first_difference is None:
            return "equal"
        tie = " (tie)" if self.equal else ""
        gap = "" if self.gap is None else f", gap {self.gap:.1e}"
        return f"differs at token {self.first_difference}{gap}{tie}"


def compare_tokens(reference: Sequence[int], other: Sequence[int], gaps: Sequence[float] = ()) -> Comparison:
    """Compares generated tokens. `gaps[i]` is the reference's top-2 logit gap when it chose token i (may be missing).

    A difference at a gap below TIE does not count, and neither does what follows it. A text that ends early differs
    where it ends.
    """
    for index in range(max(len(reference), len(other))):
        left = reference[index] if index < len(reference) else None
        right = other[index] if index < len(other) else None
        if left != right:
            gap = gaps[index] if index < len(gaps) else None
            return Comparison(gap is not None and gap < TIE, index, gap)
    return Comparison(True, None, None)
