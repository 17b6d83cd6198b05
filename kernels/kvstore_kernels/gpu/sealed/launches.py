"""The kernels of attention over sealed blocks, compiled for a codec's layout on a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from kvstore_kernels.codecs.rotation import rotation
from kvstore_kernels.gpu.codec import Kind
from kvstore_kernels.gpu.kernels.merge import merge_kernel
from kvstore_kernels.gpu.kernels.sealed_decode import sealed_decode_kernel
from kvstore_kernels.gpu.kernels.sealed_merge import sealed_merge_kernel
from kvstore_kernels.gpu.kernels.sealed_prefill import sealed_prefill_kernel
from kvstore_kernels.gpu.launch import INTERPRETED, Launch, launcher, pointer, pointer_type
from kvstore_kernels.slab import TORCH_DTYPES
from kvstore_kernels.tail import SHORT_WRITE

if TYPE_CHECKING:
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec

_LONG, _INT, _FLOAT = "i64", "i32", "fp32"
# Values a warp can hold of an output tile without spilling.
_WARP_NUMBERS = 2048
_KV_STRIDES = frozenset(("k_row", "k_head", "k_token", "v_row", "v_head", "v_token"))
_Q_STRIDES = frozenset(("q_row", "q_head", "q_token"))
_lock = threading.Lock()


class Launches:
    """Attention's kernels for one codec on one device, each compiled when it is first asked for."""

    def __init__(self, on: SealedDeviceCodec) -> None:
        self._constants: dict[str, Any] = dict(on.constants)
        self._device = on.device
        self._tail = pointer_type(TORCH_DTYPES[on.layout.dtype])
        self._wide = max(self._constants["K_PAD"], self._constants["V_PAD"])
        self._launches: dict[Hashable, Launch] = {}
        # In which half of its third bits' byte a token of the first quarter has its own: see sealed_tile.
        quarter = self._constants["BLOCK"] // 4
        self._odds = (torch.arange(quarter, dtype=torch.int32) // (quarter // 2)).to(on.device)
        self.odds = pointer(self._odds)
        self._turn, self._turn_exact, self._turn_unit = _turn(on.layout.v_dim, self._constants["V_PAD"])
        self._turn = self._turn.to(on.device)
        self.turn = pointer(self._turn)

    @staticmethod
    def columns(queries: int) -> int:
        """Queries that one program of decode takes at once."""
        return min(64, max(8, 1 << (queries - 1).bit_length()))

    def decode(self, group: int, columns: int, dtype: torch.dtype, kind: Kind, *, fetched: bool) -> Launch:
        """Attention of a few queries, `columns` (query, head) pairs a program."""
        key = ("decode", group, columns, dtype, kind, fetched)
        found = self._launches.get(key)
        if found is None:
            given, exact, tail = pointer_type(dtype), dtype == torch.float32, self._tail
            types = [given, given, "*fp32", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "*fp32", "*u8", "*fp16"]
            types += [tail] * 4 + ["*i32", "*i32", _LONG, _LONG, _INT, _INT, _INT, _LONG, _LONG, _LONG, _LONG, _LONG]
            types += [_INT, _FLOAT, _FLOAT]
            found = self._launches[key] = launcher(
                sealed_decode_kernel,
                types,
                self._attention(group, kind, exact=exact, fetched=fetched)
                | {"COLUMNS": columns, "STAGES": 2 if exact else 3},
                self._device,
                num_warps=min(8, max(4 if exact else 1, self._wide * columns // _WARP_NUMBERS)),
            )
        return found

    @staticmethod
    def queries(dtype: torch.dtype) -> int:
        """Queries that one program of prefill takes at once."""
        return 32 if dtype == torch.float32 else 64

    @staticmethod
    def tile(dtype: torch.dtype) -> int:
        """Exact tokens in a tile of prefill."""
        return 32 if dtype == torch.float32 else 64

    def prefill(self, group: int, dtype: torch.dtype, kind: Kind, *, fetched: bool, aligned: bool) -> Launch:
        """Attention of many fresh tokens over a history and themselves."""
        key = ("prefill", group, dtype, kind, fetched, aligned)
        found = self._launches.get(key)
        if found is None:
            given, exact, tail = pointer_type(dtype), dtype == torch.float32, self._tail
            types = [given] * 4 + ["*fp32", "*fp32", "*i64", "*i64", "*fp32", "*fp32", "*fp16", "*fp32", "*u8"]
            types += ["*fp16", tail, tail, tail, tail, "*i32", "*i32", _LONG, _LONG, _INT, _INT, _LONG, _LONG]
            types += [_LONG] * 9 + [_INT, _FLOAT, _FLOAT]
            found = self._launches[key] = launcher(
                sealed_prefill_kernel,
                types,
                self._attention(group, kind, exact=exact, fetched=fetched)
                | {"QUERIES": self.queries(dtype), "TILE": self.tile(dtype)}
                | {"TURN_EXACT": self._turn_exact, "TURN_UNIT": self._turn_unit},
                self._device,
                unaligned=frozenset() if aligned else frozenset(("query", "key", "value")),
                even=_KV_STRIDES | _Q_STRIDES if aligned else frozenset(),
                num_warps=8 if exact else 4,
                num_stages=2,
            )
        return found

    def join(self, group: int, dtype: torch.dtype, *, sinks: bool) -> Launch:
        """The second launch of prefill that was split: its parts are plain."""
        key = ("join", group, dtype, sinks)
        found = self._launches.get(key)
        if found is None:
            types = [pointer_type(dtype), "*fp32", "*fp32", "*i64", "*fp32", _INT, _INT, _INT, _LONG, _INT]
            constants = {name: self._constants[name] for name in ("KV_HEADS", "V_DIM", "V_PAD")}
            constants |= {"GROUP": group, "COLUMNS": self.queries(dtype), "SINKS": sinks, "SKIPPED": True}
            found = self._launches[key] = launcher(merge_kernel, types, constants, self._device, num_warps=4)
        return found

    def merge(self, group: int, columns: int, dtype: torch.dtype, *, sinks: bool) -> Launch:
        """The second launch: rotates back and merges."""
        key = ("merge", group, columns, dtype, sinks)
        found = self._launches.get(key)
        if found is None:
            types = [pointer_type(dtype), "*fp32", "*fp32", "*fp32", "*fp32", _INT, _INT, _INT, _LONG, _INT]
            constants = {name: self._constants[name] for name in ("KV_HEADS", "V_DIM", "V_PAD")}
            constants |= {"GROUP": group, "COLUMNS": columns, "CHUNK": 32, "PARTS": 64, "SINKS": sinks}
            found = self._launches[key] = launcher(sealed_merge_kernel, types, constants, self._device, num_warps=4)
        return found

    def _attention(self, group: int, kind: Kind, *, exact: bool, fetched: bool) -> dict[str, Any]:
        return self._constants | {
            "GROUP": group, "CAPACITY": self._constants["BLOCK"] + SHORT_WRITE, "PRECISE": exact,
            "FAST": not INTERPRETED, "FETCHED": fetched, "SOFTCAP": kind.softcap, "WINDOW": kind.window,
            "SINKS": kind.sinks,
        }  # fmt: skip


def _turn(size: int, wide: int) -> tuple[torch.Tensor, bool, float]:
    """What rotates back, as sealed_prefill takes it: float16 [2, wide, wide], if its first part is all, its unit."""
    back = rotation(size).T
    # All numbers of a Hadamard matrix are as large: without their size they are signs.
    unit = size**-0.5 if size & (size - 1) == 0 else 1.0
    back = torch.nn.functional.pad(back / unit, (0, wide - size, 0, wide - size))
    if unit < 1:
        back = back.round()
    rest = (back - back.half().float()) * 2048
    return torch.stack((back.half(), rest.half())).contiguous(), not bool(rest.any()), unit


_known: weakref.WeakKeyDictionary[SealedDeviceCodec, Launches] = weakref.WeakKeyDictionary()


def launches(on: SealedDeviceCodec) -> Launches:
    """The codec's kernels of attention, made at first use."""
    found = _known.get(on)
    if found is None:
        with _lock:
            found = _known.get(on)
            if found is None:
                found = _known[on] = Launches(on)
    return found
