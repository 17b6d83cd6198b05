"""Codecs: how K and V become a block's bytes and back."""

from __future__ import annotations

from kvstore_kernels.codecs.base import Codec, RowTarget
from kvstore_kernels.codecs.calibrate import Calibrator
from kvstore_kernels.codecs.int4 import Int4Codec
from kvstore_kernels.codecs.int8 import Int8Codec
from kvstore_kernels.codecs.k4v2 import K4v2Codec
from kvstore_kernels.codecs.k4v3 import K4v3Codec
from kvstore_kernels.codecs.k8v4 import K8v4Codec
from kvstore_kernels.codecs.mixed import MixedCodec
from kvstore_kernels.codecs.passthrough import PassthroughCodec
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.codecs.sealed import SealedCodec
from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import BlockLayout

__all__ = [
    "Calibrator",
    "Codec",
    "CodecPlan",
    "Int8Codec",
    "MixedCodec",
    "PassthroughCodec",
    "RowTarget",
    "SealedCodec",
    "TokenCodec",
    "get_codec",
    "make_codec",
    "names",
]

# From the largest to the smallest.
_CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (PassthroughCodec, Int8Codec, K8v4Codec, Int4Codec, K4v3Codec, K4v2Codec)
}


def names() -> tuple[str, ...]:
    """All codecs, the most exact first."""
    return tuple(_CODECS)


def make_codec(layout: BlockLayout, plan: CodecPlan) -> Codec:
    """The codec of a layout, of one kind or of several. Raises LayoutError, PlanError."""
    if layout.codec in _CODECS:
        return _CODECS[layout.codec](layout, plan)
    return MixedCodec(layout, plan, {name: get_codec(name) for name in layout.layer_codecs})


def get_codec(name: str) -> type[Codec]:
    """The codec class called `name`, to be called with (layout, plan). Raises LayoutError if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        raise LayoutError(f"unknown codec {name!r}: expected one of {', '.join(sorted(_CODECS))}")
    return codec
