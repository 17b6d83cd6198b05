"""Codecs whose every token is encoded by itself, at once: a block needs no tail."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from kvstore_kernels.codecs.base import Codec, RowTarget
from kvstore_kernels.codecs.placement import pieces, token_place
from kvstore_kernels.compiled import compiled_step
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.gpu import device_step
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockPlace, BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.gpu.codec import DeviceCodec


class TokenCodes(NamedTuple):
    """Codes of one token a row: k [rows, kv_heads, k_dim], v [rows, kv_heads, v_dim], scales [rows, kv_heads, 2]."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None


class TokenCodec(Codec):
    """A codec of one code a number and at most one scale a token for K and one for V.

    Invariants: a token's bytes depend on its own K and V, the layout and the plan only.
    """

    # Whether scores and weights must be multiplied by one scale per token (parts k_scales and v_scales).
    scaled: ClassVar[bool]

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
        if k.device.type != "cpu":
            device_step(self, table, k.device).append(table, layer, k, v, row_targets)
            return
        length = self.checked_length(layer, k, v, table, row_targets)
        k, v = k.detach(), v.detach()
        step = compiled_step(self, table)
        if step is not None and step.append(table, layer, k, v, row_targets):
            return
        if length == 1:
            self._append(layer, k, v, table, row_targets)
            return
        for row, (skip, start) in enumerate(row_targets):
            if skip >= length:
                continue
            if skip < 0:
                raise TableError(f"row {row} skips {skip} positions: expected 0 or more")
            for slab, slot, blocks, inside, at, tokens in pieces(table, row, start, length - skip, self.tile_blocks):
                slab.check_writable()
                first = skip + at
                views = slab.views(self.layout)[layer]
                k_tile, v_tile = k[row, :, first : first + tokens], v[row, :, first : first + tokens]
                for which, (codes, scales) in (
                    ("k", self._encode_k(layer, k_tile)),
                    ("v", self._encode_v(layer, v_tile)),
                ):
                    if blocks:
                        self._store_blocks(views, which, slot, blocks, codes, scales)
                    else:
                        self._store_inside(views, which, slot, inside, codes, scales)

    def read(
        self, layer: int, table: BlockTable, row: int, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's tokens [start, stop) (default: all), dequantized: float32 [kv_heads, n, k_dim] and [.., v_dim].

        On the CUDA device that holds blocks of the table, if one does; else on the CPU.
        """
        layout = self.layout
        tokens = (table.tokens(row) if stop is None else stop) - start
        device = table.device
        if device.type != "cpu":
            return device_step(self, table, device).read(table, row, layer, start, tokens, torch.float32)
        k = torch.empty(layout.kv_heads, tokens, layout.k_dim)
        v = torch.empty(layout.kv_heads, tokens, layout.v_dim)
        for slab, slot, _, inside, at, count in pieces(table, row, start, tokens, 1):
            views = {name: view[slot] for name, view in slab.views(layout)[layer].items()}
            used = slice(inside, inside + count)
            k[:, at : at + count] = views["k_codes"][:, used]
            v[:, at : at + count] = views["v_codes"][:, :, used].transpose(1, 2)
            if self.scaled:
                k[:, at : at + count] *= views["k_scales"][:, used, None].float()
                v[:, at : at + count] *= views["v_scales"][:, used, None].float()
        return self._decoded_k(layer, k), v

    def copy_tokens(self, src: BlockPlace, dst: BlockPlace, count: int) -> None:
        """Copies the first `count` tokens of a block into another, code for code, all layers, K and V."""
        if not 0 <= count <= self.layout.block_tokens:
            raise TableError(f"count {count}: expected 0 to {self.layout.block_tokens}")
        dst.slab.check_writable()
        src.slab.check_slot(src.slot)
        dst.slab.check_slot(dst.slot)
        targets = dst.slab.block_views(self.layout)
        if not targets:
            raise LayoutError("layers of several codecs are copied together: MixedCodec.copy_tokens")
        if src.slab.device == dst.slab.device:
            sources, source_slot = src.slab.block_views(self.layout), src.slot
        else:
            # Between devices one copy of the whole slot is quicker than many small ones.
            staged = Slab.allocate(src.slab.slot_bytes, 1, device=dst.slab.device)
            staged.data.copy_(src.slab.slot_tensor(src.slot))
            sources, source_slot = staged.block_views(self.layout), 0
        for name, view in sources.items():
            # Tokens are the last axis of V codes and of scales, the last but one of K codes.
            axis = -2 if name == "k_codes" else -1
            source = view[source_slot].narrow(axis, 0, count)
            targets[name][dst.slot].narrow(axis, 0, count).copy_(source)

    def device_codec(self, device: torch.device) -> DeviceCodec:
        """Its statics and kernels on a CUDA device, made at first use."""
        from kvstore_kernels.gpu.codec import device_codec

        return device_codec(self, device)

    @property
    def code_constants(self) -> tuple[float, float, float, float]:
        """Of scaled codecs: largest code, smallest and largest scale, and what is added to a scale to round it up."""
        return (1.0, 1.0, 1.0, 0.0)

    def statics(self) -> tuple[torch.Tensor, ...]:
        """Of scaled codecs: K's shift, scale and inverse scale, float32 [layers, kv_heads, k_dim] on the CPU."""
        return ()

    def static_addresses(self, layer: int) -> tuple[int, int]:  # noqa: ARG002
        """Of scaled codecs: addresses of a layer's K shift and inverse K scale, float32 [kv_heads, k_dim]."""
        return (0, 0)

    @abstractmethod
    def _encode_k(self, layer: int, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K [..., kv_heads, n, k_dim] -> codes of the same shape (any dtype that holds them) and scales [..., n, 1]."""

    @abstractmethod
    def _encode_v(self, layer: int, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """V [..., kv_heads, n, v_dim] -> codes of the same shape (any dtype that holds them) and scales [..., n, 1]."""

    @abstractmethod
    def _decoded_k(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Codes times scales [kv_heads, n, k_dim] -> K."""

    def _append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        row_targets: Iterable[RowTarget | tuple[int, int]],
    ) -> None:
        """One token a row: all rows are encoded together, so that a decode step costs few operations."""
        token = self._encode_token(layer, k, v)
        for row, (skip, start) in enumerate(row_targets):
            if skip > 0:
                continue
            if skip < 0 or not 0 <= start < table.capacity(row):
                raise TableError(
                    f"token {start} of row {row} (skip {skip}): its blocks hold {table.capacity(row)} tokens; "
                    "append blocks first"
                )
            place = token_place(self.layout, table, row, start)
            place.k[layer].copy_(token.k[row])
            place.v[layer].copy_(token.v[row])
            if place.scales is not None and token.scales is not None:
                place.scales[layer].copy_(token.scales[row])

    def _encode_token(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> TokenCodes:
        """One token a row: k [rows, kv_heads, 1, k_dim] and v -> their codes."""
        k_codes, k_scales = self._encode_k(layer, k)
        v_codes, v_scales = self._encode_v(layer, v)
        scales = None
        if k_scales is not None and v_scales is not None:
            scales = torch.cat((k_scales, v_scales), dim=2)[..., 0]
        return TokenCodes(k_codes[:, :, 0], v_codes[:, :, 0], scales)

    def _store_blocks(
        self,
        views: dict[str, torch.Tensor],
        which: str,
        slot: int,
        blocks: int,
        codes: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        size = self.layout.block_tokens
        target = views[f"{which}_codes"].narrow(0, slot, blocks).transpose(0, 1)
        if which == "v":
            target = target.transpose(2, 3)
        target.copy_(codes.view(codes.shape[0], blocks, size, codes.shape[2]))
        if scales is not None:
            target = views[f"{which}_scales"].narrow(0, slot, blocks).transpose(0, 1)
            target.copy_(scales.view(-1, blocks, size))

    def _store_inside(
        self,
        views: dict[str, torch.Tensor],
        which: str,
        slot: int,
        inside: int,
        codes: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        used = slice(inside, inside + codes.shape[1])
        target = views[f"{which}_codes"][slot]
        if which == "v":
            target = target.transpose(1, 2)
        target[:, used].copy_(codes)
        if scales is not None:
            views[f"{which}_scales"][slot, :, used].copy_(scales[:, :, 0])
