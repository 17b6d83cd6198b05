"""What the GPU's driver says, asked with nvidia-smi: no CUDA context in the asking process."""

from __future__ import annotations

import csv
import io
import subprocess

from kvstore.demo.errors import DemoError

_SMI_S = 10.0
MIB = 2**20


def gpu_processes() -> dict[int, int | None]:
    """GPU memory in bytes by pid, over all GPUs, as the driver counts it; None where it doesn't say.

    DemoError, with the reason, where the driver can't be asked.
    """
    rows = _smi("--query-compute-apps=pid,used_memory")
    found: dict[int, int | None] = {}
    for pid, used in rows:
        mib = int(used) if used.isdigit() else None
        found[int(pid)] = None if mib is None else (found.get(int(pid)) or 0) + mib * MIB
    return found


def gpu_name(device: str) -> str:
    """Name and driver of a CUDA device, for the results; "unknown GPU" where nobody says."""
    index = device.partition(":")[2] or "0"
    try:
        rows = _smi("--query-gpu=name,driver_version,memory.total", "-i", index)
    except DemoError:
        return "unknown GPU"
    return f"{rows[0][0]}, driver {rows[0][1]}, {rows[0][2]} MiB" if rows else "unknown GPU"


def _smi(*query: str) -> list[list[str]]:
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoError(f"the driver can't be asked: {error}") from None
    if done.returncode:
        raise DemoError(f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200]}")
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(done.stdout)) if row]
