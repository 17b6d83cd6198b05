"""4-bit K per channel of a block, 4-bit rotated V. See sealed.py."""

from __future__ import annotations

from typing import ClassVar

from kvstore_kernels.codecs.sealed import SealedCodec


class Int4Codec(SealedCodec):
    """4-bit K per channel of a block, 4-bit rotated V."""

    name: ClassVar[str] = "int4"
