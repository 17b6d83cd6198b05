"""How much memory this process can still touch before the kernel starts to kill.

A memfd is charged page by page to the toucher's control group. Going past the limit ends in the out-of-memory killer or
in SIGBUS, never in an error that could be caught; so it is read before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that can be had and, in words, what limits them."""

    nbytes: int
    limit: str


def memory_headroom(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """The least of MemAvailable and what every control group above this process has left (versions 1 and 2)."""
    found = [Headroom(_meminfo(proc / "meminfo", "MemAvailable"), "MemAvailable of the machine")]
    return min([*found, *_control_groups(proc, cgroups)], key=lambda headroom: headroom.nbytes)


def _control_groups(proc: Path, cgroups: Path, *, total: bool = False) -> list[Headroom]:
    found: list[Headroom] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _groups(cgroups, group, "memory.max", "memory.current", total=total)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _groups(cgroups / "memory", group, *names, total=total)
    return found


def memory_total(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """The least of MemTotal and the limit of every control group above this process: never more, whatever is free."""
    found = [Headroom(_meminfo(proc / "meminfo", "MemTotal"), "MemTotal of the machine")]
    return min([*found, *_control_groups(proc, cgroups, total=True)], key=lambda headroom: headroom.nbytes)


def _meminfo(meminfo: Path, name: str) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line {name}: expected a Linux kernel since 3.14")


def _groups(root: Path, group: str, limit_name: str, usage_name: str, *, total: bool) -> list[Headroom]:
    """One entry for each control group from the process's own up to the root that has a limit."""
    found = []
    # Inside a container the path may name a group of the host that is not visible here; then only the root is read.
    inner = PurePosixPath(group.lstrip("/"))
    for path in [inner, *inner.parents]:
        folder = root / path
        limit = _number(folder / limit_name)
        usage = _number(folder / usage_name)
        if limit is not None and usage is not None:
            free = limit if total else max(0, limit - usage + _reclaimable(folder / "memory.stat"))
            found.append(Headroom(free, f"the limit of {limit} bytes on control group {group}"))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Bytes of clean page cache, which count as used but give way."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
