"""The rounding error of committed blocks, from their own bytes.

A code lies within half a step of what it stands for, anywhere in there with the same chance: mean square step**2 / 12.
So a block tells its own error, relative to what it holds, without what it was made of: for K and for V of a layer

    sqrt( mean(step**2 / 12) / mean(value**2) )

over all heads, tokens and channels, in the domain that the codec rounds in: K without the plan's shift and channel
scale, V rotated where the codec rotates it. Its steps are its scales. What a scale saturates isn't seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvstore_kernels.codecs.packing import unpack
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import SEALED_BITS, BlockLayout
from kvstore_kernels.slab import Slab

# Of the codes that are unpacked to float32 at once; one block is always taken. A GPU is given more: launches cost.
_NUMBERS_AT_ONCE = {"cpu": 4 << 20, "cuda": 16 << 20}
# The smallest scale that codecs store: what has it was all zeros, or as good as.
_SMALLEST_SCALE = 2.0**-24
_Parts = dict[str, torch.Tensor]
# Mean squares of steps and of values.
_Power = tuple[torch.Tensor, torch.Tensor]


def block_noise(slab: Slab, slots: Sequence[int], layout: BlockLayout) -> torch.Tensor:
    """The error of K and of V in each layer of these slots' blocks: float32 [slots, layers, 2], on the CPU.

    0 where nothing is rounded (passthrough) or all is zero; always finite. On a CUDA slab the work goes to the current
    stream, which is waited for once at the end. Raises LayoutError on a slot or a layout that the slab doesn't have.
    """
    if layout.block_bytes != slab.slot_bytes:
        raise LayoutError(f"layout of {layout.block_bytes} bytes a block on slots of {slab.slot_bytes} bytes")
    for slot in slots:
        slab.check_slot(slot)
    codecs = layout.layer_codecs
    if not slots or set(codecs) == {"passthrough"}:
        return torch.zeros(len(slots), layout.layers, 2)
    # Never of inference mode: the caller is a thread of its own.
    with torch.inference_mode(False), torch.no_grad():
        numbers = layout.layers * layout.kv_heads * layout.block_tokens * max(layout.k_dim, layout.v_dim)
        at_once = max(1, _NUMBERS_AT_ONCE[slab.device.type] // numbers)
        found = []
        for first in range(0, len(slots), at_once):
            picked = torch.tensor(slots[first : first + at_once])
            if slab.device.type == "cuda":
                picked = picked.pin_memory().to(slab.device, non_blocking=True)
            noise = torch.zeros(len(picked), layout.layers, 2, device=slab.device)
            for codec, layers, parts in _parts(slab, layout, codecs):
                if codec != "passthrough":
                    noise[:, layers] = _relative(codec, {name: part[picked] for name, part in parts.items()})
            found.append(noise)
        return torch.cat(found).cpu()


def largest_noise(noise: torch.Tensor) -> list[float]:
    """A block's error, of each: the largest of what `block_noise` gives for it."""
    return [float(value) for value in noise.amax((1, 2))] if noise.numel() else []


def _parts(slab: Slab, layout: BlockLayout, codecs: Sequence[str]) -> Iterator[tuple[str, slice, _Parts]]:
    """Codec, layers, and their parts [slots, layers, kv_heads, ...]: all layers at once if they are of one codec."""
    whole = slab.block_views(layout)
    if whole:
        yield codecs[0], slice(None), whole
        return
    own = {codec: layout.of(codec) for codec in set(codecs)}
    for layer, codec in enumerate(codecs):
        views = slab.views(own[codec])[layer]
        yield codec, slice(layer, layer + 1), {name: view.unsqueeze(1) for name, view in views.items()}


def _relative(codec: str, parts: _Parts) -> torch.Tensor:
    """Parts [n, layers, kv_heads, ...] -> [n, layers, 2]."""
    k_bits, v_bits = SEALED_BITS.get(codec, (8, 8))
    k_codes, k_scales = parts["k_codes"], parts["k_scales"].float()
    if k_bits == 8:
        # Codes [tokens, k_dim], a scale a token.
        k = _power(k_codes.float(), k_scales, None, -1)
    else:
        # Codes [tokens, k_dim], a scale and a lowest value a channel.
        k = _power(unpack(k_codes, 4, k_codes.dim() - 2).float(), k_scales[..., 0, :], k_scales[..., 1, :], -2)
    v_codes, v_scales = parts["v_codes"], parts["v_scales"].float()
    # Codes [v_dim, tokens], a scale (4 bits: and a lowest value) a token.
    last = v_codes.dim() - 1
    if v_bits == 8:
        v = _power(v_codes.float(), v_scales, None, -2)
    elif v_bits == 4:
        v = _power(unpack(v_codes, 4, last).float(), v_scales[..., 0, :], v_scales[..., 1, :], -2)
    else:
        codes = unpack(v_codes, 2, last).float()
        if v_bits == 3:
            codes += unpack(parts["v_high"], 1, last).float() * 4
        v = _power(codes + (0.5 - 2 ** (v_bits - 1)), v_scales, None, -2)
    return torch.stack((_ratio(*k), _ratio(*v)), -1)


def _power(codes: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor | None, along: int) -> _Power:
    """Mean squares of steps and of values [n, layers]. `codes` share a scale (and a lowest value) along a dimension."""
    steps = torch.where(scales > _SMALLEST_SCALE, scales, 0.0)
    values = scales.square() * codes.square().mean(along)
    if lows is not None:
        values += 2 * scales * lows * codes.mean(along) + lows.square()
    return steps.square().mean((2, 3)) / 12, values.mean((2, 3))


def _ratio(steps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    ratio = torch.where((steps > 0) & (values > 0), steps / values, 0.0).sqrt()
    return torch.nan_to_num(ratio, nan=torch.finfo(torch.float32).max, posinf=torch.finfo(torch.float32).max)
