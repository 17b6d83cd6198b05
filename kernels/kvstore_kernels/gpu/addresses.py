"""The addresses of a table's blocks on the device, uploaded only when a row's blocks change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.gpu.launch import Pointer, pointer
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

_LEAST_WIDTH = 16


def upload(array: np.ndarray[Any, np.dtype[np.int64]], target: torch.Tensor) -> None:
    """Copies host numbers to the device without waiting: from pinned memory that torch keeps until it was read."""
    host = torch.from_numpy(array)
    if target.device.type == "cuda":
        # The pinned copy is torch's own, freed only when the device has read it.
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)


class Addresses:
    """int64 [rows, width] on the device, for a table without or with blocks that must be fetched.

    Invariants: `made_for` are the row versions that `matrix` was made for; where `fetched` blocks exist, `matrix` holds
    minus (their number + 1) in their places.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        self._rows = rows
        self._lengths = [0] * rows
        self._rebuilds = [-1] * rows
        self.made_for: list[int] | None = None
        self.matrix: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((rows, _LEAST_WIDTH), np.int64)
        self.fetched: dict[tuple[Slab, int], int] = {}
        self._tensor: torch.Tensor | None = None
        self.pointer: Pointer = None

    @property
    def width(self) -> int:
        """Blocks a row of the device's table has room for."""
        return int(self.matrix.shape[1])

    def refresh(self, table: BlockTable) -> None:
        """Follows the table. Raises TableError on memory that the device can't reach."""
        widest = max(table.capacity(row) for row in range(self._rows)) // table.block_tokens
        if any(self._rebuilds[row] not in (-1, table.rebuilds[row]) for row in range(self._rows)):
            # Blocks left: forget them all, or a fetched one would keep its slab mapped.
            self.fetched = {}
            self._rebuilds = [-1] * self._rows
        if widest > self.width:
            width = -(-max(2 * self.width, widest) // _LEAST_WIDTH) * _LEAST_WIDTH
            wider = np.zeros((self._rows, width), np.int64)
            wider[:, : self.width] = self.matrix
            self.matrix = wider
        for row in range(self._rows):
            first = self._lengths[row] if self._rebuilds[row] == table.rebuilds[row] else 0
            self._fill(table, row, first)
            self._rebuilds[row] = table.rebuilds[row]
        self.made_for = list(table.versions)

    def send(self) -> None:
        """Uploads the matrix of a table whose blocks all lie on the device."""
        self.pointer = self._send(self.matrix)

    def send_fetched(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> list[Pointer]:
        """Uploads one table for each buffer of the ring: places [buffers, fetched blocks]. Their pointers."""
        local = self.matrix >= 0
        index = np.where(local, 0, -1 - self.matrix)
        # The lowest bit tells the kernels that only one layer of the block is there.
        tables = np.where(local[None], self.matrix[None], places[:, index] | 1)
        self.pointer = self._send(tables)
        assert self._tensor is not None
        return [pointer(part) for part in self._tensor]

    def row_pointer(self, row: int, buffer: int) -> Pointer:
        """One row of the table that was sent, of the ring's buffer `buffer` where there is one."""
        assert self._tensor is not None
        whole = self._tensor if self._tensor.dim() == 2 else self._tensor[buffer]
        return pointer(whole[row])

    def _send(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> Pointer:
        if self._tensor is None or self._tensor.shape != array.shape:
            with torch.inference_mode(False):
                self._tensor = torch.empty(array.shape, dtype=torch.int64, device=self._device)
        upload(array, self._tensor)
        return pointer(self._tensor)

    def _fill(self, table: BlockTable, row: int, first: int) -> None:
        line = self.matrix[row]
        count = table.capacity(row) // table.block_tokens
        for slab, slot, blocks, start in table.runs(row):
            begin = start // table.block_tokens
            skipped = min(blocks, max(0, first - begin))
            if skipped == blocks:
                continue
            begin, slot, end = begin + skipped, slot + skipped, begin + blocks
            if slab.device == self._device:
                line[begin:end] = slab.address(slot) + slab.slot_bytes * np.arange(end - begin)
                continue
            self._check_fetchable(slab, row, begin)
            for index in range(begin, end):
                block = (slab, slot + index - begin)
                line[index] = -1 - self.fetched.setdefault(block, len(self.fetched))
        self._lengths[row] = count

    def _check_fetchable(self, slab: Slab, row: int, index: int) -> None:
        if slab.device.type == "cpu" and not slab.pinned:
            raise TableError(
                f"block {index} of row {row} lies in host memory that {self._device} can't read asynchronously: "
                "register the slab's mapping (cuMemHostRegister) and set Slab.pinned, or copy the block to the device"
            )
        if slab.device.type not in ("cpu", "cuda"):
            raise TableError(f"block {index} of row {row} lies on {slab.device}: expected host memory or a CUDA device")
