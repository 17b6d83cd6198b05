"""What all tests share: a list, at the end, of what a run left out."""

import os

import pytest

# Before any test imports transformers or a tokenizer: no network, no thread pools of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_left_out: list[str] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.extend(item.nodeid for item in items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section(f"left to `make test-all` (slow) or to a GPU: {len(_left_out)}")
        for nodeid in sorted(_left_out):
            terminalreporter.write_line(nodeid)
