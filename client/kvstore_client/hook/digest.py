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


def _field(tag: bytes, value: bytes) -> bytes:
    # Lengths in front of both, so that no two different lists of fields give the same bytes.
    return struct.pack("<BQ", len(tag), len(value)) + tag + value


_DOMAIN_FIELD = _field(b"domain", _DOMAIN)


def block_digest(parent: bytes, start: int, ids: TokenIds, *, salt: bytes = b"", extra: bytes = b"") -> bytes:
    """Digest (32 bytes) of the block that begins at token `start` of the logical sequence (padding not counted).

    `ids` int64 [n]; `parent` is the digest of the block before it (NO_PARENT for the first); `extra` stands for inputs
    other than tokens.
    """
    plain = np.ascontiguousarray(ids, dtype="<i8").tobytes()
    fields = (
        _DOMAIN_FIELD,
        _field(b"parent", parent),
        _field(b"start", struct.pack("<q", start)),
        _field(b"ids", plain),
        _field(b"salt", salt),
        _field(b"extra", extra),
    )
    return hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()


def chain_digests(
    ids: TokenIds, block_tokens: int, *, known: Sequence[bytes] = (), salt: bytes = b"", extra: bytes = b""
) -> list[bytes]:
    """Digests of all full blocks of a sequence. `known` are those of its first blocks, if they were computed before."""
    digests = list(known)[: len(ids) // block_tokens]
    parent = digests[-1] if digests else NO_PARENT
    for index in range(len(digests), len(ids) // block_tokens):
        start = index * block_tokens
        parent = block_digest(parent, start, ids[start : start + block_tokens], salt=salt, extra=extra)
        digests.append(parent)
    return digests
