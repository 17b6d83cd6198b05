"""The results file: raw rows, claims and where they come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstore.demo.claims import Row, claims_from
from kvstore.demo.driver import gpu_name
from kvstore.demo.errors import OptionError

_PACKAGES = ("gpu-kvstore", "torch", "transformers", "grpcio", "protobuf", "numpy")


def make_results(rows: Sequence[Row], *, device: str, command: str, created: datetime | None = None) -> dict[str, Any]:
    """Everything a reader needs to judge the figures. `created` is a time in UTC (default: now)."""
    return {
        "name": "demo",
        "device": describe_device(device),
        "versions": package_versions(),
        "commit": checkout_commit(),
        "created": (created or datetime.now(UTC)).isoformat(timespec="seconds"),
        "command": command,
        "rows": list(rows),
        "claims": [claim.to_json() for claim in claims_from(rows)],
    }


def write_json(results: dict[str, Any], target: Path) -> None:
    """Writes the file in one step: a reader sees the old one or the new one."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(target: Path, option: str, suffixes: Sequence[str]) -> None:
    """Refuses a target that can't be written, before minutes of measuring. OptionError."""
    if target.suffix.lower() not in suffixes:
        raise OptionError(f"{option} {target}: expected a file name that ends with {' or '.join(suffixes)}")
    if target.is_dir():
        raise OptionError(f"{option} {target}: that is a folder, expected a file")
    if not target.parent.is_dir():
        raise OptionError(f"{option} {target}: the folder {target.parent} does not exist; make it first")
    if not os.access(target.parent, os.W_OK):
        raise OptionError(f"{option} {target}: the folder {target.parent} is not writable")


def describe_device(device: str) -> str:
    """The device in words: what a figure depends on, without names of this machine."""
    cores = f"{os.cpu_count()} cores, {_cpu_model()}"
    return f"cpu, {cores}" if device == "cpu" else f"{device}, {gpu_name(device)}; host: {cores}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def package_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on; `more` names further ones."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def checkout_commit() -> str:
    """The checkout's commit, with "+changes" when files differ from it; "unknown" outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return "unknown"
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
