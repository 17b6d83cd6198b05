"""attach(): checks, chooses a codec, and puts an Attachment on a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore_kernels import gpu
from kvstore_kernels.errors import KernelError
from transformers import PreTrainedModel

from kvstore_client.hook.attachment import Attachment, attached, lock
from kvstore_client.hook.calibration import with_real_shapes
from kvstore_client.hook.choice import choose, choose_codecs
from kvstore_client.hook.errors import (
    AttachError,
    CacheStateError,
    SelfCheckError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from kvstore_client.hook.fingerprint import Fingerprint
from kvstore_client.hook.plan import model_plan
from kvstore_client.hook.selfcheck import layout_of, self_check
from kvstore_client.hook.streams import on_device
from kvstore_client.hook.versions import check_transformers

if TYPE_CHECKING:
    from kvstore_client.hook.seam import StoreLike

_logger = logging.getLogger(__name__)


def attach(
    store: StoreLike,
    model: PreTrainedModel,
    tokenizer: Any = None,
    *,
    codec: str = "int8",
    overrides: Mapping[int, str] | None = None,
    max_error: float | None = None,
    min_fidelity: float | None = None,
    commit: str = "prompt",
    fallback: str = "local",
    compile: str = "never",  # noqa: A002  the name that design and documents use
    salt: bytes = b"",
) -> Attachment:
    """Lets a model's plain `generate(...)` use the store. The model lies on the CPU or on one CUDA device. Takes about
    a second: hashes the weights, calibrates the codec unless somebody did, and compares logits with the native cache.

    codec: "int8", "passthrough" (exact bytes), or one of the smaller ones (kvstore_kernels.codecs.names()). overrides:
    other codecs for some layers, {0: "int8", -1: "int8"}. max_error: instead of both, the smallest codec of each layer
    that changes its attention output by at most this part (RMS), as measured here (`Attachment.errors`; some seconds)
    or by the first worker that asked for it; blocks that would miss it aren't shared. min_fidelity: held blocks whose
    error is larger than 1 - min_fidelity are computed instead of read (docs/fidelity.md).
    commit: "prompt", or "all" (answers too). fallback: what a request does when not even local blocks are left:
    "local" raises LocalBudgetExceeded, "native" runs it on the model's own cache if that shows before the first token.
    salt: keeps apart what otherwise would be shared.
    Raises UnsupportedVersionError, UnsupportedModelError, SelfCheckError, AttachError.
    """
    for name, value, allowed in (
        ("commit", commit, ("prompt", "all")),
        ("fallback", fallback, ("local", "native")),
        ("compile", compile, ("never",)),
    ):
        if value not in allowed:
            raise AttachError(f"{name}={value!r}; this version takes {' or '.join(map(repr, allowed))}")
    _check_kinds(codec=codec, overrides=overrides, max_error=max_error, min_fidelity=min_fidelity)
    if min_fidelity is not None and not 0 <= min_fidelity <= 1:
        raise AttachError(f"min_fidelity={min_fidelity!r}: expected a part from 0 to 1 (only exact blocks), or None")
    check_transformers()
    with lock:
        existing = attached.get(model) if isinstance(model, PreTrainedModel) else None
        if existing is not None:
            codec = existing.codec if max_error is not None else choose_codecs(existing.plan, codec, overrides)
            if max_error != existing.max_error:
                raise AttachError(
                    f"{existing.plan.name} is attached with max_error={existing.max_error}, not {max_error}: detach() "
                    "it first"
                )
            return _same(existing, store, codec=codec, commit=commit, fallback=fallback, salt=salt,
                         min_fidelity=min_fidelity)  # fmt: skip
        plan = model_plan(model)
        with on_device(plan.device):
            plan = with_real_shapes(model, plan)
        if plan.gathers and max_error is not None:
            raise AttachError(
                f"max_error={max_error!r}: {plan.name} computes its attention itself ({plan.gathers}), so nothing can "
                "be measured on it; choose a codec"
            )
        fingerprint = Fingerprint(model)
        chosen = choose(
            store,
            fingerprint.value,
            model,
            plan,
            tokenizer,
            codec=codec,
            overrides=overrides,
            max_error=max_error,
        )
        codec = chosen.codec
        try:
            gpu.check_supported(layout_of(plan, codec), plan.device)
        except KernelError as error:
            raise UnsupportedModelError(f"{plan.name}: {error}") from error
        attachment = Attachment(
            store, model, tokenizer, codec=codec, commit=commit, fallback=fallback, salt=salt, plan=plan,
            fingerprint=fingerprint, min_fidelity=min_fidelity,
        )  # fmt: skip
        attachment.adopt(chosen, max_error)
        with on_device(plan.device):
            # First on the stock attention: it finds out the real shapes.
            attachment.namespace()
            _check(attachment)
        attached[model] = attachment
    return attachment


def _check(attachment: Attachment) -> None:
    """Installs the attachment and compares logits. A model that does more with K and V than to hand them to its
    attention gets them as tensors.
    """
    attachment.install()
    try:
        try:
            self_check(attachment.model, attachment.plan)
        except SelfCheckError:
            raise
        except (TypeError, AttributeError, CacheStateError, UnsupportedInputError) as error:
            if attachment.plan.gathers:
                raise UnsupportedModelError(f"{attachment.plan.name} can't be served: {error}") from error
            attachment.uninstall()
            attachment.plan = replace(attachment.plan, gathers=f"its attention asks for more: {error}")
            attachment.install()
            self_check(attachment.model, attachment.plan)
    except BaseException:
        attachment.uninstall()
        raise
    if attachment.plan.gathers:
        _logger.warning(
            "%s computes its attention itself (%s): K and V are dequantized for it layer by layer, which costs time "
            "over a long context; padded batches run on its native cache",
            attachment.plan.name,
            attachment.plan.gathers,
        )


def _check_kinds(*, codec: object, overrides: object, max_error: object, min_fidelity: object) -> None:
    if not isinstance(codec, str):
        raise AttachError(f"codec={codec!r}: expected a codec's name, such as 'int8'")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise AttachError(
            f"overrides={overrides!r}: expected layers and their codecs, such as {{0: 'int8', -1: 'int8'}}"
        )
    for name, value in (("max_error", max_error), ("min_fidelity", min_fidelity)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise AttachError(f"{name}={value!r}: expected a number, or None")


def _same(existing: Attachment, store: StoreLike, **options: Any) -> Attachment:
    if existing.store is not store:
        raise AttachError(f"{existing.plan.name} is attached to another store: detach() it first")
    for name, value in options.items():
        if getattr(existing, name) != value:
            raise AttachError(
                f"{existing.plan.name} is attached with {name}={getattr(existing, name)!r}, not {value!r}: "
                "detach() it first"
            )
    return existing
