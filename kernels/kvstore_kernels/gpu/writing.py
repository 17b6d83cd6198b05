"""A layer's append, prepared once for all steps that look alike."""

from __future__ import annotations

import torch

from kvstore_kernels.gpu.codec import DeviceCodec, even
from kvstore_kernels.gpu.launch import Call, pointer
from kvstore_kernels.gpu.places import Places


class AppendPlan:
    """The launches that store K and V of one shape, one for each layer, made when a layer first needs it.

    Invariant: serves tensors of the shapes, strides, dtype and alignment it was made for, while `places` are the same.
    """

    def __init__(self, on: DeviceCodec, places: Places, k: torch.Tensor, v: torch.Tensor) -> None:
        """For tensors like k [rows, kv_heads, L, k_dim] and v, of one dtype, head dims contiguous."""
        self._on, self._places = on, places
        self._k_shape, self._k_stride = k.shape, k.stride()
        self._v_shape, self._v_stride = v.shape, v.stride()
        self._dtype = k.dtype
        self._aligned = even(k, v)
        length = self._length = k.shape[2]
        tile = 1 if length == 1 else 16 if length <= 16 else 64
        tiles = length if tile == 1 else (length + tile - 2) // tile + 1
        self._grid = (tiles, on.layout.kv_heads, places.rows)
        self._kernel = on.append(k.dtype, tile, aligned=self._aligned)
        self._calls: list[Call | None] = [None] * on.layout.layers

    def serves(self, k: torch.Tensor, v: torch.Tensor, places: Places) -> bool:
        """Whether k and v are like those it was made for."""
        return (
            k.shape == self._k_shape
            and k.stride() == self._k_stride
            and v.stride() == self._v_stride
            and k.dtype is self._dtype
            and v.dtype is self._dtype
            and v.shape == self._v_shape
            and places is self._places
            and not (self._aligned and (k.data_ptr() | v.data_ptr()) & 15)
        )

    def launch(self, layer: int, stream: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores one layer's K and V where `places` aims."""
        call = self._calls[layer]
        if call is None:
            call = self._calls[layer] = self._prepare(layer, k, v)
        call(stream, pointer(k), pointer(v))

    def _prepare(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Call:
        on, places = self._on, self._places
        arguments = (
            pointer(k), pointer(v), on.shifts[layer], on.inverses[layer], places.codes, places.scales, places.table,
            places.targets, on.counter, places.rows, places.width, layer, self._length,
            on.layout.layer_offset(layer), *self._k_stride[:3], *self._v_stride[:3],
        )  # fmt: skip
        return self._kernel.prepared(self._grid, arguments, (0, 1))
