"""The identity of a model: everything its K and V depend on besides the tokens."""

# ruff: noqa: SLF001  torch has no public name for a tensor's version, and its public walks are ten times slower
from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from kvstore_client.hook.glance import PLAIN, Glance, adapter_state, is_adapter, modules_of
from kvstore_client.hook.tensorhash import TensorHasher

FINGERPRINT_BYTES = 32
_DOMAIN = b"kvstore.model.3"
# Neither changes what the model computes.
_VOLATILE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_attn_implementation",
    "torch_dtype",
    "use_cache",
)
# Attributes of modules that don't, either, or that Step checks.
_VOLATILE_ATTRIBUTES = frozenset(
    {"training", "gradient_checkpointing", "name_or_path", "loss_type", "max_seq_len_cached"}
)
# transformers' own hooks, which stay on a model once it was asked for hidden states: they only look.
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
_SAMPLES = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Key = tuple[int, int, tuple[int, ...], torch.dtype]


def _tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, torch.Tensor]] = [
        ("p:" + name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False)
    ]
    named += [("b:" + name, tensor) for name, tensor in model.named_buffers(remove_duplicate=False)]
    return named


def _canonical_config(model: PreTrainedModel) -> bytes:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    return json.dumps(config, sort_keys=True, separators=(",", ":"), default=str).encode()


def _adapters(model: PreTrainedModel) -> bytes:
    # PEFT's layers share their weights with the module; which of them take part is a plain attribute.
    active = [[name, *adapter_state(module)] for name, module in model.named_modules() if is_adapter(module)]
    return json.dumps(active, separators=(",", ":")).encode()


def _settings(module: torch.nn.Module) -> list[str]:
    """Names of a module's public attributes that are plain values: scalings, epsilons, switches."""
    return sorted(
        name
        for name, value in module.__dict__.items()
        if name[0] != "_" and isinstance(value, PLAIN) and name not in _VOLATILE_ATTRIBUTES
    )


def _attributes(model: PreTrainedModel) -> bytes:
    # Weights and config don't tell these: they are copied from the config once and may be set on the module since.
    # The kinds, too: an activation has no weights, and is in no config once it was replaced.
    found = [
        [name, type(module).__qualname__, [[key, repr(module.__dict__[key])] for key in _settings(module)]]
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return json.dumps(found, separators=(",", ":")).encode()


def foreign_hook(model: PreTrainedModel) -> str:
    """Why the model's K and V may be another's: a forward hook that somebody registered. Empty if there is none.

    What a hook does can't be hashed, so nothing is shared while there is one.
    """
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "a forward hook for all modules is registered: it may change what the model computes"
    for module in modules_of(model):
        fields = module.__dict__
        if not (fields["_forward_hooks"] or fields["_forward_pre_hooks"]):
            continue
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in fields[kind].values():
                if getattr(hook, "__module__", None) not in _HARMLESS_HOOKS:
                    return f"a forward hook is registered on a {type(module).__name__}: it may change what it computes"
    return ""


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.dtype


def _digests(tensors: list[torch.Tensor], threads: int) -> list[bytes]:
    """32 bytes for each tensor: of its dtype, shape and bytes. Waits for each CUDA device once."""
    hasher = TensorHasher()
    sums: dict[int, torch.Tensor] = {}
    on_cpu: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            on_cpu.append(index)
        else:
            # In this thread, so on the stream that made the weights.
            sums[index] = hasher.sums(tensor)
    if on_cpu:
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="kvstore-hash") as pool:
            sums.update(zip(on_cpu, pool.map(hasher.sums, [tensors[index] for index in on_cpu]), strict=True))
    on_host: dict[int, torch.Tensor] = {}
    for device in {each.device for each in sums.values()}:
        indices = [index for index, each in sums.items() if each.device == device]
        on_host.update(zip(indices, torch.stack([sums[index] for index in indices]).cpu(), strict=True))
    digests: list[bytes] = []
    for index, tensor in enumerate(tensors):
        encoded = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
        encoded.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        encoded.update(struct.pack("<2q", *on_host[index].tolist()))
        digests.append(encoded.digest())
    return digests


class Fingerprint:
    """A model's fingerprint, and the cheap check that it still holds.

    Invariants: `value` was computed from all bytes of all parameters and buffers that `_seen` describes; a tensor is
    hashed again only if its version, address, shape or sample changed. Safe from several threads.
    """

    def __init__(self, model: PreTrainedModel, *, threads: int | None = None) -> None:
        self._model = model
        self._threads = threads or min(8, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._hashes: dict[_Key, bytes] = {}
        self._seen: Glance | None = None
        self._views: list[list[torch.Tensor]] = []
        self._sample: list[torch.Tensor] = []
        self.value = b""
        self.refresh()

    def refresh(self) -> bytes:
        """Hashes every byte again; returns the new value."""
        with self._lock:
            self._hashes.clear()
            return self._compute()

    def check(self) -> bytes:
        """The current value: the known one unless a version, address, shape or sample changed."""
        with self._lock:
            if self._seen is not None and self._seen.holds():
                if all(map(torch.equal, _sample(self._views), self._sample)):
                    return self.value
                # Changed behind the version counter's back (.data): the hashes by version say nothing.
                self._hashes.clear()
            return self._compute()

    def _compute(self) -> bytes:
        tensors = _tensors(self._model)
        wanted = {_key(tensor): tensor for _, tensor in tensors}
        missing = [(key, tensor) for key, tensor in wanted.items() if key not in self._hashes]
        # Largest first, so that the threads end together.
        missing.sort(key=lambda item: -item[1].numel() * item[1].element_size())
        digests = _digests([tensor for _, tensor in missing], self._threads)
        self._hashes.update(zip((key for key, _ in missing), digests, strict=True))
        self._hashes = {key: self._hashes[key] for key in wanted}

        hasher = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
        kind = type(self._model).__name__.encode()
        for part in (_DOMAIN, kind, _canonical_config(self._model), _attributes(self._model), _adapters(self._model)):
            hasher.update(struct.pack("<Q", len(part)) + part)
        for name, tensor in sorted(tensors, key=lambda item: item[0]):
            encoded = name.encode()
            hasher.update(struct.pack("<Q", len(encoded)) + encoded + self._hashes[_key(tensor)])
        self._seen = Glance(self._model, {id(module): _settings(module) for module in self._model.modules()})
        self._views = _sample_views([tensor for _, tensor in tensors])
        self._sample = _sample(self._views)
        self.value = hasher.digest()
        return self.value


def _sample_views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few elements of every tensor, as integers, by element size."""
    views: dict[int, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for tensor in tensors:
        plain = tensor.detach()
        bits = _INTEGERS.get(plain.element_size())
        if plain.data_ptr() in seen or not plain.numel() or not plain.is_contiguous() or bits is None:
            continue
        seen.add(plain.data_ptr())
        # Odd steps, so that rows of a matrix are met at different columns.
        step = max(1, plain.numel() // _SAMPLES) | 1
        views.setdefault(plain.element_size(), []).append(plain.reshape(-1).view(bits)[::step])
    return list(views.values())


def _sample(views: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(group) for group in views]
