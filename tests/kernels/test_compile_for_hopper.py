"""Every kernel compiles for an H100 or H200; needs no GPU."""

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
def compiled_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    from kvstore_kernels.gpu import codec as gpu_codec
    from kvstore_kernels.gpu import launch
    from kvstore_kernels.gpu.sealed import codec as sealed_codec
    from kvstore_kernels.gpu.sealed import launches as sealed_launches
    from triton.backends.compiler import GPUTarget

    names: list[str] = []

    def compile_only(function: Any, types: Any, constants: Any, device: Any, **options: Any) -> Any:
        aligned = {name: options.pop(name, frozenset()) for name in ("unaligned", "even")}
        kernel = launch.compiled(
            launch.source(function, types, constants, **aligned), GPUTarget("cuda", 90, 32), options
        )
        # No array in local memory, and shared memory that a multiprocessor has.
        assert ".local" not in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 232_448
        names.append(function.__name__)
        return lambda *_: None

    class Properties:
        multi_processor_count = 132

    for module in (gpu_codec, sealed_codec, sealed_launches, launch):
        monkeypatch.setattr(module, "launcher", compile_only)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return names


@pytest.mark.parametrize(
    ("codec", "dtype", "dims", "group"),
    [
        ("int8", "bfloat16", (128, 128), 1),
        ("int8", "float16", (64, 64), 7),
        ("int8", "bfloat16", (192, 128), 4),
        ("int8", "bfloat16", (256, 256), 8),
        ("int8", "float32", (80, 96), 3),
        ("passthrough", "bfloat16", (128, 128), 4),
        ("passthrough", "float16", (256, 256), 2),
        ("passthrough", "float32", (256, 256), 1),
    ],
)
def test_kernels_compile(
    make, compiled_names: list[str], codec: str, dtype: str, dims: tuple[int, int], group: int
) -> None:
    from kvstore_kernels.gpu.codec import DeviceCodec, Kind

    bench = make(codec, layers=1, kv_heads=2, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    on = DeviceCodec(bench.codec, torch.device("cpu"))
    kind, of = Kind(softcap=True, window=True, sinks=True), getattr(torch, dtype)
    on.prepare(group, of)
    on.append(of, 16, aligned=False)
    on.decode(group, on.columns(32 * group), of, kind, fetched=True)
    on.prefill(group, of, kind, fetched=True, aligned=False)
    on.merge(group, 64, of, sinks=True, skipped=False)
    on.gather(torch.float32, fetched=True)
    assert set(compiled_names) == {"append_kernel", "decode_kernel", "prefill_kernel", "merge_kernel", "gather_kernel"}


@pytest.mark.parametrize(
    ("codec", "dtype", "dims", "group"),
    [
        ("int4", "bfloat16", (128, 128), 1),
        ("int4", "float32", (64, 64), 3),
        ("k8v4", "float16", (64, 64), 7),
        ("k4v3", "bfloat16", (80, 96), 4),
        ("k4v2", "bfloat16", (256, 256), 8),
    ],
)
def test_kernels_of_sealed_codecs_compile(
    make, compiled_names: list[str], codec: str, dtype: str, dims: tuple[int, int], group: int
) -> None:
    from kvstore_kernels.gpu.codec import Kind
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec
    from kvstore_kernels.gpu.sealed.launches import launches

    bench = make(codec, layers=1, kv_heads=2, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    on = SealedDeviceCodec(bench.codec, torch.device("cpu"))
    kind, of, attention = Kind(softcap=True, window=True, sinks=True), getattr(torch, dtype), launches(on)
    on.prepare(group, of)
    on.gather(torch.float32, fetched=True)
    attention.decode(group, attention.columns(32 * group), of, kind, fetched=True)
    attention.merge(group, 64, of, sinks=True)
    attention.prefill(group, of, kind, fetched=True, aligned=False)
    attention.join(group, of, sinks=True)
    assert {"tail_kernel", "seal_kernel", "sealed_gather_kernel", "sealed_decode_kernel"} <= set(compiled_names)
    assert {"sealed_merge_kernel", "sealed_prefill_kernel"} <= set(compiled_names)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("codec", ["k8v4", "int4", "k4v3", "k4v2"])
def test_what_attention_of_sealed_codecs_spills(
    make, compiled_names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, codec: str, dim: int
) -> None:
    """Bytes of a thread's registers that lie in memory: next to none in a decode step of up to 8 heads a KV head."""
    from kvstore_kernels.gpu import launch
    from kvstore_kernels.gpu.codec import PLAIN
    from kvstore_kernels.gpu.sealed.codec import SealedDeviceCodec
    from kvstore_kernels.gpu.sealed.launches import launches

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    bench = make(codec, layers=1, kv_heads=2, k_dim=dim, dtype="bfloat16")
    attention = launches(SealedDeviceCodec(bench.codec, torch.device("cpu")))
    compile_kernel, binary, stacks = launch.compiled, tmp_path / "kernel.cubin", []

    def measured(*given: Any) -> Any:
        kernel = compile_kernel(*given)
        binary.write_bytes(kernel.asm["cubin"])
        report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
        stacks.append(int(re.search(r"STACK:(\d+)", report).group(1)))
        return kernel

    monkeypatch.setattr(launch, "compiled", measured)
    for group in (8, 16):
        attention.decode(group, attention.columns(group), torch.bfloat16, PLAIN, fetched=False)
    attention.prefill(4, torch.bfloat16, PLAIN, fetched=False, aligned=True)
    # Prefill's are outside of its loops, where what is rotated is turned back.
    for stack, most in zip(stacks, (8, 160, 160), strict=True):
        assert stack <= most, stacks


def test_checksums_compile(compiled_names: list[str]) -> None:
    from kvstore_kernels import device_checksum

    device_checksum._launchers.__wrapped__(torch.device("cpu"))
    assert compiled_names == ["checksum_kernel", "finish_kernel"]
