"""Layers of several codecs in one block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_kernels.codecs.base import Codec, RowTarget
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.table import BlockPlace, BlockTable


class MixedCodec(Codec):
    """A codec for each layer. Each codec sees all layers' numbers and works on its own ones.

    Invariants: `of(layer)` is what writes and reads a layer; layers keep their numbers, so a table's tail and its
    cached views serve all codecs.
    """

    name = "mixed"

    def __init__(self, layout: BlockLayout, plan: CodecPlan, codecs: dict[str, type[Codec]]) -> None:
        """`codecs` are the classes of all names in the layout's codec. Raises LayoutError, PlanError."""
        if plan.codec != layout.codec:
            raise LayoutError(f"codec plan of {plan.codec!r} given to a layout of {layout.codec!r}")
        self._adopt(layout, plan)
        self._each = {name: made(layout.of(name), plan.of(name)) for name, made in codecs.items()}
        self._layers = [self._each[name] for name in layout.layer_codecs]
        for name, each in self._each.items():
            each.own_layers = [layer for layer, own in enumerate(layout.layer_codecs) if own == name]

    @property
    def members(self) -> list[Codec]:
        """Each codec once."""
        return list(self._each.values())

    def of(self, layer: int) -> Codec:
        """The layer's codec."""
        if not 0 <= layer < len(self._layers):
            raise LayoutError(f"layer {layer}: expected 0 to {len(self._layers) - 1}")
        return self._layers[layer]

    @property
    def nonfinite_by_layer(self) -> list[int]:
        """As Codec.nonfinite_by_layer."""
        return [sum(counts) for counts in zip(*(each.nonfinite_by_layer for each in self.members), strict=True)]

    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        row_targets: Sequence[RowTarget | tuple[int, int]],
    ) -> None:
        """As Codec.write."""
        self.of(layer).write(layer, k, v, table, row_targets)

    def read(
        self, layer: int, table: BlockTable, row: int, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Codec.read."""
        return self.of(layer).read(layer, table, row, start, stop)

    def copy_tokens(self, src: BlockPlace, dst: BlockPlace, count: int) -> None:
        """Copies the whole block."""
        if not 0 <= count <= self.layout.block_tokens:
            raise TableError(f"count {count}: expected 0 to {self.layout.block_tokens}")
        dst.slab.check_writable()
        dst.slab.slot_tensor(dst.slot).copy_(src.slab.slot_tensor(src.slot))

    def query_factor(self, layer: int, scaling: float) -> torch.Tensor | float:
        """As Codec.query_factor."""
        return self.of(layer).query_factor(layer, scaling)

    def shift_scores(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor | None:
        """As Codec.shift_scores."""
        return self.of(layer).shift_scores(layer, query, scaling)
