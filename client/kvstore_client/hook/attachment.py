"""One model that generates through one store."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from kvstore_kernels import gpu
from kvstore_kernels.codecs import CodecPlan, TokenCodec
from kvstore_kernels.compiled import prepare
from transformers import PreTrainedModel

from kvstore_client.hook import attention
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.calibration import calibrate
from kvstore_client.hook.choice import Choice, bound_name, measured
from kvstore_client.hook.errors import AttachError, UnsupportedInputError
from kvstore_client.hook.fingerprint import Fingerprint, foreign_hook
from kvstore_client.hook.firsttoken import FirstTokens
from kvstore_client.hook.methods import generate_method, prepare_inputs_method
from kvstore_client.hook.plan import ModelPlan, check_ready
from kvstore_client.hook.prefix import open_cache
from kvstore_client.hook.prompt import Prompt, positions_of, read_prompt
from kvstore_client.hook.report import HitReport
from kvstore_client.hook.rows import codec_of
from kvstore_client.hook.selfcheck import layout_of
from kvstore_client.hook.streams import on_device
from kvstore_client.namespace import ModelIdentity, Namespace, Shard

if TYPE_CHECKING:
    from kvstore_client.hook.seam import StoreLike

_logger = logging.getLogger(__name__)
_REPORTS_KEPT = 256
_PREWARM_CHUNK = 2048
_RATE_WEIGHT = 0.3
# Shorter prefills are mostly overhead and say little about a long one.
_RATE_TOKENS = 128
# Models and what they are attached with; guarded by `lock`.
attached: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()
lock = threading.Lock()


class Attachment:
    """A model that generates through a store, until detach() or the end of a `with`.

    Invariants: the model's class is untouched; what attach set on the instance and its config, detach puts back; all
    state of a request is in its cache, so threads may generate at the same time.
    """

    def __init__(
        self,
        store: StoreLike,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        codec: str,
        commit: str,
        fallback: str,
        salt: bytes,
        plan: ModelPlan,
        fingerprint: Fingerprint | None = None,
        min_fidelity: float | None = None,
    ) -> None:
        self.store = store
        self.model = model
        self.tokenizer = tokenizer
        self.codec = codec
        self.commit = commit
        self.fallback = fallback
        self.salt = salt
        self.plan = plan
        self.reports: deque[HitReport] = deque(maxlen=_REPORTS_KEPT)
        self.tokens_per_s: float | None = None
        self._lock = threading.Lock()
        self.min_fidelity = min_fidelity
        self._fingerprint = fingerprint or Fingerprint(model)
        self._namespace: Namespace | None = None
        self._fields: dict[str, Any] = {}
        self._detached = False
        self._first = FirstTokens(model)
        # Of a codec that was chosen by measuring: the bound, each layer's error, and the plan made for it, which holds
        # for the weights of a fingerprint.
        self.max_error: float | None = None
        self.errors: list[float] = []
        self._chosen: CodecPlan | None = None
        self._chosen_for = b""

    def adopt(self, chosen: Choice, max_error: float | None) -> None:
        """Takes what was chosen for the weights as they are. For attach()."""
        self.max_error, self.errors, self._chosen = max_error, chosen.errors, chosen.plan
        self._chosen_for = self._fingerprint.value

    # -- identity ---------------------------------------------------------------------------------------------

    def fingerprint(self) -> bytes:
        """The model's fingerprint now, 32 bytes; cheap while the weights stay."""
        return self._fingerprint.check()

    def namespace(self) -> Namespace:
        """Where this model's blocks are held; another one after its weights changed."""
        with self._lock:
            value = self._fingerprint.check()
            if self._namespace is None or self._namespace.identity.fingerprint != value:
                identity = ModelIdentity(
                    fingerprint=value,
                    model_name=self.plan.name,
                    codec=self.codec,
                    layout=layout_of(self.plan, self.codec),
                    shard=Shard(self.plan.layer_group, 0, self.plan.kv_heads),
                    plan_name=self._plan_name(value),
                )
                namespace = self.store.namespace_for(identity, self._make_plan, device=self.plan.device)
                self._prepare(namespace)
                self._namespace = namespace
            return self._namespace

    def _prepare(self, namespace: Namespace) -> None:
        """Compiles what requests need now, not in the middle of the first answer."""
        plan, codec = self.plan, codec_of(namespace)
        for each in codec.members:
            if plan.device.type == "cuda":
                gpu.prepare(each, plan.device, plan.query_heads, self.model.dtype)
            elif not isinstance(each, TokenCodec):
                _logger.warning("codec %s has no compiled decode yet: steps over a long context are slower", each.name)
            elif reason := prepare(each):
                _logger.warning("decode steps run on torch, about half as fast over a long context: %s", reason)

    def _make_plan(self) -> CodecPlan:
        if self.max_error is not None:
            if self._chosen is not None and self._fingerprint.value == self._chosen_for:
                return self._chosen
            # Other weights keep the codecs, and get limits of their own.
            found = measured(self.model, self.plan, self.tokenizer, self.max_error, self.codec)
            assert found.plan is not None
            self.errors = found.errors
            return found.plan
        began = time.monotonic()
        plan = calibrate(self.model, self.plan, self.codec, self.tokenizer)
        if self.codec != "passthrough":
            self.observe_rate(1024, time.monotonic() - began)
        return plan

    def _plan_name(self, fingerprint: bytes) -> str:
        if self.max_error is None:
            return ""
        return bound_name(self.max_error, "" if fingerprint == self._chosen_for else self.codec)

    def weights_changed(self) -> None:
        """Hashes all weights again. Needed after sparse edits through `.data`, which leave no other trace."""
        self._fingerprint.refresh()

    # -- requests ---------------------------------------------------------------------------------------------

    def open_cache(
        self, prompt: Prompt, *, repeats: int = 1, keep_last: bool = True, background: bool = False
    ) -> KVStoreCache:
        """A cache with what the store holds of the prompt; see prefix.open_cache."""
        known = self._namespace
        if not background or known is None:
            return self._open(self.namespace(), prompt, repeats, keep_last, background=background)
        # The store is asked while the weights are looked at. That they changed since the last request is rare: then
        # what it answered is given back.
        cache = self._open(known, prompt, repeats, keep_last, background=True)
        try:
            namespace = self.namespace()
        except BaseException:
            cache.close()
            raise
        if namespace is known:
            return cache
        cache.close()
        return self._open(namespace, prompt, repeats, keep_last, background=True)

    def _open(
        self, namespace: Namespace, prompt: Prompt, repeats: int, keep_last: bool, *, background: bool
    ) -> KVStoreCache:
        return open_cache(
            self.store,
            namespace,
            prompt,
            device=self.plan.device,
            repeats=repeats,
            keep_last=keep_last,
            tokens_per_s=self.tokens_per_s,
            salt=self.salt,
            max_block_error=None if self.min_fidelity is None else 1 - self.min_fidelity,
            background=background,
            first_token=self._first.of,
            gathers=bool(self.plan.gathers),
        )

    def cache(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> KVStoreCache:
        """A cache filled with the held prefix of input_ids [rows, tokens] (left-padded), for those who pass
        `past_key_values` themselves: to generate() with the whole ids, or to model(...) with the ids behind
        `get_seq_length()`. What a loop of one's own computes is not committed. close() it, or use `with`.
        """
        self._check_ready()
        cache = self.open_cache(read_prompt(input_ids, attention_mask))
        assert cache.report is not None
        self.record(cache.report)
        return cache

    def prewarm(self, text_or_ids: str | Sequence[int] | torch.Tensor, *, pin: bool = False) -> HitReport:
        """Computes and commits the full blocks of a text that aren't held yet; `pin` keeps them from eviction."""
        self._check_ready()
        ids = self._ids_of(text_or_ids).to(self.plan.device)
        size = layout_of(self.plan, self.codec).block_tokens
        full = ids.shape[1] // size * size
        if not full:
            raise UnsupportedInputError(
                f"text shorter than a block ({ids.shape[1]} tokens < {size}): there is nothing to share"
            )
        prompt = read_prompt(ids[:, :full], None)
        began = time.monotonic()
        with self.open_cache(prompt, keep_last=False) as cache:
            state, report = cache.state, cache.report
            assert report is not None
            state.armed = True
            while state.length < full:
                first, last = state.length, min(full, state.length + _PREWARM_CHUNK)
                self.forward(ids[:, first:last], None, positions_of([0], first, last), cache)
            if self.plan.device.type == "cuda":
                torch.cuda.current_stream(self.plan.device).synchronize()
            report.prefill_tokens = report.prompt_tokens - report.reused_tokens
            report.prefill_ms = (time.monotonic() - began) * 1e3 - report.match_ms
            report.committed_blocks = state.committed
            if state.committed and not self.store.flush():
                report.warn("the commits are not through yet")
            report.take(state.pool.request.report())
            if pin and report.traffic is not None and report.traffic.blocks_not_shared_error:
                report.warn("not pinned: not all of it is shared")
            elif pin and not self.store.pin(state.pool.namespace, state.rows[0].chain[-1]):
                report.warn("not pinned: the service is absent")
        self.record(report)
        return report

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: KVStoreCache
    ) -> None:
        """One pass over new tokens [rows, n] for their K and V only. Mask and positions may lie on the CPU."""
        device = self.plan.device
        known = {"logits_to_keep": 1, "position_ids": positions.to(device)}
        taken = inspect.signature(self.model.forward).parameters
        with torch.no_grad(), on_device(device):
            self.model(
                input_ids=ids.to(device),
                attention_mask=None if mask is None else mask.to(device),
                past_key_values=cache,
                use_cache=True,
                **{name: value for name, value in known.items() if name in taken},
            )

    def record(self, report: HitReport) -> None:
        """Keeps a report, and learns from it how fast this worker computes a prompt."""
        self.reports.append(report)
        self.store.record_report(report)
        if report.prefill_tokens >= _RATE_TOKENS and report.prefill_ms > 0:
            self.observe_rate(report.prefill_tokens, report.prefill_ms / 1e3)

    def observe_rate(self, tokens: int, seconds: float) -> None:
        """One more measurement of prefill speed."""
        if seconds > 0:
            rate, known = tokens / seconds, self.tokens_per_s
            self.tokens_per_s = rate if known is None else known + _RATE_WEIGHT * (rate - known)

    def _ids_of(self, text_or_ids: str | Sequence[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(text_or_ids, str):
            if self.tokenizer is None:
                raise UnsupportedInputError("prewarm of a text needs the tokenizer: attach(model, tokenizer)")
            text_or_ids = self.tokenizer(text_or_ids)["input_ids"]
        ids = torch.as_tensor(text_or_ids, dtype=torch.int64)
        ids = ids.view(1, -1) if ids.dim() == 1 else ids
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise UnsupportedInputError(f"ids of shape {tuple(ids.shape)}; prewarm takes one sequence at a time")
        return ids

    def _check_ready(self) -> None:
        check_ready(self.model)
        if self.model.device != self.plan.device:
            raise UnsupportedInputError(
                f"the model was moved from {self.plan.device} to {self.model.device}: detach() and attach() it again"
            )
        if torch.is_autocast_enabled(self.plan.device.type):
            raise UnsupportedInputError(
                "torch.autocast is active: K and V would be computed in another dtype than the model's; open the cache "
                "outside of it"
            )
        hook = foreign_hook(self.model)
        if hook:
            # No other path could serve these calls: they ask for the store's blocks.
            raise UnsupportedInputError(f"{hook}; remove it first")

    # -- the model --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Puts our methods on the model's instance. For attach()."""
        if not self.plan.gathers:
            attention.install(self.model.config)
        kind: Any = type(self.model)
        self._set("generate", types.MethodType(generate_method(kind.generate, attached.get), self.model))
        prepare_inputs = prepare_inputs_method(kind.prepare_inputs_for_generation)
        self._set("prepare_inputs_for_generation", types.MethodType(prepare_inputs, self.model))

    def _set(self, name: str, value: Any) -> None:
        if name in self.model.__dict__:
            raise AttachError(f"{self.plan.name} has a {name} of its own on the instance: remove it before attach()")
        self._fields[name] = value
        self.model.__dict__[name] = value

    def uninstall(self) -> None:
        """Takes them off again."""
        for name, value in self._fields.items():
            if self.model.__dict__.get(name) is value:
                del self.model.__dict__[name]
        if not self.plan.gathers:
            attention.uninstall(self.model.config)

    def detach(self) -> None:
        """Puts the model back as it was. Idempotent. Caches that are still open stay readable, but can't generate."""
        with lock:
            if self._detached:
                return
            self._detached = True
            self.uninstall()
            attached.pop(self.model, None)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"Attachment({self.plan.name!r}, codec={self.codec!r}, detached={self._detached})"
