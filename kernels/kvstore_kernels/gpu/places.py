"""Where a table's kernels find what all of them read."""

from __future__ import annotations

from typing import NamedTuple

from kvstore_kernels.gpu.launch import Pointer


class Places(NamedTuple):
    """Device pointers of one table: a new one is made whenever one of them changes, so `is` tells whether any did.

    `codes` and `scales` are the anchor from which blocks are addressed, `targets` int64 [3, rows] (skip, start and
    tokens), `table` int64 [rows, width] block addresses (of the ring's buffers in turn, where blocks are fetched).
    """

    codes: Pointer
    scales: Pointer
    targets: Pointer
    table: Pointer
    width: int
    rows: int
