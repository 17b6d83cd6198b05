"""Converts the demo's model once, in a process of its own: torch and the weights leave with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.demo import models
from kvstore.demo.errors import DemoError

_CONVERT_S = 600


def converted_model(say: Callable[[str], None]) -> Path:
    """Folder of the converted model; converts it where that isn't done yet, and says so. DemoError."""
    source = models.find_gguf()
    target = models.converted_folder(source, models.cache_folder())
    if not models.is_complete(target):
        say(f"converting the model to {target} (once, about half a minute)")
        command = [sys.executable, "-m", "kvstore.demo.models", str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_S, check=False)
        if done.returncode or not models.is_complete(target):
            lines = done.stderr.strip().splitlines()
            raise DemoError(f"the model could not be converted to {target}: {lines[-1] if lines else done.returncode}")
    return target
