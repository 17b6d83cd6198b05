"""What int8 costs: with a K bias, with long rows, with outlier channels."""

from __future__ import annotations

import pytest
import torch
from kvstore_kernels.attention import attention_reference, decode_attention


def attended(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return attention_reference(q[0], k[0], v[0], first_position=k.shape[2] - 1, scaling=q.shape[3] ** -0.5)


@pytest.mark.parametrize("bias", [50.0, 200.0])
def test_a_key_bias_costs_nothing(make, bias: float) -> None:
    """b040: a constant of +-bias on one channel in each 32, as Qwen models have it."""
    k, v = torch.randn(1, 2, 1408, 128), torch.randn(1, 2, 1408, 128)
    sample = torch.randn(1, 2, 1024, 128)
    for channel in range(5, 128, 32):
        sign = 1 if channel % 64 == 5 else -1
        k[..., channel] += sign * bias
        sample[..., channel] += sign * bias
    bench = make("int8", layers=1, k_dim=128, sample=sample)
    table = bench.filled(k, v, [0])
    q = torch.randn(1, 8, 1, 128)
    out = decode_attention(q, bench.codec, 0, table, scaling=128**-0.5)[0]
    exact = attended(k, v, q)
    cosines = torch.cosine_similarity(out, exact, dim=-1)
    assert cosines.min() >= 0.999
    error = (out - exact).norm() / exact.norm()
    # Without the shift one step would be bias / 127: the error would be that of the bias, not of the key.
    assert error < 0.02
    unbiased = make("int8", layers=1, k_dim=128, sample=torch.randn(1, 2, 1024, 128))
    plain = k.clone()
    for channel in range(5, 128, 32):
        plain[..., channel] -= bias if channel % 64 == 5 else -bias
    plain_out = decode_attention(q, unbiased.codec, 0, unbiased.filled(plain, v, [0]), scaling=128**-0.5)[0]
    plain_error = (plain_out - attended(plain, v, q)).norm() / exact.norm()
    assert error <= 1.3 * plain_error


def test_large_channels_do_not_hide_small_ones(make) -> None:
    """RoPE pairs of K times 30 with Q divided by 30 lose nothing: each channel has a step of its own."""
    factor = torch.ones(64)
    factor[::8] = 30.0
    k, v, q = torch.randn(1, 2, 700, 64), torch.randn(1, 2, 700, 64), torch.randn(1, 4, 1, 64) * 2
    errors = []
    for scale in (torch.ones(64), factor):
        bench = make("int8", layers=1, sample=torch.randn(1, 2, 1024, 64) * scale)
        out = decode_attention(q / scale, bench.codec, 0, bench.filled(k * scale, v, [0]), scaling=0.125)[0]
        exact = attended(k, v, q)
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[1] <= 1.2 * errors[0]
    assert errors[0] < 0.02


def test_error_does_not_grow_with_length(make) -> None:
    """b046: magnitudes of 4 to 5, 128 against 4096 tokens."""
    bench = make("int8", layers=1)
    errors = {}
    for length in (128, 4096):
        k, v = (torch.rand(1, 2, length, 64) + 4 for _ in range(2))
        table = bench.filled(k, v, [0])
        read_k, read_v = bench.codec.read(0, table, 0)
        errors[length] = max(float((read_k - k[0]).abs().max()), float((read_v - v[0]).abs().max()))
    assert errors[4096] <= 1.1 * errors[128]
    assert errors[4096] < 5 / 127
