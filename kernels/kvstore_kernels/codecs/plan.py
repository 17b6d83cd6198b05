"""Codec plans: a codec's static calibration, and the bytes it travels and is stored as."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from kvstore_kernels.errors import PlanError
from kvstore_kernels.layout import CODECS

_MAGIC = b"KVPLAN1\n"
_MAX_HEADER = 1 << 16
_MAX_BYTES = 1 << 28
_MAX_ORIGIN = 4096


class CodecPlan:
    """A codec and its calibration tensors (float32, CPU). int8: k_shift and k_scale [layers, kv_heads, k_dim].

    Invariants: equal plans have equal bytes and digests; tensors are contiguous, finite, never changed.
    """

    def __init__(self, codec: str, tensors: Mapping[str, torch.Tensor] | None = None, origin: str = "") -> None:
        """`origin` says where the calibration came from, for people. Raises PlanError."""
        unknown = {item.partition(":")[0] for item in codec.split(",")} - set(CODECS)
        if unknown:
            raise PlanError(f"unknown codec {codec!r} in a codec plan: expected one of {', '.join(CODECS)}")
        if len(origin.encode()) > _MAX_ORIGIN:
            raise PlanError(f"origin of {len(origin.encode())} bytes: expected at most {_MAX_ORIGIN}")
        self.codec = codec
        self.origin = origin
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in sorted((tensors or {}).items()):
            plain = tensor.detach().to("cpu", torch.float32).contiguous()
            if not bool(torch.isfinite(plain).all()):
                raise PlanError(f"codec plan tensor {name!r} has numbers that are not finite")
            self.tensors[name] = plain

    def of(self, codec: str) -> CodecPlan:
        """The same calibration for one of its codecs."""
        return CodecPlan(codec, {} if codec == "passthrough" else self.tensors, self.origin)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor called `name`; PlanError if it is missing or has another shape."""
        found = self.tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            has = "none" if found is None else str(tuple(found.shape))
            raise PlanError(f"codec plan tensor {name!r} has shape {has}: expected {shape}; calibrate this model again")
        return found

    def to_bytes(self) -> bytes:
        """Magic, length of the header (u32 LE), canonical JSON header, then the tensors as little-endian float32."""
        header = {
            "codec": self.codec,
            "origin": self.origin,
            "tensors": [[name, list(tensor.shape)] for name, tensor in self.tensors.items()],
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        bodies = [tensor.numpy().astype("<f4").tobytes() for tensor in self.tensors.values()]
        return b"".join([_MAGIC, len(text).to_bytes(4, "little"), text, *bodies])

    @classmethod
    def from_bytes(cls, data: bytes) -> CodecPlan:
        """Reads what to_bytes wrote. Raises PlanError on anything else; sizes are checked before anything is made."""
        if len(data) > _MAX_BYTES:
            raise PlanError(f"codec plan of {len(data)} bytes: expected at most {_MAX_BYTES}")
        start = len(_MAGIC) + 4
        if len(data) < start or not data.startswith(_MAGIC):
            raise PlanError(f"codec plan of {len(data)} bytes starts with {data[:8]!r}: expected {_MAGIC!r}")
        length = int.from_bytes(data[start - 4 : start], "little")
        if length > min(_MAX_HEADER, len(data) - start):
            raise PlanError(f"codec plan header of {length} bytes: expected at most {len(data) - start}")
        try:
            header = json.loads(data[start : start + length])
        except (ValueError, RecursionError) as error:
            raise PlanError(f"codec plan header is not JSON: {error}") from error
        codec, origin, shapes = _checked_header(header)
        return cls(codec, _tensors(memoryview(data)[start + length :], shapes), origin)

    def digest(self) -> bytes:
        """SHA-256 of to_bytes(), 32 bytes."""
        return hashlib.sha256(self.to_bytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodecPlan) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return f"CodecPlan({self.codec!r}, {shapes}, origin={self.origin!r})"


def _checked_header(header: Any) -> tuple[str, str, list[tuple[str, tuple[int, ...]]]]:
    if not isinstance(header, dict) or set(header) != {"codec", "origin", "tensors"}:
        raise PlanError("codec plan header: expected an object with codec, origin and tensors")
    codec, origin, tensors = header["codec"], header["origin"], header["tensors"]
    if not isinstance(codec, str) or not isinstance(origin, str) or not isinstance(tensors, list):
        raise PlanError("codec plan header: expected texts for codec and origin and a list of tensors")
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for item in tensors:
        match item:
            case [str(name), list(shape)] if len(shape) <= 8 and all(type(n) is int and 0 < n < 1 << 24 for n in shape):
                shapes.append((name, tuple(shape)))
            case _:
                raise PlanError(f"codec plan header: tensor entry {item!r} is not [name, [sizes]]")
    if [name for name, _ in shapes] != sorted({name for name, _ in shapes}):
        raise PlanError("codec plan header: tensor names must ascend and differ")
    return codec, origin, shapes


def _tensors(body: memoryview, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    sizes = []
    for _, shape in shapes:
        size = 1
        for n in shape:
            size *= n
        sizes.append(size)
    if 4 * sum(sizes) != len(body):
        raise PlanError(f"codec plan body of {len(body)} bytes: expected {4 * sum(sizes)} for the tensors it names")
    tensors: dict[str, torch.Tensor] = {}
    offset = 0
    for (name, shape), size in zip(shapes, sizes, strict=True):
        raw = bytearray(body[offset : offset + 4 * size])
        tensors[name] = torch.frombuffer(raw, dtype=torch.float32).reshape(shape).clone()
        offset += 4 * size
    return tensors
