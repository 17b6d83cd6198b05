"""The codec that keeps the model's own numbers: tells semantics bugs from rounding."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.slab import TORCH_DTYPES


class PassthroughCodec(TokenCodec):
    """K and V in the model's dtype, bit for bit."""

    name: ClassVar[str] = "passthrough"
    scaled: ClassVar[bool] = False

    def query_factor(self, layer: int, scaling: float) -> torch.Tensor | float:  # noqa: ARG002
        """The scaling itself."""
        return scaling

    def shift_scores(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor | None:  # noqa: ARG002
        """None: nothing is left out."""
        return None

    def _encode_k(self, layer: int, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ARG002
        return k, None

    def _encode_v(self, layer: int, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ARG002
        return v, None

    def _decoded_k(self, layer: int, k: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return k

    def _check_dtypes(self, k: torch.dtype, v: torch.dtype) -> None:
        expected = TORCH_DTYPES[self.layout.dtype]
        if k != expected or v != expected:
            raise LayoutError(f"k is {k} and v is {v}: passthrough blocks of this layout hold {expected}")
