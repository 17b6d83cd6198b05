"""KVStoreCache: a transformers Cache whose keys and values are blocks of the store."""

# ruff: noqa: ARG002  the arguments are those of transformers' Cache
from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvstore_client.hook.attention import CacheLength
from kvstore_client.hook.errors import CacheStateError, UnsupportedInputError
from kvstore_client.hook.report import HitReport
from kvstore_client.hook.state import CacheState

# Behind every length that a model's positions allow: the cache itself has no maximum.
_NO_MAXIMUM = -1


class KVStoreLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # untyped __init_subclass__
    """One layer's face of the state that all layers share. Holds no reference to the cache (no cycles)."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: CacheState, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._state = state
        self._layer = layer
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first."""
        return len(self._state.rows) or -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: blocks are taken as tokens come."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes new K and V [rows, kv_heads, q, dim]; returns what stands for all of the layer's, or those tensors."""
        stored = self._state.update(self._layer, key_states, value_states)
        return stored.gathered() if self._state.gathers else (stored, stored)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(cached + new positions, 0)."""
        return _mask_sizes(self._state, query_length)

    def get_seq_length(self) -> int:
        """Cached batch positions, padding included."""
        return self._state.seq_length(self._layer)

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return _NO_MAXIMUM

    def _refuse(self, name: str) -> NoReturn:
        raise CacheStateError(
            f"{name}() on one layer of a KVStoreCache: its layers share one table, call it on the cache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: call it on the cache."""
        self._refuse("crop")

    def reset(self) -> None:
        """Refused: call it on the cache."""
        self._refuse("reset")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused: call it on the cache."""
        self._refuse("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: call it on the cache."""
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: call it on the cache."""
        self._refuse("batch_select_indices")

    def offload(self) -> None:
        """Refused: the service places the blocks."""
        self._refuse("offload")

    def prefetch(self) -> None:
        """Refused: the service places the blocks."""
        self._refuse("prefetch")


class KVStoreCache(Cache):
    """Keys and values of one batch, quantized, in blocks that may be shared with other workers.

    Made by `store.cache(...)` or inside an attached model's `generate`. Pass it as `past_key_values` to the model it
    was made for. Blocks are held until close(), the end of a `with`, or the last reference to it. One thread at a time;
    deep copies share blocks until one of them writes, and may be used in other threads.
    """

    def __init__(self, state: CacheState) -> None:
        super().__init__(layers=[KVStoreLayer(state, layer) for layer in range(state.layers)])
        self.state = state
        # With the last reference the leases go, too. The state must not be what keeps the cache alive.
        self._finalizer = weakref.finalize(self, state.release)
        self._finalizer.atexit = False

    @property
    def report(self) -> HitReport | None:
        """What the request that made or last used this cache got."""
        return self.state.report

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Writes one layer's new K and V [rows, kv_heads, q, dim]; returns what stands for all of the layer's, or, to
        models whose attention is their own, those tensors.
        """
        stored = self.state.update(layer_idx, key_states, value_states)
        return stored.gathered() if self.state.gathers else (stored, stored)

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V dequantized: float32 [rows, kv_heads, length, dim], zeros for padding."""
        return self.state.read(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached batch positions, padding included."""
        return self.state.seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(cached + new positions, 0)."""
        return _mask_sizes(self.state, query_length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum."""
        return _NO_MAXIMUM

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first."""
        return len(self.state.rows) or -1

    @property
    def is_updated(self) -> NoReturn:
        """Refused: asked for by encoder-decoders, which pass an EncoderDecoderCache."""
        raise UnsupportedInputError(
            "a KVStoreCache was given to an encoder-decoder model, which keeps two caches; only decoders are served: "
            "call it without past_key_values"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes -n positions (n < 0); a positive number is the length to keep, as in transformers before 5.18."""
        if tokens_to_remove > 0:
            self.state.crop_to(tokens_to_remove)
        else:
            self.state.crop_to(self.state.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes row beam_idx[i]; blocks are shared, codes are never requantized."""
        self.state.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        if repeats < 1:
            raise CacheStateError(f"batch_repeat_interleave({repeats}): expected at least 1")
        self.state.select([row for row in range(len(self.state.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows, in this order; a boolean tensor keeps where it is True."""
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        self.state.select(chosen.tolist())

    def reset(self) -> None:
        """Empties the cache and gives its blocks back."""
        self.state.clear()

    def activate_past_recording(self) -> None:
        """Nothing to do: crop() can always go back."""

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are taken as tokens come."""

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: the service places the blocks."""
        raise CacheStateError("a KVStoreCache can't be offloaded: the service places its blocks")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Refused: the service places the blocks."""
        raise CacheStateError("a KVStoreCache can't be prefetched: the service places its blocks")

    def close(self) -> None:
        """Gives everything back. Idempotent, never waits; the cache can't be used any more."""
        self._finalizer()

    def __enter__(self) -> KVStoreCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVStoreCache:
        copied = KVStoreCache(self.state.fork())
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> KVStoreCache:
        return KVStoreCache(self.state.fork())

    def __reduce__(self) -> NoReturn:
        raise CacheStateError("a KVStoreCache can't be pickled: its blocks are memory that this process maps")

    def __repr__(self) -> str:
        return f"KVStoreCache(rows={len(self.state.rows)}, length={self.state.length}, layers={len(self.layers)})"


def _mask_sizes(state: CacheState, query_length: int) -> tuple[int, int]:
    state.ready()
    length = state.length + query_length
    return (length if state.gathers else CacheLength.of(length, state)), 0
