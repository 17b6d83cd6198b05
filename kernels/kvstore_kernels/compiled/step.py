"""What the compiled functions need to know of a table, kept between layers and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.heap import keep_freed_memory
from kvstore_kernels.table import ALL_ROWS, COMPILED_STEP, BlockTable

try:
    from kvstore_kernels.compiled.append import SHAPE_NUMBERS, append_function
    from kvstore_kernels.compiled.attend import attend_function
    from kvstore_kernels.compiled.memory import dimensions
except ImportError as missing:
    if missing.name is None or missing.name.partition(".")[0] not in ("numba", "llvmlite"):
        raise
    _MISSING = str(missing)
else:
    _MISSING = ""

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import RowTarget
    from kvstore_kernels.codecs.tokenwise import TokenCodec

_LOG2_E = math.log2(math.e)
# The compiled functions run on the calling thread. Torch's many passes over the codes catch up with one thread that
# passes once where they can spread over more than this many.
_MOST_THREADS = 4


def compiled_reason(codec: TokenCodec) -> str:
    """Why decode steps of this codec run on torch instead; empty when they run compiled."""
    layout = codec.layout
    if _MISSING:
        return f"numba is missing ({_MISSING}): pip install numba"
    if layout.codec == "passthrough" and layout.dtype != "float32":
        return f"passthrough of {layout.dtype} has no compiled form"
    if torch.get_num_threads() > _MOST_THREADS:
        return f"torch has {torch.get_num_threads()} threads: more than {_MOST_THREADS} outrun one compiled thread"
    return ""


def prepare(codec: TokenCodec) -> str:
    """Compiles what decode steps of this codec need: seconds once for a machine, then numba's cache has it.

    Also readies the heap. Returns `compiled_reason`.
    """
    keep_freed_memory()
    reason = compiled_reason(codec)
    if not reason:
        attend_function(codec.scaled)
        append_function(codec.scaled, *codec.code_constants)
    return reason


def compiled_step(codec: TokenCodec, table: BlockTable) -> CompiledStep | None:
    """The table's compiled step, made at first use; None where `compiled_reason` says why."""
    found = table.view_cache.get((ALL_ROWS, COMPILED_STEP))
    if found is not None and found[0] is codec:
        kept: CompiledStep | None = found[1]
        return kept
    made = None if compiled_reason(codec) else CompiledStep(codec, table)
    # The codec itself is the key: a table is used with one at a time.
    table.view_cache[ALL_ROWS, COMPILED_STEP] = (codec, made)
    return made


class CompiledStep:
    """Addresses and counts of one table as the compiled functions read them.

    Invariants: belongs to one table and one codec, so to one thread at a time; `_versions` and `_counts` are what the
    arrays were made for; addresses are used only while the table holds their slabs. The table keeps the step, so the
    step doesn't keep the table: a cycle would keep slabs mapped until a garbage collection.
    """

    def __init__(self, codec: TokenCodec, table: BlockTable) -> None:
        rows = table.rows
        self._codec = codec
        self._layout = codec.layout
        self._dimensions = dimensions(codec.layout)
        self._dimensions_at = self._dimensions.ctypes.data
        self._attend = attend_function(codec.scaled)
        self._append = append_function(codec.scaled, *codec.code_constants)
        self._versions: list[int] | None = None
        self._counts: list[int] | None = None
        self._addresses = np.empty(0, np.int64)
        self._row_addresses: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._first = np.zeros(rows, np.int64)
        self._tokens = np.zeros(rows, np.int64)
        self._skips = np.zeros(rows, np.int64)
        self._starts = np.zeros(rows, np.int64)
        self._shape = np.zeros(SHAPE_NUMBERS, np.int64)
        self._addresses_at = 0
        self._first_at, self._tokens_at = self._first.ctypes.data, self._tokens.ctypes.data
        self._skips_at, self._starts_at = self._skips.ctypes.data, self._starts.ctypes.data
        self._shape_at = self._shape.ctypes.data
        self._aimed: tuple[Sequence[RowTarget | tuple[int, int]], int, list[int]] | None = None
        self._factors: tuple[float, list[torch.Tensor | float]] = (0.0, [])

    def attend(self, table: BlockTable, query: torch.Tensor, layer: int, group: int, scaling: float) -> torch.Tensor:
        """Query [rows, q_heads, 1, k_dim] over all tokens of each row -> float32 [rows, 1, q_heads, v_dim]."""
        layout = self._codec.layout
        if self._versions != table.versions or self._counts != table.token_counts:
            self._refresh(table)
        rows = query.shape[0]
        factor = self._factor(layer, scaling)
        grouped = query.detach().reshape(rows, layout.kv_heads, group, layout.k_dim)
        folded = torch.mul(grouped.float(), factor).contiguous()
        result = torch.empty(rows, 1, query.shape[1], layout.v_dim)
        self._attend(
            self._dimensions_at,
            self._addresses_at,
            self._first_at,
            self._tokens_at,
            rows,
            group,
            self._layout.layer_offset(layer),
            folded.data_ptr(),
            result.data_ptr(),
        )
        return result

    def append(
        self,
        table: BlockTable,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        targets: Sequence[RowTarget | tuple[int, int]],
    ) -> bool:
        """Stores k [rows, kv_heads, L, k_dim] and v. False: the torch path must write all of it (again).

        Raises TableError past a row's blocks or on read-only memory.
        """
        rows, _, length, _ = k.shape
        aimed = self._aimed
        if aimed is None or aimed[0] is not targets or aimed[1] != length or aimed[2] != table.versions:
            self._aim(table, targets, length)
        if k.dtype != torch.float32 or v.dtype != torch.float32:
            if length > 1:
                return False
            k, v = k.float(), v.float()
        if k.stride(3) != 1:
            k = k.contiguous()
        if v.stride(3) != 1:
            v = v.contiguous()
        self._shape[:] = (rows, length, *k.stride()[:3], *v.stride()[:3])
        shift_at, inverse_at = self._codec.static_addresses(layer)
        return self._append(
            self._dimensions_at,
            self._shape_at,
            self._addresses_at,
            self._first_at,
            self._skips_at,
            self._starts_at,
            self._layout.layer_offset(layer),
            k.data_ptr(),
            v.data_ptr(),
            shift_at,
            inverse_at,
        )

    def _factor(self, layer: int, scaling: float) -> torch.Tensor | float:
        known, factors = self._factors
        if known != scaling or not factors:
            layers = range(self._codec.layout.layers)
            factors = [self._codec.query_factor(each, scaling * _LOG2_E) for each in layers]
            self._factors = (scaling, factors)
        return factors[layer]

    def _refresh(self, table: BlockTable) -> None:
        if self._versions != table.versions:
            self._row_addresses = [table.row_addresses(row) for row in range(table.rows)]
            self._addresses = np.concatenate(self._row_addresses) if table.rows else np.empty(0, np.int64)
            self._addresses_at = self._addresses.ctypes.data
            lengths = [len(addresses) for addresses in self._row_addresses]
            self._first[:] = np.cumsum([0, *lengths[:-1]])
            self._versions = list(table.versions)
        self._counts = list(table.token_counts)
        self._tokens[:] = self._counts

    def _aim(self, table: BlockTable, targets: Sequence[RowTarget | tuple[int, int]], length: int) -> None:
        if self._versions != table.versions:
            self._refresh(table)
        for row, (skip, start) in enumerate(targets):
            if skip < 0:
                raise TableError(f"row {row} skips {skip} positions: expected 0 or more")
            self._skips[row] = skip
            self._starts[row] = start
            end = start + length - skip
            if skip >= length:
                continue
            if start < 0 or end > table.capacity(row):
                raise TableError(
                    f"tokens {start} to {end} of row {row}: its blocks hold {table.capacity(row)} tokens; "
                    "append blocks first"
                )
            for block in range(start // table.block_tokens, -(-end // table.block_tokens)):
                table.entry(row, block).slab.check_writable()
        self._aimed = (targets, length, list(table.versions))
