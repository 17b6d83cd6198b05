"""The decode step on a CPU, compiled: append one token a row, attend with one query a row. Needs numba.

A decode step reads every code once and does little with it, so its cost in torch is that of passing over converted
copies and of starting a dozen operations a layer. Here a layer is two calls that read codes where they lie, by address,
as the kernels on a GPU do. Where numba is missing the torch path serves, with the same results to rounding.
"""

from kvstore_kernels.compiled.step import compiled_reason, compiled_step, prepare

__all__ = ["compiled_reason", "compiled_step", "prepare"]
