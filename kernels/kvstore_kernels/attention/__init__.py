"""Attention over blocks: decode and prefill, and the slow reference they are tested against."""

from kvstore_kernels.attention.decode import decode_attention
from kvstore_kernels.attention.prefill import prefill_attention
from kvstore_kernels.attention.reference import attention_reference, decode_reference, prefill_reference

__all__ = ["attention_reference", "decode_attention", "decode_reference", "prefill_attention", "prefill_reference"]
