"""8-bit K as in int8, 4-bit rotated V: about the accuracy of int8 at three quarters of its size. See sealed.py."""

from __future__ import annotations

from typing import ClassVar

from kvstore_kernels.codecs.sealed import SealedCodec


class K8v4Codec(SealedCodec):
    """8-bit K as in int8, 4-bit rotated V: about the accuracy of int8 at three quarters of its size."""

    name: ClassVar[str] = "k8v4"
