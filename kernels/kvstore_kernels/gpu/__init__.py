"""CUDA forms of the codecs and of attention. Importing this imports neither Triton nor CUDA.

The functions of the package choose by their tensors' device; what a table needs there is its DeviceStep, kept in
`table.view_cache`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_kernels.errors import UnsupportedAttentionError
from kvstore_kernels.layout import SEALED_BITS, BlockLayout
from kvstore_kernels.table import ALL_ROWS, DEVICE_STEP, BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.codecs.tokenwise import TokenCodec
    from kvstore_kernels.gpu.step import DeviceStep

MOST_HEAD_DIM = 256


def check_supported(layout: BlockLayout, device: torch.device | str) -> None:
    """Raises UnsupportedAttentionError where no kernel can serve a model of this layout on the device."""
    device = torch.device(device)
    if device.type == "cpu":
        return
    unserved = sorted(set(layout.layer_codecs) & set(SEALED_BITS))
    if unserved or layout.offsets is not None:
        what = f"codec {', '.join(unserved)}" if unserved else f"{layout.codec}, several codecs in one model,"
        raise UnsupportedAttentionError(
            f'{what} has no CUDA kernels yet: use codec="int8" on {device}, or compute on the CPU'
        )
    if device.type != "cuda":
        raise UnsupportedAttentionError(f"no kernels for {device}: expected cpu or a CUDA device")
    for name, size in (("k_dim", layout.k_dim), ("v_dim", layout.v_dim)):
        if size > MOST_HEAD_DIM:
            raise UnsupportedAttentionError(
                f"{name} is {size}: CUDA kernels serve heads of at most {MOST_HEAD_DIM}; compute this model on the "
                'CPU, or attach with fallback="native"'
            )
    try:
        import triton  # noqa: F401
    except ImportError as missing:
        raise UnsupportedAttentionError(
            f"Triton is missing ({missing}): CUDA kernels need it; pip install triton"
        ) from None
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UnsupportedAttentionError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: CUDA kernels need 8.0 or "
            "newer; compute on the CPU instead"
        )


def prepare(
    codec: TokenCodec, device: torch.device, query_heads: int, dtype: torch.dtype, *, fetched: bool = False
) -> None:
    """Compiles what decode steps and prompts need on a CUDA device: half a minute, once for a machine.

    `fetched`: the model's blocks lie in host memory, or on a peer device, and are fetched.
    """
    from kvstore_kernels.gpu.codec import device_codec

    check_supported(codec.layout, device)
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    device_codec(codec, device).prepare(query_heads // codec.layout.kv_heads, dtype, fetched=fetched)


def device_step(codec: TokenCodec, table: BlockTable, device: torch.device) -> DeviceStep:
    """The table's state on a CUDA device, made at first use."""
    found = table.view_cache.get((ALL_ROWS, DEVICE_STEP))
    if found is not None:
        kept: DeviceStep = found[1]
        if kept.codec is codec and kept.device == device:
            return kept
    from kvstore_kernels.gpu.step import DeviceStep

    # A step may be used outside the inference mode it was made in.
    with torch.inference_mode(False):
        made = DeviceStep(codec, table.rows, device)
    table.view_cache[ALL_ROWS, DEVICE_STEP] = (None, made)
    return made
