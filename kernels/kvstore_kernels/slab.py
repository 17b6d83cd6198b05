"""One mapped slab: bytes, slots, and typed views of every part of every block in it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.layout import ALIGNMENT, BlockLayout

TORCH_DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_VIEWS_KEPT = 7
# part name -> view of shape [slots, kv_heads, *part.shape], for one layer.
LayerViews = dict[str, torch.Tensor]
# part name -> view of shape [slots, layers, kv_heads, *part.shape].
BlockViews = dict[str, torch.Tensor]


class Slab:
    """A run of equal slots over memory that somebody else maps, on a host or a CUDA device. Keeps that memory alive.

    Invariants: `data` is one-dimensional uint8, starts at a multiple of 128 bytes and covers slots * slot_bytes;
    views are made once per layout and share its memory; nothing is written here. `pinned` says that a CUDA device
    may read host memory asynchronously: whoever registers or releases the mapping sets it.
    """

    def __init__(
        self,
        data: torch.Tensor,
        slot_bytes: int,
        *,
        slots: int | None = None,
        writable: bool = True,
        pinned: bool = False,
    ) -> None:
        """`data` uint8 [n]; the bytes behind the last whole slot stay unused. Raises LayoutError on a bad size."""
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise LayoutError(f"slab memory is {data.dtype} {tuple(data.shape)}: expected contiguous uint8 [bytes]")
        if slot_bytes < ALIGNMENT or slot_bytes % ALIGNMENT:
            raise LayoutError(f"slot_bytes is {slot_bytes}: expected a multiple of {ALIGNMENT}")
        fitting = data.numel() // slot_bytes
        if slots is not None and not 0 < slots <= fitting:
            raise LayoutError(f"{slots} slots of {slot_bytes} bytes: expected 1 to {fitting}, what the memory holds")
        if fitting < 1:
            raise LayoutError(f"slab of {data.numel()} bytes: expected at least one slot of {slot_bytes} bytes")
        if data.data_ptr() % ALIGNMENT:
            raise LayoutError(f"slab memory at {data.data_ptr():#x}: expected an address divisible by {ALIGNMENT}")
        if data.is_inference():
            data = _ordinary(data)
        self.data = data
        self.device = data.device
        self.pinned = pinned
        self.slot_bytes = slot_bytes
        self.slots = fitting if slots is None else slots
        self.writable = writable
        self.base_address = data.data_ptr()
        # One for each codec of its layers.
        self._views: tuple[tuple[BlockLayout, BlockViews, list[LayerViews]], ...] = ()

    @classmethod
    def from_buffer(cls, buffer: Any, slot_bytes: int, *, slots: int | None = None) -> Slab:
        """A slab over any buffer (mmap, memoryview, array). Read-only buffers give a slab that codecs don't write.

        The buffer stays exported while the slab or a view of it lives: closing an mmap too early raises BufferError.
        """
        array = np.frombuffer(buffer, dtype=np.uint8)
        writable = bool(array.flags.writeable)
        # A tensor made in inference mode could not be written outside it later.
        with torch.inference_mode(False):
            data = torch.from_numpy(array if writable else np.asarray(_Readable(array)))
        return cls(data, slot_bytes, slots=slots, writable=writable)

    @classmethod
    def allocate(cls, slot_bytes: int, slots: int, *, device: torch.device | str = "cpu", pinned: bool = False) -> Slab:
        """A slab in this process's own memory (with `pinned`, host memory that CUDA reads), aligned and not cleared."""
        with torch.inference_mode(False):
            raw = torch.empty(slots * slot_bytes + ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
            skip = -raw.data_ptr() % ALIGNMENT
            return cls(raw[skip : skip + slots * slot_bytes], slot_bytes, pinned=pinned)

    def address(self, slot: int) -> int:
        """Address of the slot's first byte. Raises LayoutError outside [0, slots)."""
        self.check_slot(slot)
        return self.base_address + slot * self.slot_bytes

    def check_slot(self, slot: int) -> None:
        """Raises LayoutError outside [0, slots)."""
        if not 0 <= slot < self.slots:
            raise LayoutError(f"slot {slot}: expected 0 to {self.slots - 1}")

    def check_writable(self) -> None:
        """Raises TableError if the slab is mapped read-only."""
        if not self.writable:
            raise TableError("the block lies in read-only memory: copy its used part into a private block first")

    def slot_tensor(self, slot: int) -> torch.Tensor:
        """The slot's bytes as uint8 [slot_bytes] on the slab's device, for copies; shares its memory."""
        self.check_slot(slot)
        return self.data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def slot_buffer(self, slot: int) -> memoryview:
        """The slot's bytes, for checksums and transfers. Valid while the slab lives. LayoutError on device memory."""
        if self.device.type != "cpu":
            raise LayoutError(
                f"slot {slot} lies on {self.device}, where the host can't read it: use slot_tensor(slot), or "
                "kvstore_kernels.device_checksum.block_checksums for its checksum"
            )
        view = memoryview((ctypes.c_char * self.slot_bytes).from_address(self.address(slot))).cast("B")
        return view if self.writable else view.toreadonly()

    def views(self, layout: BlockLayout) -> list[LayerViews]:
        """Per layer: part name -> typed strided view [slots, kv_heads, *part.shape]. Cached; raises LayoutError."""
        return self._both_views(layout)[2]

    def block_views(self, layout: BlockLayout) -> BlockViews:
        """Part name -> typed strided view [slots, layers, kv_heads, *part.shape]. Cached; raises LayoutError.

        Empty where layers have several codecs.
        """
        return self._both_views(layout)[1]

    def _both_views(self, layout: BlockLayout) -> tuple[BlockLayout, BlockViews, list[LayerViews]]:
        for views in self._views:
            if views[0] is layout or views[0] == layout:
                return views
        if layout.block_bytes != self.slot_bytes:
            raise LayoutError(f"layout of {layout.block_bytes} bytes a block on slots of {self.slot_bytes} bytes")
        # Views made in inference mode could not be written through outside it later.
        with torch.inference_mode(False):
            whole: BlockViews = {}
            if layout.offsets is None:
                whole = {part.name: self._view(layout, part.name, 0, layout.layers) for part in layout.parts}
                layers = [{name: view[:, layer] for name, view in whole.items()} for layer in range(layout.layers)]
            else:
                layers = [self._layer_views(layout, layer) for layer in range(layout.layers)]
        # One assignment: another thread sees all views or none.
        views = (layout, whole, layers)
        self._views = (*self._views[-_VIEWS_KEPT:], views)
        return views

    def _layer_views(self, layout: BlockLayout, layer: int) -> LayerViews:
        fits = layout.layer_offset(layer) + layout.layer_bytes <= self.slot_bytes
        # Another codec's layer may be smaller, and the last: it has no views of this one.
        return {part.name: self._view(layout, part.name, layer, 1)[:, 0] for part in layout.parts if fits}

    def _view(self, layout: BlockLayout, name: str, layer: int, layers: int) -> torch.Tensor:
        part = layout.part(name)
        dtype = TORCH_DTYPES[part.dtype]
        item = dtype.itemsize
        inner: list[int] = []
        step = 1
        for size in reversed(part.shape):
            inner.insert(0, step)
            step *= size
        typed = self.data[: self.slots * self.slot_bytes].view(dtype)
        return typed.as_strided(
            (self.slots, layers, layout.kv_heads, *part.shape),
            (self.slot_bytes // item, layout.layer_bytes // item, layout.head_bytes // item, *inner),
            typed.storage_offset() + (layout.layer_offset(layer) + part.offset) // item,
        )


def _ordinary(data: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor: it outlives the inference mode it was made in."""
    with torch.inference_mode(False):
        if data.device.type == "cpu":
            return torch.from_numpy(data.numpy())
        return torch.as_tensor(_OnDevice(data), device=data.device)


class _OnDevice:
    """Shows a CUDA tensor to torch as memory of somebody else, which it keeps alive."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.__cuda_array_interface__ = data.__cuda_array_interface__


class _Readable:
    """Shows a read-only array to torch as if it could be written: torch warns about read-only memory otherwise.

    Writing through it is a fault that the mapping itself stops; `Slab.writable` keeps codecs from trying.
    """

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
