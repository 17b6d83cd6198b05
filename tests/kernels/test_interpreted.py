"""The CUDA kernels' cases on CPU tensors, in a process of its own: TRITON_INTERPRET counts when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cases",
    [
        "test_device_kernels.py",
        "test_sealed_device.py",
        pytest.param("test_sealed_attention_device.py", marks=pytest.mark.slow),
    ],
)
def test_cases_of_the_device_kernels(cases: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", cases],
        cwd=_HERE,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
