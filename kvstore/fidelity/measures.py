"""How far two runs of one text are apart, and the runs: logits of a window, pass by pass or at once."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kvstore_client.hook.step import MAX_DECODE_TOKENS

from kvstore.demo.claims import percentile

# Log-probabilities are made in float64, so many positions at a time.
_ROWS = 64


class Divergence:
    """Collects KL(reference ‖ found), equal best tokens and both log-likelihoods over positions.

    Invariants: one entry a position in `_kl` and `_equal`; `_surprise` has one a position with a next token, for the
    reference and for what was found. Plain numbers: small tensors kept among large ones that come and go would take
    the heap apart.
    """

    def __init__(self) -> None:
        self._kl = array("d")
        self._equal = 0
        self._surprise = (array("d"), array("d"))

    @property
    def positions(self) -> int:
        """How many were compared."""
        return len(self._kl)

    def add(self, reference: torch.Tensor, found: torch.Tensor, following: torch.Tensor) -> None:
        """Logits [n, vocabulary] of n positions, and the tokens that follow them, int64 [n] or shorter: the last
        positions of a window are followed by nothing.
        """
        for first in range(0, len(reference), _ROWS):
            rows = slice(first, first + _ROWS)
            theirs, ours = (logits[rows].double().log_softmax(-1) for logits in (reference, found))
            # What is impossible in the reference counts nothing: 0 · log 0 = 0.
            terms = torch.where(theirs == -math.inf, 0.0, theirs.exp() * (theirs - ours))
            self._kl.extend(terms.sum(-1).tolist())
            self._equal += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
            known = following[rows].to(theirs.device)[:, None]
            for target, logs in zip(self._surprise, (theirs, ours), strict=True):
                target.extend((-logs[: len(known)].gather(1, known)[:, 0]).tolist())

    def summary(self) -> dict[str, Any]:
        """Figures for a row. KL in nats, `top1` a share, `perplexity_change` relative. ValueError without positions."""
        count = self.positions
        if not count:
            raise ValueError("no positions were compared")
        # torch's exp has no overflow error.
        means = torch.tensor([math.fsum(each) / len(each) for each in self._surprise], dtype=torch.float64)
        reference, found = means.exp().tolist()
        return {
            "positions": count,
            "kl_mean": math.fsum(self._kl) / count,
            "kl_p99": percentile(self._kl, 0.99),
            "kl_max": max(self._kl),
            "top1": self._equal / count,
            "perplexity": found,
            "native_perplexity": reference,
            "perplexity_change": found / reference - 1,
        }


def compare(target: Divergence, reference: Iterable[torch.Tensor], found: Iterable[torch.Tensor], ids: Any) -> None:
    """Adds a window to `target`: both are the logits of positions 0, 1, … in passes of any cut, the same for both.

    The first position is left out: nothing but itself is attended there.
    """
    at = 0
    for theirs, ours in zip(reference, found, strict=True):
        skip = 1 if at == 0 else 0
        following = ids[0, at + skip + 1 : at + len(theirs) + 1]
        if len(theirs) > skip:
            target.add(theirs[skip:], ours[skip:], following)
        at += len(theirs)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a window is cut into passes: `begin` tokens, which attend on each other as they are, then `size` a pass."""

    begin: int
    size: int

    def places(self, tokens: int) -> list[tuple[int, int]]:
        """First and last of each pass over a window."""
        return list(itertools.pairwise([0, *range(self.begin, tokens, self.size), tokens]))


# As an answer is made, many steps at a time: each token attends on codes, its own included.
STEPS = Cut(1, MAX_DECODE_TOKENS)
# As a long prompt is computed in pieces: what a pass computes is exact to itself, all before it is codes.
PROMPT = Cut(64, 64)


@torch.no_grad()
def logits_at_once(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of ids [1, tokens] in one pass without a cache."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def logits_in_passes(model: Any, ids: torch.Tensor, cache: Any, cut: Cut = STEPS) -> Iterator[torch.Tensor]:
    """Logits of each pass of a cut, [pass, vocabulary], through a cache that is empty at the beginning."""
    for first, last in cut.places(ids.shape[1]):
        with torch.no_grad():
            output = model(
                input_ids=ids[:, first:last],
                position_ids=torch.arange(first, last, device=ids.device)[None],
                past_key_values=cache,
                use_cache=True,
            )
        yield output.logits[0]


def split(logits: torch.Tensor, cut: Cut = STEPS) -> Iterator[torch.Tensor]:
    """Logits of a window as `logits_in_passes` would give them."""
    return (logits[first:last] for first, last in cut.places(len(logits)))
