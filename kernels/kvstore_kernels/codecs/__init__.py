"""Codecs: how K and V become a block's bytes and back."""

from __future__ import annotations

from kvstore_kernels.codecs.base import Codec, RowTarget
from kvstore_kernels.codecs.calibrate import Calibrator
from kvstore_kernels.codecs.int8 import Int8Codec
from kvstore_kernels.codecs.passthrough import PassthroughCodec
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.errors import LayoutError

__all__ = ["Calibrator", "Codec", "CodecPlan", "Int8Codec", "PassthroughCodec", "RowTarget", "get_codec"]

_CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (PassthroughCodec, Int8Codec)}


def get_codec(name: str) -> type[Codec]:
    """The codec class called `name`, to be called with (layout, plan). Raises LayoutError if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        raise LayoutError(f"unknown codec {name!r}: expected one of {', '.join(sorted(_CODECS))}")
    return codec
