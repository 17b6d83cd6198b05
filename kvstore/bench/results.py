"""The results file of `kvstore bench seed`, and several of them made into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstore.bench.claims import claims_from
from kvstore.bench.shapes import SHAPES
from kvstore.demo.claims import Row
from kvstore.demo.errors import OptionError
from kvstore.demo.results import checkout_commit, describe_device, package_versions

_PACKAGES = ("triton", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "hqq")
_SAME = ("name", "shape", "device", "versions", "commit")


def make_results(
    rows: Sequence[Row], *, device: str, shape: str, command: str, commit: str = "", created: datetime | None = None
) -> dict[str, Any]:
    """Everything a reader needs to judge the figures. `commit` where this is no checkout."""
    return {
        "name": "seed",
        "shape": shape,
        "device": describe_device(device),
        "versions": package_versions(_PACKAGES),
        "commit": commit or checkout_commit(),
        "created": (created or datetime.now(UTC)).isoformat(timespec="seconds"),
        "command": command,
        "rows": list(rows),
        "claims": [claim.to_json() for claim in claims_from(rows, SHAPES[shape])],
    }


def read_results(path: Path) -> dict[str, Any]:
    """A results file. OptionError when it is none."""
    try:
        found = json.loads(path.read_text())
        sound = found["name"] == "seed" and found["shape"] in SHAPES and isinstance(found["rows"], list)
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise OptionError(f"--merge {path}: expected a file that `kvstore bench seed --json` wrote")
    return dict(found)


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of several that differ in what they measured only; their rows get a "part". OptionError when device,
    versions or commit differ.
    """
    parts = [read_results(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        different = [key for key in _SAME if part[key] != parts[0][key]]
        if different:
            raise OptionError(f"--merge {path}: {', '.join(different)} differ from {paths[0]}; expected the same")
    rows = [{**row, "part": number} for number, part in enumerate(parts) for row in part["rows"]]
    return {
        **parts[0],
        "created": max(part["created"] for part in parts),
        "command": "; ".join(part["command"] for part in parts),
        "rows": rows,
        "claims": [claim.to_json() for claim in claims_from(rows, SHAPES[parts[0]["shape"]])],
    }
