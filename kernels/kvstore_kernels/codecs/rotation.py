"""A fixed orthogonal matrix for each size: spreads what few channels hold over all of them.

Hadamard matrices as in QuaRot (Ashkboos et al., 2024); where the size is no power of two, times a cosine transform of
the odd factor. Signs are drawn with a fixed generator.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

_SEED = 20261201


@functools.cache
def rotation(size: int) -> torch.Tensor:
    """float32 [size, size], orthogonal, the same on every machine; x @ rotation(size) rotates rows."""
    even = size & -size
    matrix = np.ones((1, 1))
    while len(matrix) < even:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    odd = size // even
    rows, columns = np.arange(odd)[:, None], np.arange(odd)[None]
    cosine = np.cos(math.pi * (columns + 0.5) * rows / odd) * np.where(
        rows == 0, math.sqrt(1 / odd), math.sqrt(2 / odd)
    )
    # numpy's bit stream is fixed by its documentation.
    signs = np.where(np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2, size=size) == 1, 1.0, -1.0)
    with torch.inference_mode(False):
        return torch.from_numpy(signs[:, None] * np.kron(matrix / math.sqrt(even), cosine)).float()
