"""The attention and mask functions that an attached model runs, and how they pass other caches on.

While attached, `config._attn_implementation` is "kvstore_" + the implementation before. With any other cache both
functions call that implementation. Neither keeps state: the mask function knows the cache from the `kv_length` that
the cache itself returned in this very call, so several threads may run one model.
"""

# ruff: noqa: SLF001  transformers has no public name for a config's attention implementation
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstore_client.hook.errors import AttachError, UnsupportedInputError
from kvstore_client.hook.step import Stored

if TYPE_CHECKING:
    from kvstore_client.hook.state import CacheState

PREFIX = "kvstore_"
# The code of what transformers composes a window's mask of: closures, made anew in each pass.
_BOTH = and_masks(causal_mask_function).__code__
_WINDOW = sliding_window_overlay(1).__code__
_lock = threading.Lock()
# id(config) -> (config, implementation before, attachments): models may share one config object.
_installed: dict[int, tuple[Any, str | None, int]] = {}


class CacheLength(int):
    """The number of keys a mask must cover, and whose they are."""

    state: CacheState

    @classmethod
    def of(cls, length: int, state: CacheState) -> CacheLength:
        """`length`, carrying `state` to the mask function."""
        self = cls(length)
        self.state = state
        return self


def _stock_attention(previous: str, module: Any) -> Callable[..., Any]:
    if previous != "eager":
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[previous]
        return found
    # Eager attention isn't registered: each modeling file has its own.
    for kind in type(module).__mro__:
        eager = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager  # type: ignore[no-any-return]  # transformers leaves it untyped
    raise AttachError(f"{type(module).__name__} has no eager attention: call model.set_attn_implementation('sdpa')")


def attention_function(previous: str) -> Callable[..., Any]:
    """The attention function: cached blocks are attended here, anything else by `previous`."""

    def kvstore_attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **extra: Any,
    ) -> tuple[Any, Any]:
        if isinstance(key, Stored):
            return key.attend(module, query, attention_mask, scaling, dropout, extra), None
        stock = _stock_attention(previous, module)
        if scaling is not None:
            extra["scaling"] = scaling
        result: tuple[Any, Any] = stock(module, query, key, value, attention_mask, dropout=dropout, **extra)
        return result

    return kvstore_attention


def window_of(mask: Any) -> int | None:
    """How many tokens, its own included, each one sees under transformers' mask function; None: all before it.

    Raises UnsupportedInputError for a mask that is anything else.
    """
    if mask is causal_mask_function:
        return None
    parts = _captured(mask, _BOTH, "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and causal_mask_function in parts:
        window = _captured(parts[parts[0] is causal_mask_function], _WINDOW, "sliding_window")
        if isinstance(window, int) and window > 0:
            return window
    raise UnsupportedInputError(
        "the model asked for a mask that is neither causal nor a sliding window over that (packed sequences, chunks, "
        "or an overlay): this cache doesn't serve it; leave position_ids that start anew, and the overlay, out"
    )


def _captured(function: Any, code: CodeType, name: str) -> Any:
    """What a closure of transformers' own has captured under a name; None if the function is another one."""
    if getattr(function, "__code__", None) is not code or name not in code.co_freevars:
        return None
    captured: Any = function.__closure__[code.co_freevars.index(name)].cell_contents
    return captured


def mask_function(previous: str) -> Callable[..., Any]:
    """The mask function: row starts, int32 [rows, 1, 1, 1], for our caches; the mask of `previous` for others."""

    def kvstore_mask(*args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("kv_length")
        if type(length) is CacheLength:
            window = window_of(kwargs.get("mask_function", causal_mask_function))
            step = length.state.begin(kwargs["batch_size"], kwargs["q_length"], kwargs.get("attention_mask"))
            return step.mask if window is None else step.windowed(window)
        if previous not in ALL_MASK_ATTENTION_FUNCTIONS:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)

    return kvstore_mask


def install(config: Any) -> None:
    """Points a model's config at our functions. Counted: undone by as many calls of `uninstall`."""
    with _lock:
        found = _installed.get(id(config))
        if found is not None:
            _installed[id(config)] = (found[0], found[1], found[2] + 1)
            return
        previous = config._attn_implementation
        if previous is not None and previous.startswith(PREFIX):
            # A copy of an attached model's config.
            previous = previous.removeprefix(PREFIX)
        name = PREFIX + (previous or "eager")
        AttentionInterface.register(name, attention_function(previous or "eager"))
        AttentionMaskInterface.register(name, mask_function(previous or "eager"))
        _installed[id(config)] = (config, previous, 1)
        config._attn_implementation = name


def uninstall(config: Any) -> None:
    """Undoes one `install`; the last one puts the implementation back."""
    with _lock:
        found = _installed.get(id(config))
        if found is None:
            return
        if found[2] > 1:
            _installed[id(config)] = (found[0], found[1], found[2] - 1)
            return
        del _installed[id(config)]
        config._attn_implementation = found[1]
