"""What writing and reading back sealed blocks costs a thread in local memory on an H100 or H200; needs no GPU.

A device sets a kernel's stack aside for every thread it can hold: kilobytes of it are gigabytes there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton")


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, int]:
    """Bytes of stack of each kernel that was compiled; PTX doesn't show them."""
    from kvstore_kernels.gpu import launch
    from kvstore_kernels.gpu.sealed import codec as sealed_codec
    from triton.backends.compiler import GPUTarget

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    binary, found = tmp_path / "kernel.cubin", {}

    def compile_only(function: Any, types: Any, constants: Any, device: Any, **options: Any) -> Any:
        unaligned = options.pop("unaligned", frozenset())
        kernel = launch.compiled(
            launch.source(function, types, constants, unaligned), GPUTarget("cuda", 90, 32), options
        )
        binary.write_bytes(kernel.asm["cubin"])
        report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
        stack = re.search(r"STACK:(\d+)", report)
        assert stack
        found[function.__name__] = max(found.get(function.__name__, 0), int(stack[1]))
        # One write of many bytes, not many of one.
        assert kernel.asm["ptx"].count("st.global.b8") == 0
        return lambda *_: None

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(sealed_codec, "launcher", compile_only)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return found


@pytest.mark.parametrize(
    ("codec", "dtype", "dims", "most"),
    [
        ("k8v4", "float16", (64, 64), 0),
        ("int4", "bfloat16", (128, 128), 0),
        ("int4", "float32", (128, 128), 0),
        ("k4v2", "bfloat16", (80, 96), 0),
        ("k4v2", "bfloat16", (192, 128), 0),
        ("k4v3", "bfloat16", (256, 256), 64),
        ("k4v3", "float32", (256, 256), 320),
    ],
)
def test_storage_spills(
    make: Any, stacks: dict[str, int], codec: str, dtype: str, dims: tuple[int, int], most: int
) -> None:
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec

    bench = make(codec, layers=1, kv_heads=2, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    on = SealedDeviceCodec(bench.codec, torch.device("cpu"))
    of = getattr(torch, dtype)
    on.seal(of)
    for tile in (1, 32):
        on.keep(of, tile)
    on.gather(of, fetched=False)
    on.gather(torch.float32, fetched=True)
    assert set(stacks) == {"seal_kernel", "tail_kernel", "sealed_gather_kernel"}
    assert max(stacks.values()) <= most, stacks
