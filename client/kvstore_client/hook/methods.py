"""The two methods that attach() puts on a model's instance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.generate import run_generate

if TYPE_CHECKING:
    from kvstore_client.hook.attachment import Attachment


def generate_method(
    stock: Callable[..., Any], attachment_of: Callable[[PreTrainedModel], Attachment | None]
) -> Callable[..., Any]:
    """generate() through the store while the model has an attachment.

    A method, so that a deep copy of the model gets it bound to itself, finds no attachment, and runs as stock.
    """

    @functools.wraps(stock)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        attachment = attachment_of(self)
        bound = functools.partial(stock, self)
        return bound(*args, **kwargs) if attachment is None else run_generate(attachment, bound, args, kwargs)

    return generate


def prepare_inputs_method(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Cuts off what the cache holds: assisted generation passes the whole prompt in its first pass regardless."""

    @functools.wraps(stock)
    def prepare_inputs_for_generation(self: PreTrainedModel, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if not args and kwargs.get("next_sequence_length") is None and isinstance(cache, KVStoreCache):
            state = cache.state
            if state.full_ids_next and 0 < state.seq_length() < input_ids.shape[1]:
                kwargs["next_sequence_length"] = input_ids.shape[1] - state.length
        return stock(self, input_ids, *args, **kwargs)

    return prepare_inputs_for_generation
