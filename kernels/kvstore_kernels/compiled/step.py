"""What the compiled functions need to know of a table, kept between layers and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore_kernels.errors import TableError
from kvstore_kernels.table import ALL_ROWS, COMPILED_STEP, BlockTable

try:
    from kvstore_kernels.compiled.append import append_function
    from kvstore_kernels.compiled.attend import attend_function
    from kvstore_kernels.compiled.memory import dimensions
except ImportError as missing:
    if missing.name is None or missing.name.partition(".")[0] not in ("numba", "llvmlite"):
        raise
    _MISSING = str(missing)
else:
    _MISSING = ""

if TYPE_CHECKING:
    from kvstore_kernels.codecs.base import Codec, RowTarget

_LOG2_E = math.log2(math.e)
# The compiled functions run on the calling thread. Torch's many passes over the codes catch up with one thread that
# passes once where they can spread over more than this many.
_MOST_THREADS = 4


def compiled_reason(codec: Codec) -> str:
    """Why decode steps of this codec run on torch instead; empty when they run compiled."""
    layout = codec.layout
    if _MISSING:
        return f"numba is missing ({_MISSING}): pip install numba"
    if layout.codec == "passthrough" and layout.dtype != "float32":
        return f"passthrough of {layout.dtype} has no compiled form"
    if torch.get_num_threads() > _MOST_THREADS:
        return f"torch has {torch.get_num_threads()} threads: more than {_MOST_THREADS} outrun one compiled thread"
    return ""


def prepare(codec: Codec) -> str:
    """Compiles what decode steps of this codec need: seconds once for a machine, then numba's cache has it.

    Returns `compiled_reason`.
    """
    reason = compiled_reason(codec)
    if not reason:
        attend_function(codec.scaled)
        append_function(codec.scaled, *codec.code_constants)
    return reason


def compiled_step(codec: Codec, table: BlockTable) -> CompiledStep | None:
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
    arrays were made for; addresses are used only while the table holds their slabs.
    """

    def __init__(self, codec: Codec, table: BlockTable) -> None:
        rows = table.rows
        self._codec = codec
        self._layer_bytes = codec.layout.layer_bytes
        self._dimensions = dimensions(codec.layout)
        self._dimensions_at = self._dimensions.ctypes.data
        self._attend = attend_function(codec.scaled)
        self._append = append_function(codec.scaled, *codec.code_constants)
        self._table = table
        self._versions: list[int] | None = None
        self._counts: list[int] | None = None
        self._addresses = np.empty(0, np.int64)
        self._row_addresses: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._first = np.zeros(rows, np.int64)
        self._tokens = np.zeros(rows, np.int64)
        self._blocks = np.zeros(rows, np.int64)
        self._places = np.zeros(rows, np.int64)
        self._addresses_at = 0
        self._first_at, self._tokens_at = self._first.ctypes.data, self._tokens.ctypes.data
        self._blocks_at, self._places_at = self._blocks.ctypes.data, self._places.ctypes.data
        self._targets: Sequence[RowTarget | tuple[int, int]] | None = None
        self._targets_versions: list[int] | None = None
        self._factors: tuple[float, list[torch.Tensor | float]] = (0.0, [])

    def attend(self, query: torch.Tensor, layer: int, group: int, scaling: float) -> torch.Tensor:
        """Query [rows, q_heads, 1, k_dim] over all tokens of each row -> float32 [rows, 1, q_heads, v_dim]."""
        layout = self._codec.layout
        if self._versions != self._table.versions or self._counts != self._table.token_counts:
            self._refresh()
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
            layer * self._layer_bytes,
            folded.data_ptr(),
            result.data_ptr(),
        )
        return result

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, targets: Sequence[RowTarget | tuple[int, int]]
    ) -> bool:
        """Stores k [rows, kv_heads, 1, k_dim] and v. False, with nothing written: the torch path must look at them.

        Raises TableError past a row's blocks or on read-only memory.
        """
        if targets is not self._targets or self._targets_versions != self._table.versions:
            self._aim(targets)
        keys, values = k.detach().float().contiguous(), v.detach().float().contiguous()
        shift_at, inverse_at = self._codec.static_addresses(layer)
        return self._append(
            self._dimensions_at,
            self._blocks_at,
            self._places_at,
            k.shape[0],
            layer * self._layer_bytes,
            keys.data_ptr(),
            values.data_ptr(),
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

    def _refresh(self) -> None:
        table = self._table
        if self._versions != table.versions:
            self._row_addresses = [table.row_addresses(row) for row in range(table.rows)]
            self._addresses = np.concatenate(self._row_addresses) if table.rows else np.empty(0, np.int64)
            self._addresses_at = self._addresses.ctypes.data
            lengths = [len(addresses) for addresses in self._row_addresses]
            self._first[:] = np.cumsum([0, *lengths[:-1]])
            self._versions = list(table.versions)
        self._counts = list(table.token_counts)
        self._tokens[:] = self._counts

    def _aim(self, targets: Sequence[RowTarget | tuple[int, int]]) -> None:
        table = self._table
        for row, (skip, start) in enumerate(targets):
            if skip > 0:
                self._blocks[row] = 0
                continue
            if skip < 0 or not 0 <= start < table.capacity(row):
                raise TableError(
                    f"token {start} of row {row} (skip {skip}): its blocks hold {table.capacity(row)} tokens; "
                    "append blocks first"
                )
            block, place = divmod(start, table.block_tokens)
            slab, slot = table.entry(row, block)
            if not slab.writable:
                raise TableError(f"block {block} of row {row} lies in read-only memory: take a private block first")
            self._blocks[row] = slab.address(slot)
            self._places[row] = place
        self._targets = targets
        self._targets_versions = list(table.versions)
