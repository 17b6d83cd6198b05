"""Where every byte of a block lies. Imports without torch: the service needs it too."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    # Where each layer begins in the block, of a layout whose layers have several codecs or are some of such a one's.
    offsets: tuple[int, ...] | None = None

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

        `codec` is a codec's name, or names with numbers of layers: "int8:2,int4:20,int8:2". Raises LayoutError naming
        the value that doesn't fit.
        """
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
        by_layer = codecs_by_layer(codec, layers)
        sizes = {}
        for name in set(by_layer):
            parts = _parts(name, block_tokens, k_dim, v_dim, dtype)
            sizes[name] = (parts, kv_heads * _aligned(parts[-1].offset + parts[-1].nbytes))
        ends = list(itertools.accumulate(sizes[name][1] for name in by_layer))
        # What the first layer has; `of` gives the other codecs'.
        parts, layer_bytes = sizes[by_layer[0]]
        return cls(
            block_tokens=block_tokens,
            layers=layers,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=dtype,
            codec=codec,
            parts=parts,
            head_bytes=layer_bytes // kv_heads,
            layer_bytes=layer_bytes,
            block_bytes=ends[-1],
            offsets=(0, *ends[:-1]) if len(sizes) > 1 else None,
        )

    @property
    def layer_codecs(self) -> tuple[str, ...]:
        """The codec of each layer."""
        return codecs_by_layer(self.codec, self.layers)

    def of(self, codec: str) -> BlockLayout:
        """The layers of one codec, as a layout in which they keep their numbers; the others' places say nothing."""
        parts = _parts(codec, self.block_tokens, self.k_dim, self.v_dim, self.dtype)
        head_bytes = _aligned(parts[-1].offset + parts[-1].nbytes)
        return replace(
            self, codec=codec, parts=parts, head_bytes=head_bytes, layer_bytes=self.kv_heads * head_bytes,
            offsets=self.offsets,
        )  # fmt: skip

    def layer_offset(self, layer: int) -> int:
        """Bytes from a slot's first byte to the layer's."""
        return layer * self.layer_bytes if self.offsets is None else self.offsets[layer]

    def part(self, name: str) -> Part:
        """The part called `name`; LayoutError if this codec has none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise LayoutError(f"codec {self.codec} has no part {name!r}: it has {', '.join(p.name for p in self.parts)}")

    @property
    def bits(self) -> float:
        """Bits a number of K or V takes, scales and padding included."""
        return 8 * self.block_bytes / (self.layers * self.kv_heads * self.block_tokens * (self.k_dim + self.v_dim))

    def offset(self, slot: int, layer: int, head: int, part: str) -> int:
        """Bytes from a slab's first byte to the part; Python integers, so beyond 2**31 and 2**32 too."""
        within = self.part(part).offset
        return slot * self.block_bytes + self.layer_offset(layer) + head * self.head_bytes + within

    def digest(self) -> bytes:
        """SHA-256 of the canonical description, 32 bytes. The codec plan has a digest of its own."""
        description: dict[str, object] = {
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
        if self.offsets is not None:
            description["offsets"] = list(self.offsets)
        canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()


def codecs_by_layer(codec: str, layers: int) -> tuple[str, ...]:
    """The codec of each layer: `codec` is a name, or "name:layers,name:layers,...". Raises LayoutError."""
    found: list[str] = []
    for item in codec.split(","):
        name, colon, count = item.partition(":")
        if name not in CODECS:
            raise LayoutError(f"unknown codec {name!r}: expected one of {', '.join(CODECS)}")
        if colon and not (count.isascii() and count.isdigit() and 0 < int(count) <= layers):
            raise LayoutError(f"{item!r} in codec {codec!r}: expected a number of layers from 1 to {layers}")
        found += [name] * (int(count) if colon else layers)
    if len(found) != layers or codec not in (found[0], codec_of_layers(found)):
        raise LayoutError(
            f"codec {codec!r} names {len(found)} layers: expected {layers}, neighbours of one codec together, or one "
            "name for all"
        )
    return tuple(found)


def codec_of_layers(names: Sequence[str]) -> str:
    """The codec of layers that have these: one name, or "name:layers,..."."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{name}:{count}" for name, count in runs)


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
