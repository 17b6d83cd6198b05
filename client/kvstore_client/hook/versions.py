"""Which transformers versions the hook works with."""

from __future__ import annotations

import transformers

from kvstore_client.hook.errors import UnsupportedVersionError

LOWEST = (5, 16, 1)
"""First version that works."""
BELOW = (5, 20)
"""First version that doesn't."""
RANGE = ">=5.16.1,<5.20"


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit()) if part[:1].isdigit() else ""
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_transformers(version: str | None = None) -> None:
    """Raises UnsupportedVersionError, naming the range, unless `version` (default: the installed one) is inside it."""
    found = transformers.__version__ if version is None else version
    numbers = _numbers(found)
    if not numbers >= LOWEST or numbers[: len(BELOW)] >= BELOW:
        raise UnsupportedVersionError(
            f"transformers {found} is installed; this version of gpu-kvstore works with transformers{RANGE}. "
            f"Install one of those: pip install 'transformers{RANGE}'"
        )
