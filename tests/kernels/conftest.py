"""What the kernel tests share: poisoned slabs, tables over them, and a codec with a calibration of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from kvstore_kernels.codecs import Calibrator, Codec, make_codec
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

# 0x7F makes int8 codes 127 and float16 scales NaN; 0xFF makes every float NaN.
POISON = {"int8": 0x7F, "passthrough": 0xFF}


@dataclass
class Bench:
    """A codec and as many poisoned slots as a test asks for."""

    codec: Codec
    layout: BlockLayout

    def slab(self, slots: int = 4) -> Slab:
        slab = Slab.allocate(self.layout.block_bytes, slots)
        slab.data.fill_(POISON.get(self.layout.codec, 0x7F))
        return slab

    def table(self, capacities: list[int], order: str = "run") -> BlockTable:
        """Rows that can hold so many tokens; slots in a run, or each row's slots scattered over one slab."""
        size = self.layout.block_tokens
        table = BlockTable(len(capacities))
        blocks = [-(-tokens // size) for tokens in capacities]
        slab = self.slab(2 * sum(blocks) + 3)
        free = list(range(slab.slots))
        if order == "scattered":
            free = free[::2][::-1] + free[1::2]
        for row, count in enumerate(blocks):
            for _ in range(count):
                table.append_block(row, slab, free.pop(0))
        return table

    def filled(self, k: torch.Tensor, v: torch.Tensor, skips: list[int], order: str = "run") -> BlockTable:
        """A table that holds every row's tokens behind its left padding, in all layers."""
        lengths = [k.shape[2] - skip for skip in skips]
        table = self.table(lengths, order)
        for layer in range(self.layout.layers):
            self.codec.write(layer, k, v, table, [(skip, 0) for skip in skips])
        for row, length in enumerate(lengths):
            table.set_tokens(row, length)
        return table


class Make:
    def __call__(
        self,
        codec: str,
        *,
        layers: int = 2,
        kv_heads: int = 2,
        k_dim: int = 64,
        v_dim: int | None = None,
        dtype: str = "float32",
        sample: torch.Tensor | None = None,
    ) -> Bench:
        """`sample` [rows, kv_heads, L, k_dim] is what every layer is calibrated with."""
        layout = BlockLayout.create(
            codec, layers=layers, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim or k_dim, dtype=dtype
        )
        calibrator = Calibrator(codec, layers=layers, kv_heads=kv_heads, k_dim=k_dim)
        if sample is None:
            sample = torch.randn(1, kv_heads, 257, k_dim, generator=torch.Generator().manual_seed(7)) * 2 + 1
        for layer in range(layers):
            calibrator.observe(layer, sample)
        return Bench(make_codec(layout, calibrator.finish("test")), layout)


@pytest.fixture
def make() -> Make:
    return Make()


class CopiesNow:
    """Stands for a copy stream where there is no device: every copy is done when it is given."""

    def __init__(self, device: torch.device) -> None: ...

    def copy_rows(self, target: int, source: int, pitch: int, nbytes: int, rows: int, *, from_host: bool) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * nbytes, source + row * pitch, nbytes)

    def copied(self) -> None: ...

    def computed(self) -> None: ...

    def copies_wait(self, mark: None) -> None: ...

    def work_waits(self, mark: None) -> None: ...

    def finish(self) -> None: ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def copies_now() -> type[CopiesNow]:
    return CopiesNow


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """One thread: on shared cores, waiting for a second one costs these small tensors more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["compiled", "torch"])
def decode_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A decode step compiled, and the same on torch, as where numba is missing."""
    if request.param == "torch":
        monkeypatch.setattr("kvstore_kernels.compiled.step._MISSING", "left out by this test")
    return str(request.param)
