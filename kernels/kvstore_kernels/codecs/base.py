"""What every codec does: write, read and copy the tokens of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.errors import LayoutError, PlanError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.scratch import TILE_NUMBERS
from kvstore_kernels.table import BlockPlace, BlockTable

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RowTarget(NamedTuple):
    """Where one row's fresh tokens go: the first `skip` positions are left padding and aren't stored, the token after
    them goes to the row's token index `start`, the rest behind it. skip >= length stores nothing of the row.
    """

    skip: int
    start: int


class Codec(ABC):
    """Turns K and V into a block's bytes and back, for one layout and one codec plan.

    Invariants: a block's bytes depend on the K and V of its own tokens, the layout and the plan only: not on other
    rows, nor on how a sequence was cut into writes. Safe to use from several threads on different blocks.
    """

    name: ClassVar[str]

    def __init__(self, layout: BlockLayout, plan: CodecPlan) -> None:
        if layout.codec != self.name:
            raise LayoutError(f"layout of codec {layout.codec!r} given to codec {self.name!r}")
        if plan.codec != self.name:
            raise PlanError(f"codec plan of {plan.codec!r} given to codec {self.name!r}")
        self._adopt(layout, plan)

    def _adopt(self, layout: BlockLayout, plan: CodecPlan) -> None:
        self.layout = layout
        self.plan = plan
        self.tile_blocks = max(
            1, TILE_NUMBERS // (layout.kv_heads * max(layout.k_dim, layout.v_dim) * layout.block_tokens)
        )
        self._nonfinite = [0] * layout.layers
        # The layers that it writes and reads, in order.
        self.own_layers: Sequence[int] = range(layout.layers)
        # What this codec keeps on CUDA devices: a DeviceCodec each.
        self.on_devices: dict[torch.device, Any] = {}

    @property
    def members(self) -> list[Codec]:
        """The codecs of its layers, each once."""
        return [self]

    def of(self, layer: int) -> Codec:  # noqa: ARG002
        """The codec of a layer."""
        return self

    def device_codec(self, device: torch.device) -> Any:
        """Its statics and kernels on a CUDA device, made at first use. Of several codecs each has its own."""
        raise LayoutError(f"codec {self.layout.codec!r} has none on {device}: ask its members")

    @property
    def nonfinite_by_layer(self) -> list[int]:
        """Input numbers that were inf or NaN and were stored as if they were the channel's shift (0 for V), by layer.

        Waits for the devices that counted some.
        """
        counts = list(self._nonfinite)
        for on in list(self.on_devices.values()):
            counts = [known + more for known, more in zip(counts, on.nonfinite.tolist(), strict=True)]
        return counts

    @property
    def nonfinite(self) -> int:
        """Input numbers that were inf or NaN, all layers together; each was stored as a harmless finite value."""
        return sum(self.nonfinite_by_layer)

    @abstractmethod
    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        row_targets: Sequence[RowTarget | tuple[int, int]],
    ) -> None:
        """Stores one layer's fresh tokens: k [rows, kv_heads, L, k_dim], v [rows, kv_heads, L, v_dim].

        float32, bfloat16 or float16, any strides; detached. `row_targets` has one RowTarget (or a (skip, start) pair)
        a row. The table must have blocks for the tokens (capacity); its token counts are neither read nor changed.
        Raises TableError past the row's blocks or on read-only memory, LayoutError on shapes or dtypes.
        """

    @abstractmethod
    def read(
        self, layer: int, table: BlockTable, row: int, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's tokens [start, stop) (default: all), dequantized: float32 [kv_heads, n, k_dim] and [.., v_dim].

        On the CUDA device that holds blocks of the table, if one does; else on the CPU.
        """

    @abstractmethod
    def copy_tokens(self, src: BlockPlace, dst: BlockPlace, count: int) -> None:
        """Copies the first `count` tokens of a block into another, code for code, all layers, K and V."""

    @abstractmethod
    def query_factor(self, layer: int, scaling: float) -> torch.Tensor | float:
        """What a float32 query [kv_heads, n, k_dim] is multiplied by so that its product with codes is a score."""

    @abstractmethod
    def shift_scores(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor | None:
        """What codes leave out of every score of a query [kv_heads, n, k_dim]: float32 [kv_heads, n, 1]; None: nothing.

        It is the same for all tokens, so it matters only beside scores that are not made from codes (fresh
        keys, sinks) and where the softmax doesn't see the score itself (soft-cap).
        """

    def checked_length(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        row_targets: Sequence[RowTarget | tuple[int, int]],
    ) -> int:
        """L, when everything fits what `write` asks for; LayoutError otherwise."""
        layout = self.layout
        if not 0 <= layer < layout.layers:
            raise LayoutError(f"layer {layer}: expected 0 to {layout.layers - 1}")
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise LayoutError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)}: expected [rows, kv_heads, L, head dim] of one rows and L"
            )
        rows, heads, length, k_dim = k.shape
        if (heads, k_dim, v.shape[3]) != (layout.kv_heads, layout.k_dim, layout.v_dim):
            raise LayoutError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)}: expected {layout.kv_heads} heads of dim {layout.k_dim} "
                f"for K and {layout.v_dim} for V"
            )
        if rows != table.rows or rows != len(row_targets) or table.block_tokens != layout.block_tokens:
            raise LayoutError(
                f"{rows} rows of k, {table.rows} table rows of blocks of {table.block_tokens}, {len(row_targets)} "
                f"targets: expected equal rows and blocks of {layout.block_tokens}"
            )
        self._check_dtypes(k.dtype, v.dtype)
        return length

    def _check_dtypes(self, k: torch.dtype, v: torch.dtype) -> None:
        if k not in INPUT_DTYPES or v not in INPUT_DTYPES:
            raise LayoutError(f"k is {k} and v is {v}: expected float32, bfloat16 or float16")
