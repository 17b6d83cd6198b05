"""What the options of `kvstore fidelity` say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore_kernels import layout as block_layout

VARIANTS = ("plain", "bias", "scaled")
# Of the first window, for the errors of layers: the K and V of all layers are held at once.
PROBE_TOKENS = 1024
PROMPT_TOKENS = 512
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)
NEEDLE_ANSWER_TOKENS = 16


def registered_codecs() -> tuple[str, ...]:
    """Names of the codecs that this version has."""
    return tuple(block_layout.CODECS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    `text_file` None: the demo's text. `greedy`: tokens, 0 for none. `max_minutes`: of all variants together.
    """

    folder: Path
    text_file: Path | None
    codecs: tuple[str, ...]
    variants: tuple[str, ...]
    tokens: int
    window: int
    device: str
    peers: bool
    greedy: int
    needle: bool
    max_minutes: float

    @property
    def model_name(self) -> str:
        """What the model is called in rows: its folder's name, without where it lies."""
        return self.folder.resolve().name

    @property
    def windows(self) -> int:
        """Whole windows in `tokens`."""
        return self.tokens // self.window

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that is continued greedily."""
        return min(PROMPT_TOKENS, self.window // 2)
