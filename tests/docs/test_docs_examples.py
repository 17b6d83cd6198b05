"""Examples of the documents run as they stand: python blocks after the mark `<!-- runnable -->`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{path.relative_to(ROOT).as_posix()}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(EXAMPLE.findall(path.read_text()))
]


def test_there_is_an_example_for_a_worker() -> None:
    """b171: the quick start gives a hit (the example asserts it)."""
    assert any("README.md" in str(example.id) for example in EXAMPLES)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path) -> None:
    """b219: the documented example runs on the installed versions."""
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "reused" in done.stdout
