"""4-bit K per channel of a block, 2-bit rotated V: the smallest, and its loss can be seen. See sealed.py."""

from __future__ import annotations

from typing import ClassVar

from kvstore_kernels.codecs.sealed import SealedCodec


class K4v2Codec(SealedCodec):
    """4-bit K per channel of a block, 2-bit rotated V: the smallest, and its loss can be seen."""

    name: ClassVar[str] = "k4v2"
