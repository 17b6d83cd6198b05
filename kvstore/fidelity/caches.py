"""Transformers' own quantized caches, run as they are."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

_GROUP = 64
_SCALE_AND_ZERO_BITS = 32
RESIDUAL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class OwnCache:
    """One of them. `needs` is the module that its backend imports, `package` what to install for it."""

    backend: str
    nbits: int
    needs: str
    package: str

    @property
    def name(self) -> str:
        """For rows."""
        return f"transformers {self.backend} {self.nbits} bit"

    @property
    def bits(self) -> float:
        """Bits a number of what is quantized: its newest tokens, up to RESIDUAL_TOKENS, are exact beside it."""
        return self.nbits + _SCALE_AND_ZERO_BITS / _GROUP

    def why_not(self) -> str:
        """Why it can't be run here; empty when it can."""
        if _importable(self.needs):
            return ""
        return f"not installed: pip install {self.package}"

    def make(self, config: Any) -> Any:
        """An empty cache."""
        from transformers import QuantizedCache

        make: Any = QuantizedCache
        return make(
            backend=self.backend,
            config=config,
            nbits=self.nbits,
            axis_key=self._axis,
            axis_value=self._axis,
            q_group_size=_GROUP,
            residual_length=RESIDUAL_TOKENS,
        )

    @property
    def _axis(self) -> int:
        # What the backend takes: along tokens and channels of a head together.
        return 0 if self.backend == "quanto" else 1


def own_caches() -> list[OwnCache]:
    """All that a table shows, most bits first."""
    return [
        OwnCache("hqq", 8, "hqq.core.quantize", "hqq"),
        OwnCache("hqq", 4, "hqq.core.quantize", "hqq"),
        OwnCache("quanto", 4, "optimum.quanto", "optimum-quanto"),
        OwnCache("quanto", 2, "optimum.quanto", "optimum-quanto"),
    ]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        # A parent package that is missing.
        return False
