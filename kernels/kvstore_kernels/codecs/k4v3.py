"""4-bit K per channel of a block, 3-bit rotated V. See sealed.py."""

from __future__ import annotations

from typing import ClassVar

from kvstore_kernels.codecs.sealed import SealedCodec


class K4v3Codec(SealedCodec):
    """4-bit K per channel of a block, 3-bit rotated V."""

    name: ClassVar[str] = "k4v3"
