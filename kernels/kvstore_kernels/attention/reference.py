"""The oracle: dequantize everything, one query head at a time, softmax in float32. Slow and obvious."""

from __future__ import annotations

import torch

from kvstore_kernels.codecs.base import Codec
from kvstore_kernels.table import BlockTable


def attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    first_position: int,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One row: query [q_heads, L, k_dim] at positions first_position.. over key/value [kv_heads, T, dim] at 0..T.

    Returns float32 [L, q_heads, v_dim]. A query sees tokens up to its own position.
    """
    query_heads, length, _ = query.shape
    group = query_heads // key.shape[0]
    out = torch.zeros(length, query_heads, value.shape[2])
    positions = torch.arange(first_position, first_position + length)[:, None]
    tokens = torch.arange(key.shape[1])[None, :]
    hidden = tokens > positions
    if sliding_window is not None:
        hidden |= positions - tokens >= sliding_window
    for head in range(query_heads):
        scores = query[head].float() @ key[head // group].float().T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].float().expand(length, 1)], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : key.shape[1]]
        out[:, head] = weights @ value[head // group].float()
    return out


def decode_reference(
    query: torch.Tensor,
    codec: Codec,
    layer: int,
    table: BlockTable,
    *,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What decode_attention computes, with the same arguments; float32."""
    rows, query_heads, length, _ = query.shape
    out = torch.zeros(rows, length, query_heads, codec.layout.v_dim)
    for row in range(rows):
        tokens = table.tokens(row)
        padding = max(0, length - tokens)
        if padding == length:
            continue
        key, value = codec.read(layer, table, row)
        out[row, padding:] = attention_reference(
            query[row, :, padding:].detach(),
            key,
            value,
            first_position=tokens - length + padding,
            scaling=scaling,
            softcap=softcap,
            sliding_window=sliding_window,
            sinks=sinks,
        )
    return out


def prefill_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    codec: Codec,
    layer: int,
    table: BlockTable | None,
    *,
    starts: list[int] | None = None,
    history: list[int] | None = None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What prefill_attention computes, with the same arguments; float32."""
    rows, query_heads, length, _ = query.shape
    out = torch.zeros(rows, length, query_heads, codec.layout.v_dim)
    for row in range(rows):
        start = starts[row] if starts is not None else 0
        past = 0
        if table is not None:
            past = history[row] if history is not None else table.tokens(row)
        if start >= length:
            continue
        all_k, all_v = key[row, :, start:].detach().float(), value[row, :, start:].detach().float()
        if table is not None and past:
            old_k, old_v = codec.read(layer, table, row, 0, past)
            all_k, all_v = torch.cat([old_k, all_k], dim=1), torch.cat([old_v, all_v], dim=1)
        out[row, start:] = attention_reference(
            query[row, :, start:].detach(),
            all_k,
            all_v,
            first_position=past,
            scaling=scaling,
            softcap=softcap,
            sliding_window=sliding_window,
            sinks=sinks,
        )
    return out
