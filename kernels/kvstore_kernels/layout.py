"""Where every byte of a block lies. Imports without torch: the service needs it too."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from kvstore_kernels.errors import LayoutError

BLOCK_TOKENS = 64
ALIGNMENT = 128
FORMAT_VERSION = 1
ITEM_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
MODEL_DTYPES = ("float32", "bfloat16", "float16")
CODECS = ("passthrough", "int8", "k8v4", "int4", "k4v3", "k4v2")
# Bits of K and of V of the codecs that quantize whole blocks: see codecs/sealed.py.
SEALED_BITS = {"k8v4": (8, 4), "int4": (4, 4), "k4v3": (4, 3), "k4v2": (4, 2)}
MAX_HEAD_DIM = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """One array inside a (layer, head): `offset` and `nbytes` are bytes from the head's first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The byte layout of one block: [layer][kv head][K codes, K scales, V codes, V scales].

    K codes are token-major [block_tokens, k_dim], V codes channel-major [v_dim, block_tokens], scales one
    per token (4-bit K: a scale and a lowest value per channel). Codes of less than 8 bits share bytes with those of
    the tokens half, a quarter or an eighth of a block later (codecs/packing.py). Every part starts at a multiple of
    128 bytes; a (layer, head) is one contiguous run.

    Invariants: head_bytes, layer_bytes and block_bytes are multiples of 128; parts ascend and don't overlap;
    equal layouts have equal digests.
    """

    block_tokens: int
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    codec: str
    parts: tuple[Part, ...]
    head_bytes: int
    layer_bytes: int
    block_bytes: int

    @classmethod
    def create(
        cls,
        codec: str,
        *,
        layers: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype: str,
        block_tokens: int = BLOCK_TOKENS,
    ) -> BlockLayout:
        """Lays out a block of a model whose K and V have `dtype` ("float32", "bfloat16" or "float16").

        Raises LayoutError naming the value that doesn't fit.
        """
        if codec not in CODECS:
            raise LayoutError(f"unknown codec {codec!r}: expected one of {', '.join(CODECS)}")
        if dtype not in MODEL_DTYPES:
            raise LayoutError(f"unsupported model dtype {dtype!r}: expected one of {', '.join(MODEL_DTYPES)}")
        for name, value in (("layers", layers), ("kv_heads", kv_heads), ("k_dim", k_dim), ("v_dim", v_dim)):
            if value < 1:
                raise LayoutError(f"{name} is {value}: expected at least 1")
        for name, value in (("k_dim", k_dim), ("v_dim", v_dim)):
            if value > MAX_HEAD_DIM:
                raise LayoutError(f"{name} is {value}: expected at most {MAX_HEAD_DIM}")
        if block_tokens < BLOCK_TOKENS or block_tokens % BLOCK_TOKENS:
            raise LayoutError(f"block_tokens is {block_tokens}: expected a multiple of {BLOCK_TOKENS}")
        parts = _parts(codec, block_tokens, k_dim, v_dim, dtype)
        head_bytes = _aligned(parts[-1].offset + parts[-1].nbytes)
        layer_bytes = kv_heads * head_bytes
        return cls(
            block_tokens=block_tokens,
            layers=layers,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=dtype,
            codec=codec,
            parts=parts,
            head_bytes=head_bytes,
            layer_bytes=layer_bytes,
            block_bytes=layers * layer_bytes,
        )

    def part(self, name: str) -> Part:
        """The part called `name`; LayoutError if this codec has none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise LayoutError(f"codec {self.codec} has no part {name!r}: it has {', '.join(p.name for p in self.parts)}")

    @property
    def bits(self) -> float:
        """Bits a number of K or V takes, scales and padding included."""
        return 8 * self.head_bytes / (self.block_tokens * (self.k_dim + self.v_dim))

    def offset(self, slot: int, layer: int, head: int, part: str) -> int:
        """Bytes from a slab's first byte to the part; Python integers, so beyond 2**31 and 2**32 too."""
        within = self.part(part).offset
        return slot * self.block_bytes + layer * self.layer_bytes + head * self.head_bytes + within

    def digest(self) -> bytes:
        """SHA-256 of the canonical description, 32 bytes. The codec plan has a digest of its own."""
        description = {
            "format": FORMAT_VERSION,
            "codec": self.codec,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "k_order": "token-major",
            "v_order": "channel-major",
            "codes": "signed",
            "header": 0,
            "parts": [[p.name, list(p.shape), p.dtype, p.offset, p.nbytes] for p in self.parts],
        }
        canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _parts(codec: str, block_tokens: int, k_dim: int, v_dim: int, dtype: str) -> tuple[Part, ...]:
    k_shape, v_shape, scales = (block_tokens, k_dim), (v_dim, block_tokens), (block_tokens,)
    arrays: list[tuple[str, tuple[int, ...], str]]
    if codec == "passthrough":
        arrays = [("k_codes", k_shape, dtype), ("v_codes", v_shape, dtype)]
    elif codec in SEALED_BITS:
        k_bits, v_bits = SEALED_BITS[codec]
        if k_bits == 8:
            arrays = [("k_codes", k_shape, "int8"), ("k_scales", scales, "float16")]
        else:
            arrays = [("k_codes", (block_tokens // 2, k_dim), "uint8"), ("k_scales", (2, k_dim), "float16")]
        arrays.append(("v_codes", (v_dim, block_tokens // (2 if v_bits == 4 else 4)), "uint8"))
        if v_bits == 3:
            arrays.append(("v_high", (v_dim, block_tokens // 8), "uint8"))
        arrays.append(("v_scales", (2, block_tokens) if v_bits == 4 else scales, "float16"))
    else:
        arrays = [
            ("k_codes", k_shape, "int8"),
            ("k_scales", scales, "float16"),
            ("v_codes", v_shape, "int8"),
            ("v_scales", scales, "float16"),
        ]
    parts: list[Part] = []
    offset = 0
    for name, shape, kind in arrays:
        nbytes = ITEM_BYTES[kind]
        for size in shape:
            nbytes *= size
        parts.append(Part(name=name, shape=shape, dtype=kind, offset=offset, nbytes=nbytes))
        offset = _aligned(offset + nbytes)
    return tuple(parts)
