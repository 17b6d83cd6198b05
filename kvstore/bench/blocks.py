"""What a worker does with blocks and logits beside plain runs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_STEPS_AT_ONCE = 48


def digest(data: bytes) -> str:
    """A short hash for rows."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hashes(attachment: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Hashes of the whole blocks that the store holds of `ids`, and whether they are mapped for writing."""
    with attachment.cache(ids) as cache:
        state = cache.state
        entries = _whole_blocks(state)
        found = [digest(_payload(entry.slab, entry.slot)) for entry in entries]
        return {
            "reused": state.length,
            "hashes": found,
            "writable": [bool(entry.slab.writable) for entry in entries],
        }


def write_read_only(attachment: Any, ids: torch.Tensor) -> str:
    """Writes one byte into the first held block. Returns the device's error; RuntimeError when nothing stops it.

    After that error this process can't use its device any more, so the cache isn't closed: the process ends.
    """
    cache = attachment.cache(ids)
    entries = _whole_blocks(cache.state)
    if not entries:
        raise RuntimeError("nothing of the prompt is held: there is no mapping to write through")
    slab, slot = entries[0].slab, entries[0].slot
    if slab.writable:
        raise RuntimeError("the slab is mapped for writing here: this process is its writer")
    place = slab.data[slot * slab.slot_bytes : slot * slab.slot_bytes + 1]
    try:
        place.add_(1)
        if place.is_cuda:
            torch.cuda.synchronize(place.device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise RuntimeError("a write through the read-only mapping went through")


@dataclass(frozen=True, slots=True)
class Forced:
    """How a text is forced through a model: what to keep and what to change.

    `keep` is a file for the K and V that layers are given to store, `given` one whose K and V they store instead;
    `nudge` is a relative change of the input embeddings.
    """

    target: Path
    prefill: int
    keep: Path | None = None
    given: Path | None = None
    nudge: float = 0.0


def teacher_forced(attachment: Any, model: Any, ids: torch.Tensor, how: Forced) -> int:
    """Prefill of `how.prefill` tokens, then single steps, then the rest in one pass over codes; writes all logits but
    the prompt's to `how.target` (.npy, float32) and returns their number. `ids` [1, tokens].
    """
    import numpy as np

    kept = []
    total = ids.shape[1]
    cuts = [0, how.prefill, *range(how.prefill + 1, min(total, how.prefill + _STEPS_AT_ONCE) + 1), total]
    embeddings = model.get_input_embeddings()(ids) * (1 + how.nudge)
    with torch.no_grad(), attachment.cache(ids[:, :1]) as cache, _stored_kv(cache.state.codec, how):
        for first, last in itertools.pairwise(cuts):
            if first == last:
                continue
            output = model(
                inputs_embeds=embeddings[:, first:last],
                position_ids=torch.arange(first, last, device=ids.device)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if first == 0 else last - first,
            )
            kept.append(output.logits[0].float().cpu())
    logits = torch.cat(kept)
    np.save(how.target, logits.numpy())
    return len(logits)


@contextmanager
def _stored_kv(codec: Any, how: Forced) -> Iterator[None]:
    """While open, the codec's writes are kept in a file, or are given K and V from one."""
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    given = iter(torch.load(how.given)) if how.given else None
    write = codec.write

    def stand_in(layer: int, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
        if how.keep:
            seen.append((layer, k.detach().clone(), v.detach().clone()))
        if given is not None:
            expected, *other = next(given)
            if expected != layer or other[0].shape != k.shape:
                raise RuntimeError(f"layer {layer} stores {tuple(k.shape)}, the file has layer {expected}")
            k, v = (tensor.to(k) for tensor in other)
        write(layer, k, v, *rest)

    codec.write = stand_in
    try:
        yield
    finally:
        del codec.write
    if how.keep:
        torch.save(seen, how.keep)


def _whole_blocks(state: Any) -> list[Any]:
    whole = state.length // state.block_tokens
    return list(state.table.blocks(0))[:whole] if state.table is not None else []


def _payload(slab: Any, slot: int) -> bytes:
    first = slot * slab.slot_bytes
    data: bytes = slab.data[first : first + slab.slot_bytes].cpu().numpy().tobytes()
    return data
