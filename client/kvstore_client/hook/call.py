"""The arguments of one call of generate(), and whether the store can serve it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import GenerationConfig

from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.fingerprint import foreign_hook
from kvstore_client.hook.prompt import Prompt, read_prompt, read_unmasked_prompt

_POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
# Arguments that don't change what the model makes of the tokens.
_HARMLESS = frozenset(
    {*_POSITIONAL, "input_ids", "attention_mask", "past_key_values", "tokenizer", "assistant_tokenizer",
     "logits_to_keep", "trust_remote_code", "return_dict", "is_assistant"}
)  # fmt: skip
# Generation modes that keep or build caches of their own.
_OWN_CACHE_MODES = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "use_mtp")


@functools.cache
def _settings() -> frozenset[str]:
    """Names of all generation settings."""
    return frozenset(vars(GenerationConfig()))  # type: ignore[no-untyped-call]  # transformers leaves it untyped


class Call:
    """The arguments of one call of generate(), looked up the way generate() does: call, config, model."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.kwargs = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        inputs = self.kwargs.get("inputs")
        self.ids: Any = self.kwargs.get("input_ids") if inputs is None else inputs
        self.mask: Any = self.kwargs.get("attention_mask")

    def setting(self, name: str, default: Any = None) -> Any:
        """A generation setting's value in this call."""
        if self.kwargs.get(name) is not None:
            return self.kwargs[name]
        for config in (self.kwargs.get("generation_config"), self.model.generation_config):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    @property
    def repeats(self) -> int:
        """Rows that generate() makes of each prompt."""
        return max(int(self.setting("num_beams", 1)), int(self.setting("num_return_sequences", 1)))

    def prompt(self) -> Prompt:
        """The rows of this call's ids. Raises UnsupportedInputError."""
        if self.mask is None:
            return read_unmasked_prompt(self.ids, self.setting("pad_token_id"), self.setting("eos_token_id"))
        return read_prompt(self.ids, self.mask)

    def native_reason(self, device: torch.device) -> str:
        """Why this call runs on the model's own cache; empty if it needn't. `device` is where the model was."""
        cache = self.kwargs.get("past_key_values")
        if self.setting("use_cache", True) is False:
            return "use_cache=False"
        if cache is not None and not isinstance(cache, KVStoreCache):
            return f"past_key_values is a {type(cache).__name__}"
        chosen = self.setting("cache_implementation")
        if chosen not in (None, "dynamic", "hybrid"):
            return f"cache_implementation={chosen!r}"
        if self.model.training:
            return "the model is in training mode"
        if self.kwargs.get("custom_generate") is not None:
            return "custom_generate"
        if self.kwargs.get("is_assistant") or self.setting("is_assistant", False):
            return "the model is the assistant of another"
        for name in _OWN_CACHE_MODES:
            if self.setting(name):
                return f"{name} keeps caches of its own"
        assistant = self.kwargs.get("assistant_model")
        if assistant is not None and getattr(assistant.config, "target_layer_ids", None) is not None:
            return "the assistant reads the model's hidden states of the whole prompt"
        for name in ("output_attentions", "output_hidden_states"):
            if self.setting(name, False):
                return f"{name}=True needs the whole prompt computed"
        if not isinstance(self.ids, torch.Tensor) or self.ids.dim() != 2 or self.ids.is_floating_point():
            return "no input_ids: only token ids identify a prompt"
        if torch.is_autocast_enabled(self.model.device.type):
            return "torch.autocast is active: K and V are computed in another dtype than the model's"
        hook = foreign_hook(self.model)
        if hook:
            return hook
        if self.model.device != device:
            return f"the model was moved from {device} to {self.model.device}: detach() and attach() it again"
        for name, value in self.kwargs.items():
            if value is not None and name not in _HARMLESS and name not in _settings():
                return f"{name} isn't part of a prompt's digest"
        return ""
