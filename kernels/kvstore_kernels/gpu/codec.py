"""One codec on one CUDA device: its statics there, and the kernels compiled for its layout."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kvstore_kernels.codecs.tokenwise import TokenCodec
from kvstore_kernels.gpu.kernels.append import append_kernel
from kvstore_kernels.gpu.kernels.decode import decode_kernel
from kvstore_kernels.gpu.kernels.gather import gather_kernel
from kvstore_kernels.gpu.kernels.merge import merge_kernel
from kvstore_kernels.gpu.kernels.prefill import prefill_kernel
from kvstore_kernels.gpu.launch import INTERPRETED, Launch, Pointer, launcher, padded, pointer, pointer_type
from kvstore_kernels.slab import TORCH_DTYPES

_LONG, _INT, _FLOAT = "i64", "i32", "fp32"
# Values a warp can hold of an output tile without spilling.
_WARP_NUMBERS = 2048
_KV_STRIDES = frozenset(("k_row", "k_head", "k_token", "v_row", "v_head", "v_token"))
_Q_STRIDES = frozenset(("q_row", "q_head", "q_token"))
_lock = threading.Lock()


class Kind(NamedTuple):
    """What a model asks of attention: each combination is a kernel of its own."""

    softcap: bool = False
    window: bool = False
    sinks: bool = False


PLAIN = Kind()


class DeviceCodec:
    """Statics and kernels of a codec on a device.

    Invariants: made once for a codec and device, kept by the codec; `nonfinite` is counted by the kernels and read
    only when somebody asks. Safe from several threads.
    """

    def __init__(self, codec: TokenCodec, device: torch.device) -> None:
        layout = codec.layout
        self.layout, self.device, self.scaled = layout, device, codec.scaled
        self.nonfinite = torch.zeros(layout.layers, dtype=torch.int32, device=device)
        self.counter = pointer(self.nonfinite)
        self._none = torch.zeros(128, dtype=torch.float32, device=device)
        self.nothing = pointer(self._none)
        # Each layer starts at a multiple of 16 bytes, whatever the head dim.
        rows = [tensor.reshape(layout.layers, -1) for tensor in codec.statics()]
        self._statics = [torch.nn.functional.pad(row, (0, -row.shape[1] % 4)).to(device) for row in rows]
        empty = [self.nothing] * layout.layers
        self.shifts, self.factors, self.inverses = (
            [[pointer(item) for item in tensor] for tensor in self._statics] if self._statics else [empty] * 3
        )
        self.code_dtype = torch.int8 if codec.scaled else TORCH_DTYPES[layout.dtype]
        offsets = {part.name: part.offset for part in layout.parts}
        self._dims = {
            "K_DIM": layout.k_dim, "K_PAD": padded(layout.k_dim), "V_DIM": layout.v_dim, "V_PAD": padded(layout.v_dim),
        }  # fmt: skip
        self._shape = self._dims | {
            "BLOCK": layout.block_tokens, "HEAD_BYTES": layout.head_bytes, "K_SCALES": offsets.get("k_scales", 0),
            "V_CODES": offsets["v_codes"], "V_SCALES": offsets.get("v_scales", 0), "ITEM": self.code_dtype.itemsize,
            "SCALED": codec.scaled,
        }  # fmt: skip
        self._wide = max(self._dims["K_PAD"], self._dims["V_PAD"])
        self._tile_warps = 8 if self._wide > 128 else 4
        self._codes = pointer_type(self.code_dtype)
        self._launches: dict[Hashable, Launch] = {}
        # How many programs of one warp fill the device, and its multiprocessors.
        self.processors = 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self, group: int, dtype: torch.dtype, *, fetched: bool = False) -> None:
        """Compiles what a model with `group` query heads a KV head needs for prompts and single tokens."""
        for tile in (1, 16, 64):
            self.append(dtype, tile, aligned=True)
        # Single tokens, and the few that follow a long history.
        for columns in sorted({self.columns(group * length) for length in (1, 17, 32)}):
            self.decode(group, columns, dtype, PLAIN, fetched=fetched)
            self.merge(group, columns, dtype, sinks=False, skipped=False)
        self.prefill(group, dtype, PLAIN, fetched=fetched, aligned=True)
        self.merge(group, self.queries(dtype), dtype, sinks=False, skipped=True)

    @staticmethod
    def columns(queries: int) -> int:
        """Queries that one program of decode takes at once."""
        return min(64, padded(queries))

    @staticmethod
    def queries(dtype: torch.dtype) -> int:
        """Queries that one program of prefill takes at once."""
        return 32 if dtype == torch.float32 else 64

    @staticmethod
    def tile(dtype: torch.dtype) -> int:
        """Tokens in a tile of prefill: exact products keep both operands in registers."""
        return 32 if dtype == torch.float32 else 64

    def decode_tile(self, dtype: torch.dtype) -> int:
        """Tokens in a tile of decode: as many as its warp holds without spilling."""
        return 32 if dtype == torch.float32 or (not self.scaled and self._wide > 64) else 64

    def append(self, dtype: torch.dtype, tile: int, *, aligned: bool) -> Launch:
        """Encode and store, `tile` tokens a program."""
        key = ("append", dtype, tile, aligned)
        found = self._launches.get(key)
        if found is None:
            given = pointer_type(dtype)
            types = [given, given, "*fp32", "*fp32", self._codes, "*fp16", "*i64", "*i64", "*i32"]
            types += [_LONG, _LONG, _INT, _LONG, _LONG] + [_LONG] * 6
            found = self._launches[key] = launcher(
                append_kernel,
                types,
                {**self._shape, "TILE": tile},
                self.device,
                unaligned=frozenset() if aligned else frozenset(("k", "v")),
                even=_KV_STRIDES if aligned else frozenset(),
                num_warps=1 if tile == 1 else self._tile_warps,
                # The codes must be the CPU codec's: two roundings, not one.
                enable_fp_fusion=False,
            )
        return found

    def decode(self, group: int, columns: int, dtype: torch.dtype, kind: Kind, *, fetched: bool) -> Launch:
        """Attention of a few queries, `columns` (query, head) pairs a program."""
        key = ("decode", group, columns, dtype, kind, fetched)
        found = self._launches.get(key)
        if found is None:
            given, exact = pointer_type(dtype), dtype == torch.float32
            types = [given, given, "*fp32", "*fp32", "*i32", "*i64", "*i64", "*fp32", "*fp32", "*fp32"]
            types += [self._codes, "*fp16", _LONG, _LONG, _INT, _INT, _INT, _INT, _LONG, _LONG, _LONG, _LONG, _LONG]
            types += [_INT, _FLOAT, _FLOAT]
            wide = self._wide
            found = self._launches[key] = launcher(
                decode_kernel,
                types,
                {**self._attention(group, kind, exact=exact, fetched=fetched), "COLUMNS": columns}
                | {"TILE": self.decode_tile(dtype)},
                self.device,
                num_warps=min(8, max(4 if exact else 1, wide * columns // _WARP_NUMBERS)),
                num_stages=2 if exact or (wide > 128 and not self.scaled) else 3,
            )
        return found

    def prefill(self, group: int, dtype: torch.dtype, kind: Kind, *, fetched: bool, aligned: bool) -> Launch:
        """Attention of many fresh tokens over a history and themselves."""
        key = ("prefill", group, dtype, kind, fetched, aligned)
        found = self._launches.get(key)
        if found is None:
            given, exact = pointer_type(dtype), dtype == torch.float32
            types = [given] * 4 + ["*fp32", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "*fp32", self._codes, "*fp16"]
            types += [_LONG, _LONG, _INT, _INT, _LONG, _LONG] + [_LONG] * 9 + [_INT, _FLOAT, _FLOAT]
            found = self._launches[key] = launcher(
                prefill_kernel,
                types,
                {**self._attention(group, kind, exact=exact, fetched=fetched), "QUERIES": self.queries(dtype)}
                | {"TILE": self.tile(dtype)},
                self.device,
                unaligned=frozenset() if aligned else frozenset(("query", "key", "value")),
                even=_KV_STRIDES | _Q_STRIDES if aligned else frozenset(),
                num_warps=8 if exact else 4,
                num_stages=2,
            )
        return found

    def merge(self, group: int, columns: int, dtype: torch.dtype, *, sinks: bool, skipped: bool) -> Launch:
        """The second launch of attention that was split."""
        key = ("merge", group, columns, dtype, sinks, skipped)
        found = self._launches.get(key)
        if found is None:
            types = [pointer_type(dtype), "*fp32", "*fp32", "*i64", "*fp32", _INT, _INT, _INT, _LONG, _INT]
            constants = {
                "KV_HEADS": self.layout.kv_heads, "GROUP": group, "COLUMNS": columns, "V_DIM": self._shape["V_DIM"],
                "V_PAD": self._shape["V_PAD"], "SINKS": sinks, "SKIPPED": skipped,
            }  # fmt: skip
            found = self._launches[key] = launcher(merge_kernel, types, constants, self.device, num_warps=4)
        return found

    def gather(self, dtype: torch.dtype, *, fetched: bool) -> Launch:
        """Dequantize a range of tokens."""
        key = ("gather", dtype, fetched)
        found = self._launches.get(key)
        if found is None:
            given = pointer_type(dtype)
            types = [given, given, "*fp32", "*fp32", self._codes, "*fp16", "*i64", _LONG, _LONG, _LONG]
            constants = {**self._shape, "FETCHED": fetched, "TILE": 64}
            warps = self._tile_warps
            found = self._launches[key] = launcher(gather_kernel, types, constants, self.device, num_warps=warps)
        return found

    def _attention(self, group: int, kind: Kind, *, exact: bool, fetched: bool) -> dict[str, Any]:
        return self._shape | {
            "KV_HEADS": self.layout.kv_heads, "GROUP": group, "PRECISE": exact, "FAST": not INTERPRETED,
            "FETCHED": fetched, "SOFTCAP": kind.softcap, "WINDOW": kind.window, "SINKS": kind.sinks,
        }  # fmt: skip


def device_codec(codec: TokenCodec, device: torch.device) -> DeviceCodec:
    """The codec's statics and kernels on a device, made at first use."""
    found: DeviceCodec | None = codec.on_devices.get(device)
    if found is None:
        with _lock, torch.inference_mode(False):
            found = codec.on_devices.get(device)
            if found is None:
                found = codec.on_devices[device] = DeviceCodec(codec, device)
    return found


def even(*tensors: torch.Tensor) -> bool:
    """Whether addresses are multiples of 16 bytes and strides of 16 numbers: rows are then loaded in whole words."""
    return not any(tensor.data_ptr() & 15 or any(stride & 15 for stride in tensor.stride()[:3]) for tensor in tensors)


def optional(tensor: torch.Tensor | None, nothing: Pointer) -> Pointer:
    """A tensor's pointer, or the one that stands for none."""
    return nothing if tensor is None else pointer(tensor)
