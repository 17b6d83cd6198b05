"""What is run: shapes of models, and runs of so many tokens in and out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvstore.demo.errors import OptionError

_RUN = re.compile(r"(\d+)x(\d+)x(\d+)")
# Prompts and answers of the runs in the table, as BATCHxTOKENS_INxTOKENS_OUT.
SEED_RUNS = ("1x1x2048", "1x10000x1", "1x20000x1", "1x60000x1", "1x10000x2048", "8x10000x32")
TINY_RUNS = ("1x1x96", "1x200x1", "1x400x1", "1x1200x1", "1x200x12", "2x200x4")
# An answer this long is run once: it is an average over its own tokens.
_LONG_OUT = 512


@dataclass(frozen=True, slots=True)
class Run:
    """`batch` prompts of `tokens_in` fresh random tokens, `tokens_out` new tokens each."""

    batch: int
    tokens_in: int
    tokens_out: int

    @property
    def name(self) -> str:
        """As in options and rows."""
        return f"{self.batch}x{self.tokens_in}x{self.tokens_out}"

    @property
    def long(self) -> bool:
        """Whether one run is an average of many steps already."""
        return self.tokens_out >= _LONG_OUT

    @property
    def one_answer(self) -> bool:
        """Whether it is about decoding: one answer, longer than its prompt."""
        return self.batch == 1 and self.tokens_out > self.tokens_in

    @property
    def warm_up(self) -> Run:
        """What runs before it, unmeasured: the same prompt length, and over a block's end where the answer is long."""
        return Run(self.batch, self.tokens_in, min(self.tokens_out, 72))


def parse_runs(text: str) -> list[Run]:
    """Runs from "1x10000x1,8x10000x32". OptionError."""
    return [parse_run(part) for part in text.split(",") if part]


def parse_run(text: str) -> Run:
    """One run. OptionError."""
    match = _RUN.fullmatch(text)
    numbers = [int(part) for part in match.groups()] if match else [0]
    if not match or min(numbers) < 1 or max(numbers) > 1_000_000:
        raise OptionError(f"--runs {text}: expected BATCHxTOKENS_INxTOKENS_OUT, for example 1x10000x1")
    return Run(*numbers)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen2 with random weights. `runs` are its runs; `history` and `longest` the prompts that workers share."""

    name: str
    layers: int
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    dtype: str
    runs: tuple[str, ...]
    history: int
    longest: int
    steps: int

    def config(self) -> dict[str, Any]:
        """Arguments for transformers.Qwen2Config."""
        return {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "attn_implementation": "sdpa",
        }

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of so many tokens at 2 bytes a number."""
        return 2 * 2 * self.layers * self.hidden * tokens


SHAPES: dict[str, ModelShape] = {
    # Qwen-1.8B: 24 layers, 16 heads of 128.
    "seed": ModelShape(
        "seed", 24, 16, 2048, 5504, 151936, 65536, "bfloat16", SEED_RUNS, history=10000, longest=60000, steps=32
    ),
    # All code paths in seconds, on a CPU; its speeds say nothing.
    "tiny": ModelShape("tiny", 2, 2, 256, 256, 512, 8192, "float32", TINY_RUNS, history=200, longest=1200, steps=6),
}
