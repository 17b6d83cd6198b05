"""A 128-bit hash of a tensor's bytes that CPU and CUDA compute alike, each where the tensor lies.

It tells models apart that are not meant to be the same; it is no defence against somebody who looks for a collision.
"""

from __future__ import annotations

import threading

import torch

from kvstore_client.hook.errors import UnsupportedModelError

HASH_WORDS = 2
# Words a chunk. On a CPU so few that torch doesn't split an operation: the caller has threads of its own.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
_WORD = 8
_LOW_HALF = 0xFFFFFFFF


def _signed(number: int) -> int:
    """The int64 with the low 64 bits of `number`."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


# Odd, so that multiplication loses nothing.
_PLACE = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(0xD6E8FEB86659FD93))


class _Buffers(threading.local):
    """The calling thread's work buffers."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Two buffers of one chunk, and what a word's place adds to it."""
        made = self.by_device.get(device)
        if made is None:
            size = _CHUNK[device.type]
            places = torch.arange(size, dtype=torch.int64, device=device).mul_(_PLACE)
            made = (torch.empty_like(places), torch.empty_like(places), places)
            self.by_device[device] = made
        return made


class TensorHasher:
    """Hashes tensors; keeps a work buffer of three chunks for each thread and device until it is dropped.

    Invariants: every word is mixed with its place by steps that lose nothing, so a change of one word always changes
    the sums; sums are modulo 2**64, in any order. Nothing waits for a device. Safe from several threads.
    """

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """int64 [HASH_WORDS] on the tensor's device, of its bytes in row-major order. UnsupportedModelError on meta."""
        if tensor.is_meta:
            raise UnsupportedModelError("a parameter lies on the meta device: load the model's weights before attach()")
        with torch.inference_mode(False), torch.no_grad():
            plain = tensor.detach().contiguous().reshape(-1)
            if plain.storage_offset() * plain.element_size() % _WORD:
                plain = plain.clone()
            data = plain.view(torch.uint8)
            whole = data.numel() // _WORD * _WORD
            result = torch.zeros(HASH_WORDS, dtype=torch.int64, device=tensor.device)
            words = data[:whole].view(torch.int64)
            size = _CHUNK[tensor.device.type]
            for start in range(0, words.numel(), size):
                self._add(result, words[start : start + size], start)
            if whole < data.numel():
                rest = torch.zeros(_WORD, dtype=torch.uint8, device=tensor.device)
                rest[: data.numel() - whole] = data[whole:]
                self._add(result, rest.view(torch.int64), words.numel())
            return result

    def _add(self, result: torch.Tensor, words: torch.Tensor, start: int) -> None:
        mixed, shifted, places = (buffer[: words.numel()] for buffer in self._buffers.of(words.device))
        torch.add(words, places, out=mixed).add_(_signed(start * _PLACE))
        for index, factor in enumerate(_MIX):
            # Logical shift: an arithmetic one would lose the sign.
            torch.bitwise_right_shift(mixed, 32, out=shifted).bitwise_and_(_LOW_HALF)
            mixed.bitwise_xor_(shifted).mul_(factor)
            if index:
                result[index - 1] += mixed.sum()
