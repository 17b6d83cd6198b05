"""Where errors add up: a long greedy continuation, and a number to be found in a long text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.demo import texts
from kvstore.demo.claims import Row
from kvstore.demo.compare import compare_tokens

SMALL_GAP = 0.1
_SEED = 20261204
# Tokens that a text may gain where it is cut and put together again.
_SEAMS = 4
_QUESTION = "What is the number of the lighthouse keeper's locker? Answer with the number only."


def agreement(native: Sequence[int], gaps: Sequence[float], found: Sequence[int]) -> Row:
    """Figures of two greedy texts: tokens equal until the first difference, the share equal in place, and how sure the
    native cache was where they part (`gap`: its two best logits' distance there).
    """
    compared = compare_tokens(native, found, gaps)
    first = compared.first_difference
    longest = max(len(native), len(found))
    return {
        "tokens": len(native),
        "equal_until": longest if first is None else first,
        "equal_share": sum(a == b for a, b in zip(native, found, strict=False)) / max(1, longest),
        "first_difference": first,
        "gap": compared.gap,
        "gap_was_small": compared.gap is not None and compared.gap < SMALL_GAP,
    }


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt with a number at a depth (0: the beginning of the text, 1: its end), and the number."""

    depth: float
    number: str
    prompt: tuple[int, ...]

    def found_in(self, answer: str) -> bool:
        """Whether the answer names the number."""
        return self.number in re.findall(r"\d+", answer)


def needles(tokenizer: Any, body: str, depths: Sequence[float], tokens: int) -> list[Needle]:
    """One a depth, `tokens` long at most, in the model's chat template; the sentence stands behind one of the text.

    ValueError when there is no template, when it refuses the messages, and when the prompts are short.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template")
    try:
        return _needles(tokenizer, body, depths, tokens)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses a system and a user message: {error}") from error


def _needles(tokenizer: Any, body: str, depths: Sequence[float], tokens: int) -> list[Needle]:
    drawn = random.Random(_SEED)  # noqa: S311  nothing secret
    made = []
    room = tokens - len(texts.prompt_tokens(tokenizer, _sentence("00000"), _QUESTION)) - _SEAMS
    if room < tokens // 2:
        raise ValueError(f"prompts of {tokens} tokens leave no room for a text")
    ids = tokenizer(body, add_special_tokens=False, verbose=False)["input_ids"][:room]
    text = tokenizer.decode(ids)
    for depth in depths:
        number = str(drawn.randint(10000, 99999))
        place = _end_of_sentence(text, int(depth * len(text)))
        document = f"{text[:place]} {_sentence(number)}{text[place:]}"
        made.append(Needle(depth, number, tuple(texts.prompt_tokens(tokenizer, document, _QUESTION))))
    return made


def _sentence(number: str) -> str:
    return f"The number of the lighthouse keeper's locker is {number}."


def _end_of_sentence(text: str, at: int) -> int:
    found = re.search(r"[.!?](?=\s)", text[at:])
    return at + found.end() if found else len(text)
