"""The C library's heap, which CPU tensors live in."""

from __future__ import annotations

import torch

# glibc adapts to freed blocks up to 32 MiB; a little less, so that the block with its header still counts.
_LARGEST_OBSERVED = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Lets glibc keep up to 64 MiB of freed heap instead of returning it to the system between two layers.

    A native cache keeps every layer's K and V, and these lie in the heap like piles: what is freed below them can't be
    returned. Blocks live in slabs, outside of the heap, so each layer's temporaries may go back to the system and be
    faulted in again by the next layer. Freeing one large block (never touched, so it costs nothing) raises glibc's own
    dynamic thresholds to their usual end; no setting of the process is overridden. Elsewhere it has no effect.
    """
    # The result is dropped at once: freeing it is the point.
    torch.empty(_LARGEST_OBSERVED, dtype=torch.uint8)
