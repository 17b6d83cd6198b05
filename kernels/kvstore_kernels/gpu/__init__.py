"""CUDA forms of the codecs and of attention. Importing this imports neither Triton nor CUDA.

The functions of the package choose by their tensors' device; what a table needs there is its DeviceStep, kept in
`table.view_cache`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore_kernels.errors import UnsupportedAttentionError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.table import ALL_ROWS, DEVICE_STEP, BlockTable

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import Codec
    from kvstore_kernels.codecs.sealed import SealedCodec
    from kvstore_kernels.codecs.tokenwise import TokenCodec
    from kvstore_kernels.gpu.sealed.step import SealedStep
    from kvstore_kernels.gpu.step import DeviceStep

MOST_HEAD_DIM = 256


def check_supported(layout: BlockLayout, device: torch.device | str) -> None:
    """Raises UnsupportedAttentionError where no kernel can serve a model of this layout on the device."""
    device = torch.device(device)
    if device.type == "cpu":
        return
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
    codec: Codec,
    device: torch.device,
    query_heads: int,
    dtype: torch.dtype,
    *,
    fetched: bool = False,
) -> None:
    """Compiles what decode steps and prompts need on a CUDA device: half a minute, once for a machine.

    `fetched`: the model's blocks lie in host memory, or on a peer device, and are fetched.
    """
    check_supported(codec.layout, device)
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    group = query_heads // codec.layout.kv_heads
    codec.device_codec(device).prepare(group, dtype, fetched=fetched)


def device_step(codec: TokenCodec, table: BlockTable, device: torch.device) -> DeviceStep:
    """The table's state on a CUDA device, made at first use."""
    step = _kept(codec, table, device)
    if step is None:
        from kvstore_kernels.gpu.step import DeviceStep

        # A step may be used outside the inference mode it was made in.
        with torch.inference_mode(False):
            step = DeviceStep(codec, table.rows, device)
        _keep(codec, table, step)
    found: DeviceStep = step
    return found


def sealed_step(codec: SealedCodec, table: BlockTable, device: torch.device) -> SealedStep:
    """The same for codecs that quantize whole blocks."""
    step = _kept(codec, table, device)
    if step is None:
        from kvstore_kernels.gpu.sealed.step import SealedStep

        with torch.inference_mode(False):
            step = SealedStep(codec, table.rows, device)
        _keep(codec, table, step)
    found: SealedStep = step
    return found


def _kept(codec: Codec, table: BlockTable, device: torch.device) -> Any:
    """The step that the table keeps for the codec; of several codecs each has its own."""
    cached = table.view_cache.get((ALL_ROWS, DEVICE_STEP))
    step = None if cached is None else cached[1].get(codec)
    return step if step is not None and step.device == device else None


def _keep(codec: Codec, table: BlockTable, step: Any) -> None:
    cached = table.view_cache.setdefault((ALL_ROWS, DEVICE_STEP), (None, {}))
    cached[1][codec] = step
