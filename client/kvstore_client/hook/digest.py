"""Chain digests: the identity of a block is everything its K and V depend on, from the first token on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_client.blocks import DIGEST_BYTES, NO_PARENT

TokenIds = npt.NDArray[np.int64]
_DOMAIN = b"kvstore.chain.1"


def _head(tag: bytes, length: int) -> bytes:
    # Lengths in front of both, so that no two different lists of fields give the same bytes.
    return struct.pack("<BQ", len(tag), length) + tag


_BEFORE_PARENT = _head(b"domain", len(_DOMAIN)) + _DOMAIN + _head(b"parent", DIGEST_BYTES)
_BEFORE_START = _head(b"start", 8)
_START = struct.Struct("<q")


def block_digest(parent: bytes, start: int, ids: TokenIds, *, salt: bytes = b"", extra: bytes = b"") -> bytes:
    """Digest (32 bytes) of the block that begins at token `start` of the logical sequence (padding not counted).

    `ids` int64 [n]; `parent` is the digest of the block before it (NO_PARENT for the first); `extra` stands for inputs
    other than tokens.
    """
    return _chain(ids, len(ids), start, parent, 1, salt, extra)[0]


def chain_digests(
    ids: TokenIds, block_tokens: int, *, known: Sequence[bytes] = (), salt: bytes = b"", extra: bytes = b""
) -> list[bytes]:
    """Digests of all full blocks of a sequence. `known` are those of its first blocks, if they were computed before."""
    count = len(ids) // block_tokens
    digests = list(known)[:count]
    start = len(digests) * block_tokens
    parent = digests[-1] if digests else NO_PARENT
    return digests + _chain(ids[start:], block_tokens, start, parent, count - len(digests), salt, extra)


def _chain(
    ids: TokenIds, block_tokens: int, start: int, parent: bytes, count: int, salt: bytes, extra: bytes
) -> list[bytes]:
    """Digests of `count` blocks from ids[0] on, which is token `start`."""
    size = 8 * block_tokens
    # One copy for all blocks: a prompt's first pass waits for this loop.
    plain = np.ascontiguousarray(ids, dtype="<i8").tobytes()
    before_ids = _head(b"ids", size)
    rest = _head(b"salt", len(salt)) + salt + _head(b"extra", len(extra)) + extra
    digests: list[bytes] = []
    for at in range(0, count * size, size):
        fields = (
            _BEFORE_PARENT, parent, _BEFORE_START, _START.pack(start + at // 8), before_ids, plain[at : at + size],
            rest,
        )  # fmt: skip
        parent = hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests
