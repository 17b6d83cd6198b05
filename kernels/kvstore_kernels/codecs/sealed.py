"""Codecs that quantize a block when its last token is written; until then its tokens are kept exactly, in a tail.

K of 4 bits: a scale and a lowest value per channel over the block (KIVI, Liu et al., 2024), after the static shift and
channel scale of the codec plan, so that a constant bias costs no bits. K of 8 bits: as in int8. V: rotated by a fixed
orthogonal matrix (QuaRot, Ashkboos et al., 2024), then per token: 4 bits with a scale and a lowest value, 3 and 2 bits
with a scale, levels symmetric about zero.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from kvstore_kernels.codecs.base import Codec, RowTarget
from kvstore_kernels.codecs.packing import pack, unpack
from kvstore_kernels.codecs.placement import pieces
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.codecs.rotation import rotation
from kvstore_kernels.errors import PlanError, TableError
from kvstore_kernels.gpu import sealed_step
from kvstore_kernels.layout import SEALED_BITS, BlockLayout
from kvstore_kernels.table import BlockPlace, BlockTable
from kvstore_kernels.tail import SHORT_WRITE, Tail

if TYPE_CHECKING:
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec
    from kvstore_kernels.slab import LayerViews

_ZERO = torch.zeros(1)
_SMALLEST, _LARGEST = 2.0**-24, 65504.0


class Coded(NamedTuple):
    """Whole blocks, read back: keys float32 [kv_heads, k_dim, tokens] without shift and channel scale (as
    `query_factor` and `shift_scores` expect), values float32 [kv_heads, tokens, v_dim], rotated.
    """

    keys: torch.Tensor
    values: torch.Tensor


class SealedCodec(Codec):
    """A codec of k_bits and v_bits, see the module.

    Invariants: a sealed block's bytes depend on the K and V of its own tokens, the layout and the plan only, unless it
    was written on from its middle after it had been sealed; the table's tail belongs to this codec; numbers that are
    not finite are counted and stored as the channel's shift (0 for V).
    """

    name: ClassVar[str]

    def __init__(self, layout: BlockLayout, plan: CodecPlan) -> None:
        super().__init__(layout, plan)
        self.k_bits, self.v_bits = SEALED_BITS[self.name]
        shape = (layout.layers, layout.kv_heads, layout.k_dim)
        shift, scale = plan.tensor("k_shift", shape), plan.tensor("k_scale", shape)
        if not bool((scale > 0).all()):
            raise PlanError("codec plan tensor 'k_scale' has numbers that are not positive; calibrate this model again")
        self._whole = (shift, scale, scale.reciprocal())
        # [kv_heads, 1, k_dim] for each layer, so that they broadcast over tokens.
        self._shift = [item.unsqueeze(1) for item in shift]
        self._scale = [item.unsqueeze(1) for item in scale]
        self._inverse = [item.unsqueeze(1) for item in scale.reciprocal()]
        self.rotation = rotation(layout.v_dim)
        self._count_lock = threading.Lock()

    def query_factor(self, layer: int, scaling: float) -> torch.Tensor | float:
        """The channel scales times scaling, [kv_heads, 1, k_dim]."""
        factor: torch.Tensor = self._scale[layer] * scaling
        return factor

    def shift_scores(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor | None:
        """The query times the shift, times scaling."""
        return torch.bmm(query, self._shift[layer].transpose(1, 2)).mul_(scaling)

    def statics(self) -> tuple[torch.Tensor, ...]:
        """K's shift, scale and inverse scale, float32 [layers, kv_heads, k_dim] on the CPU."""
        return self._whole

    def device_codec(self, device: torch.device) -> SealedDeviceCodec:
        """Its statics and kernels on a CUDA device, made at first use."""
        from kvstore_kernels.gpu.sealed.codec import sealed_device_codec

        return sealed_device_codec(self, device)

    # -- writing ----------------------------------------------------------------------------------------------

    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        row_targets: Sequence[RowTarget | tuple[int, int]],
    ) -> None:
        """As Codec.write. A row's tokens come in order: one that starts before the last write's end takes that back.

        Tokens of a block that was sealed and is now written again from its middle are read back from their codes.
        """
        if k.device.type != "cpu":
            sealed_step(self, table, k.device).append(table, layer, k, v, row_targets)
            return
        length = self.checked_length(layer, k, v, table, row_targets)
        k, v = self._finite(layer, k.detach(), self._shift[layer]), self._finite(layer, v.detach(), _ZERO)
        tail = table.tail
        if tail is None:
            tail = table.tail = Tail(self.layout.layers, table.rows, table.block_tokens)
        for row, (skip, start) in enumerate(row_targets):
            if skip < 0:
                raise TableError(f"row {row} skips {skip} positions: expected 0 or more")
            if skip >= length:
                continue
            end = start + length - skip
            if start < 0 or end > table.capacity(row):
                raise TableError(
                    f"tokens {start} to {end} of row {row}: its blocks hold {table.capacity(row)} tokens; "
                    "append blocks first"
                )
            self._append_row(layer, k[row, :, skip:], v[row, :, skip:], table, tail, row, start, end)

    def _append_row(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        tail: Tail,
        row: int,
        start: int,
        end: int,
    ) -> None:
        size = table.block_tokens
        slab, _ = table.entry(row, start // size)
        slab.check_writable()
        held_k, held_v = (held[row] for held in tail.buffers(layer, k[None], v[None]))
        self._rewind(layer, table, tail, row, start)
        if start == 0:
            tail.first[layer][row] = (k[:, 0].clone(), v[:, 0].clone())
        # The block that is being filled moves to the front.
        base, begin = tail.base[layer][row], start // size * size
        if begin != base:
            for held in (held_k, held_v):
                held[:, : start - begin] = held[:, begin - base : start - base].clone()
            tail.base[layer][row] = base = begin
        inside, length = start - base, end - start
        if inside + length <= size + SHORT_WRITE and length <= SHORT_WRITE:
            held_k[:, inside : inside + length], held_v[:, inside : inside + length] = k, v
            if inside + length >= size:
                self._seal(layer, table, row, base, held_k[:, :size], held_v[:, :size])
        else:
            at = 0
            if inside:
                at = min(size - inside, length)
                held_k[:, inside : inside + at], held_v[:, inside : inside + at] = k[:, :at], v[:, :at]
                if inside + at == size:
                    self._seal(layer, table, row, base, held_k[:, :size], held_v[:, :size])
            whole = (length - at) // size * size
            if whole:
                self._seal(layer, table, row, start + at, k[:, at : at + whole], v[:, at : at + whole])
            rest = length - at - whole
            if rest or whole:
                tail.base[layer][row] = end - rest
                held_k[:, :rest], held_v[:, :rest] = k[:, length - rest :], v[:, length - rest :]
        tail.end[layer][row] = end

    def _rewind(self, layer: int, table: BlockTable, tail: Tail, row: int, start: int) -> None:
        """Makes the tail end at token `start`, reading back what it doesn't hold."""
        base, end, size = tail.base[layer][row], tail.end[layer][row], table.block_tokens
        if start == end:
            return
        begin = start // size * size
        if not (start < end and base <= begin):
            held_k, held_v = tail.k[layer], tail.v[layer]
            assert held_k is not None
            assert held_v is not None
            if begin < start:
                k, v = self._decoded(layer, table, row, begin, start)
                held_k[row, :, : start - begin], held_v[row, :, : start - begin] = k, v
            tail.base[layer][row] = begin
        tail.end[layer][row] = start

    def _seal(self, layer: int, table: BlockTable, row: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Quantizes whole blocks: k [kv_heads, tokens, k_dim], v; the first token is the row's token `start`."""
        size = table.block_tokens
        for slab, slot, blocks, _, at, tokens in pieces(table, row, start, k.shape[1], self.tile_blocks):
            slab.check_writable()
            views = slab.views(self.layout)[layer]
            shape = (k.shape[0], blocks, size, -1)
            parts = self._coded_k(layer, k[:, at : at + tokens].float().reshape(shape))
            parts |= self._coded_v(v[:, at : at + tokens].float().reshape(shape))
            for name, codes in parts.items():
                views[name].narrow(0, slot, blocks).copy_(codes.transpose(0, 1))

    def _coded_k(self, layer: int, k: torch.Tensor) -> dict[str, torch.Tensor]:
        """K [kv_heads, blocks, tokens, k_dim] -> parts [kv_heads, blocks, ...]."""
        plain = (k - self._shift[layer].unsqueeze(1)) * self._inverse[layer].unsqueeze(1)
        plain = plain.clamp_(-_LARGEST, _LARGEST)
        if self.k_bits == 8:
            scales = _stored(plain.abs().amax(-1) / 127)
            codes = (plain / scales.float().unsqueeze(-1)).round_().clamp_(-127, 127)
            return {"k_codes": codes, "k_scales": scales}
        low, high = plain.aminmax(dim=2)
        lows, scales = low.half(), _stored((high - low) / 15)
        codes = ((plain - lows.float().unsqueeze(2)) / scales.float().unsqueeze(2)).round_().clamp_(0, 15)
        return {"k_codes": pack(codes.to(torch.uint8), 4, 2), "k_scales": torch.stack((scales, lows), dim=2)}

    def _coded_v(self, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """V [kv_heads, blocks, tokens, v_dim] -> parts [kv_heads, blocks, ...]."""
        # One product of one shape a block: its rounding must not depend on how many blocks come at once.
        turned = torch.stack([block @ self.rotation for block in v.flatten(0, 1)]).view(v.shape)
        turned = turned.clamp_(-_LARGEST, _LARGEST).transpose(2, 3)
        if self.v_bits == 4:
            low, high = turned.aminmax(dim=2)
            lows, scales = low.half(), _stored((high - low) / 15)
            codes = ((turned - lows.float().unsqueeze(2)) / scales.float().unsqueeze(2)).round_().clamp_(0, 15)
            return {"v_codes": pack(codes.to(torch.uint8), 4, 3), "v_scales": torch.stack((scales, lows), dim=2)}
        half = 2 ** (self.v_bits - 1)
        # The levels are half steps: the largest value saturates by half of one. A wider or a closer grid lost more.
        scales = _stored(turned.abs().amax(2) / half)
        steps = (turned / scales.float().unsqueeze(2)).floor_().clamp_(-half, half - 1)
        codes = (steps + half).to(torch.uint8)
        parts = {"v_codes": pack(codes & 3, 2, 3), "v_scales": scales}
        if self.v_bits == 3:
            parts["v_high"] = pack(codes >> 2, 1, 3)
        return parts

    # -- reading ----------------------------------------------------------------------------------------------

    def blocks(self, views: LayerViews, slots: torch.Tensor | slice) -> Coded:
        """The blocks in these slots of a slab's views of the layer, in that order."""
        picked = {name: view[slots].transpose(0, 1) for name, view in views.items()}
        k_codes, k_scales = picked["k_codes"], picked["k_scales"].float()
        if self.k_bits == 8:
            keys = k_codes.float() * k_scales.unsqueeze(-1)
        else:
            keys = unpack(k_codes, 4, 2).float() * k_scales[:, :, :1] + k_scales[:, :, 1:]
        v_codes, v_scales = picked["v_codes"], picked["v_scales"].float()
        if self.v_bits == 4:
            values = unpack(v_codes, 4, 3).float() * v_scales[:, :, :1] + v_scales[:, :, 1:]
        else:
            steps = unpack(v_codes, 2, 3).float()
            if self.v_bits == 3:
                steps += unpack(picked["v_high"], 1, 3).float() * 4
            values = (steps + (0.5 - 2 ** (self.v_bits - 1))) * v_scales.unsqueeze(2)
        heads = keys.shape[0]
        return Coded(
            keys.reshape(heads, -1, self.layout.k_dim).transpose(1, 2),
            values.transpose(2, 3).reshape(heads, -1, self.layout.v_dim),
        )

    def read(
        self, layer: int, table: BlockTable, row: int, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Codec.read; tokens that are kept exactly are given exactly."""
        stop = table.tokens(row) if stop is None else stop
        size, tail = table.block_tokens, table.tail
        exact = stop if tail is None or tail.end[layer][row] < stop else max(start, tail.base[layer][row])
        exact = min(exact, stop)
        device = table.device
        k = torch.empty(self.layout.kv_heads, stop - start, self.layout.k_dim, device=device)
        v = torch.empty(self.layout.kv_heads, stop - start, self.layout.v_dim, device=device)
        if device.type != "cpu":
            sealed_step(self, table, device).decoded(table, row, layer, start, exact, k, v)
        else:
            for begin in range(start // size * size, exact, size):
                first, last = max(start, begin), min(exact, begin + size)
                used = slice(first - start, last - start)
                k[:, used], v[:, used] = self._decoded(layer, table, row, first, last)
        if tail is not None and exact < stop:
            base = tail.base[layer][row]
            for held, target in ((tail.k[layer], k), (tail.v[layer], v)):
                assert held is not None
                target[:, exact - start :] = held[row, :, exact - base : stop - base].float()
        if tail is not None and start == 0 < stop and (known := tail.first[layer][row]) is not None:
            k[:, 0], v[:, 0] = known[0].float(), known[1].float()
        return k, v

    def _decoded(
        self, layer: int, table: BlockTable, row: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [start, stop) of one sealed block: float32 [kv_heads, n, k_dim] and [.., v_dim]."""
        size = table.block_tokens
        slab, slot = table.entry(row, start // size)
        coded = self.blocks(slab.views(self.layout)[layer], slice(slot, slot + 1))
        used = slice(start % size, start % size + stop - start)
        k = coded.keys.transpose(1, 2)[:, used] * self._scale[layer] + self._shift[layer]
        return k, coded.values[:, used] @ self.rotation.T

    def know_first(self, table: BlockTable, row: int, exact: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Tells the row's first token: K [kv_heads, k_dim] and V of each layer."""
        if table.tail is None:
            table.tail = Tail(self.layout.layers, table.rows, table.block_tokens)
        for layer, (k, v) in enumerate(exact):
            table.tail.first[layer][row] = (k, v)

    def coded_end(self, layer: int, table: BlockTable, row: int, end: int) -> int:
        """Up to which token (a multiple of the block size) the row's tokens [0, end) must be read from codes."""
        begin = end // table.block_tokens * table.block_tokens
        tail = table.tail
        # What the tail doesn't hold of the last block, `read` decodes.
        return begin if tail is None or tail.end[layer][row] < end else min(tail.base[layer][row], begin)

    def folded_first(self, layer: int, tail: Tail | None, row: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The row's first token as `blocks` would give it, if it is known exactly: keys [kv_heads, k_dim], values."""
        known = None if tail is None else tail.first[layer][row]
        if known is None:
            return None
        k = (known[0].float() - self._shift[layer][:, 0]) * self._inverse[layer][:, 0]
        return k, known[1].float() @ self.rotation

    def copy_tokens(self, src: BlockPlace, dst: BlockPlace, count: int) -> None:
        """Copies the whole block: codes share their scales. What is in use of it is read back when it is written on."""
        if not 0 <= count <= self.layout.block_tokens:
            raise TableError(f"count {count}: expected 0 to {self.layout.block_tokens}")
        dst.slab.check_writable()
        dst.slab.slot_tensor(dst.slot).copy_(src.slab.slot_tensor(src.slot))

    def _finite(self, layer: int, tensor: torch.Tensor, instead: torch.Tensor) -> torch.Tensor:
        good = torch.isfinite(tensor)
        if bool(good.all()):
            return tensor
        bad = good.logical_not_()
        with self._count_lock:
            self._nonfinite[layer] += int(bad.sum())
        return torch.where(bad, instead.to(tensor.dtype), tensor)


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float16 holds them: positive and finite."""
    return scales.clamp(_SMALLEST, _LARGEST).half()
