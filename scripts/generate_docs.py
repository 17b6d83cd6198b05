"""Writes the generated parts of the documents: tables from the results files and from code.

`python scripts/generate_docs.py` writes; with `--check` it only says whether something is out of date (exit code 1).
Generated parts stand between `<!-- name:begin -->` and `<!-- name:end -->`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "demo.json"
SEED_RESULTS = ROOT / "benchmarks" / "results" / "seed.json"
FIDELITY_RESULTS = ROOT / "benchmarks" / "results" / "fidelity.json"
REPORTS = ROOT / "docs" / "field-reports.tsv"
# Also at the end of a name: test_..._b001.
_REPORT_ID = re.compile(r"(?<![A-Za-z0-9])b\d{3}(?![A-Za-z0-9])")


def demo_table(results: dict[str, Any] | None) -> str:
    """The README's table: who answered how soon, bytes, claims."""
    from kvstore.demo import report

    if results is None:
        return "(No results yet: `make bench` writes them.)"
    rows = results["rows"]
    versions = results["versions"]
    origin = (
        f"Measured by `{results['command']}` on {results['device']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, fp32, {results['created'][:10]}."
    )
    parts = [
        origin,
        report.to_markdown(report.SHARING_HEAD, report.sharing_lines(rows)),
        report.to_markdown(report.BYTES_HEAD, report.bytes_lines(rows)),
        report.to_markdown(report.CLAIMS_HEAD, report.claim_lines(results["claims"])),
    ]
    return "\n\n".join(parts)


def seed_table(results: dict[str, Any] | None) -> str:
    """The tables of `kvstore bench seed`: runs, memory by process, claims, what was left out."""
    from kvstore.bench import report
    from kvstore.demo.report import CLAIMS_HEAD, claim_lines, to_markdown

    if results is None:
        return "(No results yet: `kvstore bench seed --json benchmarks/results/seed.json` writes them.)"
    rows, versions = results["rows"], results["versions"]
    origin = (
        f"Measured by `{results['command']}` on {results['device']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, triton {versions['triton']}, {results['created'][:10]}."
    )
    tables = (
        (CLAIMS_HEAD, claim_lines(results["claims"])),
        (report.RUNS_HEAD, report.run_lines(rows)),
        (report.TURNS_HEAD, report.turn_lines(rows)),
        (report.DRIVER_HEAD, report.driver_lines(rows)),
        (report.LEFT_OUT_HEAD, report.left_out_lines(rows)),
    )
    return "\n\n".join([origin, *(to_markdown(head, lines) for head, lines in tables if lines)])


def fidelity_table(results: dict[str, Any] | None) -> str:
    """The tables of `kvstore fidelity`: claims, every cache on every variant, texts, what was left out."""
    from kvstore.demo.report import CLAIMS_HEAD, claim_lines, to_markdown
    from kvstore.fidelity.report import tables

    if results is None:
        return "(No results yet: `kvstore fidelity --needle --json benchmarks/results/fidelity.json` writes them.)"
    rows, versions = results["rows"], results["versions"]
    model = next(row for row in rows if row["measure"] == "model")
    origin = (
        f"Measured by `{results['command']}` on {results['device']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, fp32, {results['created'][:10]}. Model: {model['model']}; text: {model['text']}, "
        f"{model['windows']} windows of {model['window']} tokens."
    )
    parts = [origin, to_markdown(CLAIMS_HEAD, claim_lines(results["claims"]))]
    parts += [f"{title}:\n\n{to_markdown(head, lines)}" for title, head, lines in tables(rows)]
    return "\n\n".join(parts)


def serve_options() -> str:
    """Options of `kvstore serve` from the command itself."""
    import typer.main

    from kvstore.cli import build

    command: Any = typer.main.get_command(build())
    lines = []
    for option in command.commands["serve"].params:
        if option.name in ("help", "ready_fd", "exit_with_parent"):
            continue
        flag = option.opts[0] + (f" {option.metavar}" if option.metavar else "")
        lines.append([f"`{flag}`", f"`KVSTORE_{option.name.upper()}`", option.help or ""])
    return _markdown(["option", "variable", "what"], lines)


def metrics_table() -> str:
    """Every metric of the service."""
    from kvstore.metrics.catalog import rows

    lines = [
        [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), meaning]
        for name, kind, labels, meaning in rows()
    ]
    return _markdown(["metric", "type", "labels", "meaning"], lines)


def client_settings() -> str:
    """Fields of ClientConfig with their defaults and attribute docstrings."""
    from kvstore_client import config

    notes = _attribute_docs(inspect.getsource(config.ClientConfig))
    lines = [
        [
            f"`{field.name}`",
            f"`{config.ENV_PREFIX}{field.name.upper()}`",
            f"`{field.default!r}`",
            notes.get(field.name, ""),
        ]
        for field in dataclasses.fields(config.ClientConfig)
    ]
    return _markdown(["field", "variable", "default", "what"], lines)


def field_reports() -> str:
    """Every report with the tests that name it, else where it will be taken up."""
    tests: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for report_id in _REPORT_ID.findall(path.read_text()):
            tests.setdefault(report_id, set()).add(path.relative_to(ROOT).as_posix())
    lines = []
    for line in REPORTS.read_text().splitlines():
        report_id, what, later = line.split("\t")
        shown = ", ".join(f"`{name}`" for name in sorted(tests.get(report_id, ())))
        lines.append([report_id, what, shown or later])
    return _markdown(["id", "what went wrong elsewhere", "here"], lines)


def fill(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`. ValueError when they are missing."""
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"markers of {name!r} are missing: expected <!-- {name}:begin --> and <!-- {name}:end -->")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def generate() -> dict[Path, str]:
    """What each document should say."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    seed = json.loads(SEED_RESULTS.read_text()) if SEED_RESULTS.exists() else None
    fidelity = json.loads(FIDELITY_RESULTS.read_text()) if FIDELITY_RESULTS.exists() else None
    parts: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("README.md", "demo", lambda: demo_table(results)),
        ("docs/gpu.md", "seed", lambda: seed_table(seed)),
        ("docs/fidelity.md", "fidelity", lambda: fidelity_table(fidelity)),
        ("docs/configuration.md", "serve", serve_options),
        ("docs/metrics.md", "metrics", metrics_table),
        ("docs/configuration.md", "client", client_settings),
        ("docs/field-reports.md", "reports", field_reports),
    )
    documents: dict[Path, str] = {}
    for name, marker, make in parts:
        path = ROOT / name
        documents[path] = fill(documents.get(path) or path.read_text(), marker, make())
    return documents


def main(arguments: Sequence[str]) -> int:
    """Writes, or with --check compares."""
    stale = [(path, text) for path, text in generate().items() if path.read_text() != text]
    for path, text in stale:
        print(f"{'out of date' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.write_text(text)
    return 1 if stale and "--check" in arguments else 0


def _attribute_docs(source: str) -> dict[str, str]:
    """The string literals below the fields of a class; a string below several fields counts for all of them."""
    found: dict[str, str] = {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, note in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(note, ast.Expr)
            and isinstance(note.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(note.value.value).split())
    return found


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    from kvstore.demo.report import to_markdown

    return to_markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
