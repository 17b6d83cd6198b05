"""One forward pass of the model over a cache: what every layer needs, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from kvstore_kernels.attention.decode import decode_attention
from kvstore_kernels.attention.prefill import prefill_attention
from kvstore_kernels.codecs.base import Codec, RowTarget

from kvstore_client.hook.errors import CacheStateError, UnsupportedInputError

if TYPE_CHECKING:
    from kvstore_kernels.table import BlockTable

# Up to this many new tokens over a history, all of them are read back from their codes: a step of assisted generation
# then gives what single steps would.
MAX_DECODE_TOKENS = 32


class Step:
    """The state of one forward pass: `past` batch positions are cached, `q` more are computed.

    Invariants: the table counts the new tokens from the start; layers come in order, `done` of them are written; the
    objects here don't change between layers, so a layer costs one write and one attention call.
    """

    __slots__ = (
        "_checked",
        "codec",
        "done",
        "finished",
        "fresh",
        "history",
        "inside",
        "look_at_positions",
        "mask",
        "past",
        "q",
        "reused",
        "starts",
        "table",
        "targets",
        "windows",
    )

    def __init__(
        self,
        codec: Codec,
        table: BlockTable,
        *,
        past: int,
        q: int,
        starts: Sequence[int],
        mask: torch.Tensor,
        reused: bool,
        look_at_positions: bool = True,
    ) -> None:
        """`mask` is what the mask function returns: `starts` as int32 [rows, 1, 1, 1] on the compute device."""
        self.codec = codec
        self.table = table
        self.past = past
        self.q = q
        self.starts = tuple(starts)
        self.reused = reused
        self.done = 0
        self.finished = False
        # Padding of each row inside the new part, and tokens it has cached before it.
        inside = [min(q, max(0, start - past)) for start in starts]
        self.history = [max(0, past - start) for start in starts]
        self.inside = inside if any(inside) else None
        self.targets = [RowTarget(skip, have) for skip, have in zip(inside, self.history, strict=True)]
        self.fresh = past == 0 or q > MAX_DECODE_TOKENS
        # Every layer must bring it back, or one of those that stand for a window, with their tokens.
        self.mask = mask
        self.windows: list[tuple[torch.Tensor, int]] = []
        # Whether positions on a CUDA device are worth waiting for; those on a CPU always are.
        self.look_at_positions = look_at_positions
        self._checked = False

    def attend(
        self,
        layer: int,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        dropout: float,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer -> [rows, q, q_heads, v_dim]. UnsupportedInputError for what it can't honour."""
        window = None if mask is self.mask else self._window_of(mask)
        if not self._checked:
            self._check(module, dropout, extra)
        # Same names as the model's call: a new one must be looked at, not ignored. The window is the mask's, as it is
        # for torch's attention.
        softcap, sinks = extra.get("softcap"), extra.get("s_aux")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.fresh:
            return prefill_attention(
                query,
                key,
                value,
                self.codec,
                layer,
                self.table if self.past else None,
                starts=self.inside,
                history=self.history if self.past else None,
                scaling=scale,
                softcap=softcap,
                sliding_window=window,
                sinks=sinks,
            )
        return decode_attention(
            query, self.codec, layer, self.table, scaling=scale, softcap=softcap, sliding_window=window, sinks=sinks
        )

    def windowed(self, window: int) -> torch.Tensor:
        """What the mask function returns for layers that see so many tokens, their own included."""
        for mask, known in self.windows:
            if known == window:
                return mask
        # Another object for the same numbers.
        mask = self.mask.view(self.mask.shape)
        self.windows.append((mask, window))
        return mask

    def _window_of(self, mask: Any) -> int:
        for known, window in self.windows:
            if mask is known:
                return window
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else mask
        raise UnsupportedInputError(
            f"attention mask of shape {shape} given to the attention; with this cache pass a 2-D attention_mask "
            "[rows, cached + new tokens] with the padding on the left, or none"
        )

    def _check(self, module: Any, dropout: float, extra: dict[str, Any]) -> None:
        if module.training or dropout:
            raise UnsupportedInputError("the cache is for inference only, and the model is training: call model.eval()")
        if extra.get("is_causal") is False or extra.get("position_bias") is not None:
            raise UnsupportedInputError("the cache's attention is causal and has no position bias")
        if extra.get("output_attentions"):
            raise UnsupportedInputError("the cache's attention keeps no weights: pass output_attentions=False")
        positions = extra.get("position_ids")
        if (
            self.reused
            and isinstance(positions, torch.Tensor)
            and positions.dim() == 2
            and (self.look_at_positions or positions.device.type == "cpu")
        ):
            self._check_positions(positions)
        self._checked = True

    def _check_positions(self, positions: torch.Tensor) -> None:
        """Tokens from the store lie at the positions their digests say, so what follows them must, too."""
        last = positions[:, -1].tolist()
        if len(last) == 1:
            last = last * len(self.starts)
        end = self.past + self.q - 1
        # A row that is all padding up to here has no token yet, so its positions mean nothing.
        wrong = [row for row, start in enumerate(self.starts) if start <= end and last[row] != end - start]
        if wrong:
            row = wrong[0]
            raise UnsupportedInputError(
                f"row {row} has {self.starts[row]} padding tokens and its last new token is at position {last[row]}; "
                f"the cache holds its past at positions without padding, so expected {end - self.starts[row]}: pass "
                "position_ids = (attention_mask.cumsum(-1) - 1) of the new tokens"
            )


class Stored:
    """Stands for a layer's whole K and V on the way from Cache.update to the attention function.

    Holds the fresh K and V of the one layer that is being computed, nothing else.
    """

    __slots__ = ("_key", "_layer", "_step", "_value")

    def __init__(self, step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._step = step
        self._layer = layer
        self._key = key
        self._value = value

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        mask: Any,
        scaling: float | None,
        dropout: float,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of this layer -> [rows, q, q_heads, v_dim], detached."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.attend(module, query, mask, scaling, dropout, extra)
        return self._step.attend(self._layer, module, query, self._key, self._value, mask, scaling, dropout, extra)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V of the layer, dequantized, in the model's dtype: [rows, kv_heads, past + q, dim].

        What is fresh is exact where the cache's own attention would take it so.
        """
        step, key, value = self._step, self._key, self._value
        if not step.past:
            return key, value
        end = step.past + step.q
        pairs = [step.codec.read(self._layer, step.table, row, 0, end) for row in range(len(step.starts))]
        keys, values = (torch.stack([pair[part] for pair in pairs]) for part in (0, 1))
        keys, values = keys.to(key.dtype), values.to(value.dtype)
        if step.fresh:
            keys[:, :, step.past :], values[:, :, step.past :] = key, value
        return keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise CacheStateError(
            f"the model asked for .{name} of this cache's keys: they are blocks, not tensors. Use this cache with the "
            "model it was made for, while it is attached (store.attach(model)); KVStoreCache.read() gives tensors"
        )
