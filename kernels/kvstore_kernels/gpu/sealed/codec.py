"""One codec of whole blocks on one CUDA device: its statics there, and the kernels that write and read back."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from kvstore_kernels.gpu.codec import PLAIN
from kvstore_kernels.gpu.kernels.sealed_gather import sealed_gather_kernel
from kvstore_kernels.gpu.kernels.sealed_write import seal_kernel, tail_kernel
from kvstore_kernels.gpu.launch import INTERPRETED, Launch, launcher, padded, pointer, pointer_type
from kvstore_kernels.slab import TORCH_DTYPES
from kvstore_kernels.tail import SHORT_WRITE

if TYPE_CHECKING:
    from kvstore_kernels.codecs.sealed import SealedCodec

_LONG, _INT = "i64", "i32"
# Channels of V that are rotated at once. Of float32, whose products keep their operands in registers, fewer: with more
# they spill thousands of bytes a thread, and the device sets that aside for every thread it can hold.
_CHUNK, _CHUNK_EXACT = 32, 16
_lock = threading.Lock()


class SealedDeviceCodec:
    """Statics and kernels of a codec on a device.

    Invariants: made once for a codec and device, kept by the codec; `nonfinite` is counted by the kernels and read only
    when somebody asks. Safe from several threads.
    """

    def __init__(self, codec: SealedCodec, device: torch.device) -> None:
        layout = codec.layout
        self.layout, self.device = layout, device
        self.nonfinite = torch.zeros(layout.layers, dtype=torch.int32, device=device)
        self.counter = pointer(self.nonfinite)
        self._none = torch.zeros(128, dtype=torch.float32, device=device)
        self.nothing = pointer(self._none)
        # Each layer starts at a multiple of 16 bytes, whatever the head dim.
        rows = [tensor.reshape(layout.layers, -1) for tensor in codec.statics()]
        self._statics = [torch.nn.functional.pad(row, (0, -row.shape[1] % 4)).to(device) for row in rows]
        self.shifts, self.factors, self.inverses = ([pointer(item) for item in tensor] for tensor in self._statics)
        dims = {
            "K_DIM": layout.k_dim, "K_PAD": padded(layout.k_dim), "V_DIM": layout.v_dim, "V_PAD": padded(layout.v_dim),
        }  # fmt: skip
        more = dims["V_PAD"] - layout.v_dim
        turns = torch.nn.functional.pad(torch.stack((codec.rotation, codec.rotation.T)), (0, more, 0, more))
        self._turns = turns.contiguous().to(device)
        self.rotation_back = pointer(self._turns[1])
        self.tail_dtype = TORCH_DTYPES[layout.dtype]
        terms, unit = _terms(turns[0], layout.v_dim, self.tail_dtype)
        self._terms = terms.to(device)
        self.rotation = pointer(self._terms)
        exact = self.tail_dtype == torch.float32
        self._turning = {"CHUNK": _CHUNK_EXACT if exact else _CHUNK, "TERMS": len(terms), "UNIT": unit}
        offsets = {part.name: part.offset for part in layout.parts}
        self._block = {
            "BLOCK": layout.block_tokens, "HEAD_BYTES": layout.head_bytes, "K_CODES": offsets["k_codes"],
            "K_SCALES": offsets["k_scales"], "V_CODES": offsets["v_codes"], "V_HIGH": offsets.get("v_high", 0),
            "V_SCALES": offsets["v_scales"], "K_BITS": codec.k_bits, "V_BITS": codec.v_bits,
        }  # fmt: skip
        self._dims = dims
        self.constants: dict[str, Any] = dims | self._block | {"KV_HEADS": layout.kv_heads}
        self._tail = {"CAPACITY": layout.block_tokens + SHORT_WRITE, "SHORT": SHORT_WRITE}
        wide = max(dims["K_PAD"], dims["V_PAD"]) > 128
        self._exact_warps = 16 if wide else 8
        self._warps = self._exact_warps if exact else 8 if wide else 4
        self._launches: dict[Hashable, Launch] = {}
        # How many programs of one warp fill the device, and its multiprocessors.
        self.processors = 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self, group: int, dtype: torch.dtype, *, fetched: bool = False) -> None:
        """Compiles what a model with `group` query heads a KV head needs for prompts and single tokens."""
        from kvstore_kernels.gpu.sealed.launches import launches

        for tile in (1, 32):
            self.keep(dtype, tile)
        self.seal(dtype)
        # A hit that ends inside a block is read back into the tail.
        self.gather(self.tail_dtype, fetched=fetched)
        attention = launches(self)
        for columns in sorted({attention.columns(group * length) for length in (1, 17, 32)}):
            attention.decode(group, columns, dtype, PLAIN, fetched=fetched)
            attention.merge(group, columns, dtype, sinks=False)
        attention.prefill(group, dtype, PLAIN, fetched=fetched, aligned=True)
        attention.join(group, dtype, sinks=False)

    def seal(self, dtype: torch.dtype) -> Launch:
        """Quantize whole blocks."""
        key = ("seal", dtype)
        found = self._launches.get(key)
        if found is None:
            given, tail = pointer_type(dtype), pointer_type(self.tail_dtype)
            types = [given, given, "*fp32", "*fp32", tail, "*u8", "*fp16", tail, tail, "*i64", "*i64", "*i32"]
            types += [_LONG, _LONG, _INT, _LONG, _LONG] + [_LONG] * 6
            found = self._launches[key] = launcher(
                seal_kernel,
                types,
                self.constants | self._tail | self._turning,
                self.device,
                unaligned=frozenset(("k", "v")),
                num_warps=self._warps,
                # The codes must be the CPU codec's: two roundings, not one.
                enable_fp_fusion=False,
            )
        return found

    def keep(self, dtype: torch.dtype, tile: int) -> Launch:
        """Copy what isn't quantized yet into the tail, `tile` tokens a program."""
        key = ("keep", dtype, tile)
        found = self._launches.get(key)
        if found is None:
            given, tail = pointer_type(dtype), pointer_type(self.tail_dtype)
            types = [given, given, "*fp32", tail, tail, tail, tail, "*i64", "*i32", _LONG, _INT, _LONG]
            types += [_LONG] * 6
            constants = self._dims | self._tail | {"TILE": tile}
            constants |= {"KV_HEADS": self.layout.kv_heads, "BLOCK": self.layout.block_tokens}
            found = self._launches[key] = launcher(
                tail_kernel,
                types,
                constants,
                self.device,
                unaligned=frozenset(("k", "v")),
                num_warps=1 if tile == 1 else 4,
            )
        return found

    def gather(self, dtype: torch.dtype, *, fetched: bool) -> Launch:
        """Dequantize a range of tokens."""
        key = ("gather", dtype, fetched)
        found = self._launches.get(key)
        if found is None:
            given = pointer_type(dtype)
            types = [given, given, "*fp32", "*fp32", "*fp32", "*u8", "*fp16", "*i64", _LONG, _LONG, _LONG, _LONG]
            constants = self._dims | self._block | {"FETCHED": fetched, "CHUNK": _CHUNK_EXACT}
            found = self._launches[key] = launcher(
                sealed_gather_kernel,
                types,
                constants,
                self.device,
                # A range may begin anywhere.
                unaligned=frozenset(("k", "v")),
                num_warps=self._exact_warps,
            )
        return found


def _terms(matrix: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Matrices of `dtype` [terms, n, n] whose sum times the number is the rotation `matrix` [n, n] of `size` channels.

    Of a power of two its numbers are all plus or minus one number; else float32's bits take several terms.
    """
    unit = float(matrix.abs().max()) if size & (size - 1) == 0 else 1.0
    rest = (matrix / unit).round() if unit != 1.0 else matrix
    terms: list[torch.Tensor] = []
    while not terms or float(rest.abs().max()) > 2.0**-23:
        terms.append(rest.to(dtype))
        rest = rest - terms[-1].float()
    return torch.stack(terms), unit


def sealed_device_codec(codec: SealedCodec, device: torch.device) -> SealedDeviceCodec:
    """The codec's statics and kernels on a device, made at first use."""
    found: SealedDeviceCodec | None = codec.on_devices.get(device)
    if found is None:
        with _lock, torch.inference_mode(False):
            found = codec.on_devices.get(device)
            if found is None:
                found = codec.on_devices[device] = SealedDeviceCodec(codec, device)
    return found
