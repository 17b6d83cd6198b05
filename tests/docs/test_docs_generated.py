"""Generated parts of the documents are current, claims follow from rows, links and named tests exist."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.demo.claims import claims_from

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "results" / "README.md"]
REPORT_ID = re.compile(r"\bb\d{3}\b")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generator: ModuleType) -> None:
    """b187: documented defaults and measured figures are those of the code and the results file."""
    stale = [str(path.relative_to(ROOT)) for path, text in generator.generate().items() if path.read_text() != text]
    assert stale == [], "run python scripts/generate_docs.py"


def test_fill_replaces_only_its_own_part(generator: ModuleType) -> None:
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin -->\nkept\n<!-- y:end -->\n"
    filled = generator.fill(text, "x", r"new \1")
    assert filled == text.replace("old", r"new \1")
    assert generator.fill(filled, "x", "old") == text


def test_fill_without_markers_says_which(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"'x' are missing"):
        generator.fill("nothing here", "x", "new")


def test_claims_of_the_results_file_follow_from_its_rows() -> None:
    path = ROOT / "benchmarks" / "results" / "demo.json"
    if not path.exists():
        pytest.skip("no results file yet: make bench")
    results = json.loads(path.read_text())
    assert results["claims"] == [claim.to_json() for claim in claims_from(results["rows"])]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_test_files_exist(path: Path) -> None:
    for name in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", path.read_text()):
        assert (ROOT / name).exists(), name


def test_every_report_named_in_a_test_is_in_the_table() -> None:
    known = {line.split("\t")[0] for line in (ROOT / "docs" / "field-reports.tsv").read_text().splitlines()}
    for path in (ROOT / "tests").rglob("*.py"):
        unknown = set(REPORT_ID.findall(path.read_text())) - known
        assert unknown == set(), path


def test_every_report_has_a_place() -> None:
    for line in (ROOT / "docs" / "field-reports.tsv").read_text().splitlines():
        report_id, what, later = line.split("\t")
        assert REPORT_ID.fullmatch(report_id)
        assert what
        assert later
