"""Models: from what a worker says about its model to the namespace of its blocks."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from kvstore.errors import BudgetTooSmallError, InvalidRequestError, LayoutConflictError, LimitReachedError
from kvstore.store.events import Granted, LedgerGone
from kvstore.store.namespace import Namespace, NamespaceKey
from kvstore.store.quota import maximum, quota_for
from kvstore.store.removal import Removal
from kvstore.store.sessions import Session
from kvstore.store.sizing import plan_namespace
from kvstore.store.state import StoreState
from kvstore.store.types import DIGEST_BYTES, ModelSpec, Registration

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_NAME = 512
# The fields that two workers of one namespace must agree on.
_LAYOUT_FIELDS = ("layers", "k_dim", "v_dim", "dtype", "block_tokens", "block_bytes", "layout_digest")
_RANGES = {
    "layers": 4096,
    "kv_heads": 4096,
    "total_kv_heads": 4096,
    "k_dim": 65536,
    "v_dim": 65536,
    "block_tokens": 65536,
}


class Registry:
    """Namespaces by identity, and the codec plan kept for each (tenant, fingerprint, plan name or codec).

    Invariant: a plan is kept from the first registration that used it until its last namespace is dropped.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._by_key: dict[NamespaceKey, Namespace] = {}
        self._plans: dict[tuple[str, bytes, str], bytes] = {}

    def plan(self, tenant: str, fingerprint: bytes, name: str) -> bytes | None:
        """The plan kept for a model, by plan name or codec."""
        return self._plans.get((tenant, fingerprint, name))

    def register(self, session: Session, spec: ModelSpec, removal: Removal) -> Registration:
        """See Store.register_model."""
        plan_key = (session.tenant, spec.fingerprint, spec.plan_key)
        self._check(spec, is_new=plan_key not in self._plans)
        plan = self._plans.get(plan_key, spec.codec_plan)
        key = NamespaceKey(
            session.tenant,
            spec.fingerprint,
            spec.plan_key,
            hashlib.sha256(plan).digest(),
            spec.layer_group,
            spec.first_kv_head,
            spec.total_kv_heads,
            spec.kv_heads,
        )
        namespace = self._by_key.get(key)
        if namespace is None:
            namespace = self._create(key, spec, removal)
            self._plans[plan_key] = plan
        else:
            _check_same_layout(namespace.spec, spec)
        if namespace.namespace_id not in session.namespaces:
            session.namespaces[namespace.namespace_id] = namespace
            namespace.sessions.add(session)
            self._state.events.append(Granted(session.session_id, namespace.namespace_id))
        namespace.last_used = self._state.clock()
        return Registration(
            namespace.namespace_id,
            plan,
            plan == spec.codec_plan,
            namespace.quota.maximum,
        )

    def drop_if_idle(self, namespace: Namespace) -> None:
        """Forgets a namespace without sessions and slabs, its ledger and, if it was the last to use it, its plan."""
        if namespace.sessions or namespace.slabs or namespace.requests:
            return
        if self._state.namespaces.pop(namespace.namespace_id, None) is None:
            return
        del self._by_key[namespace.key]
        if namespace.ledger is not None:
            namespace.ledger.release()
            self._state.budget.give_back(namespace.plan.ledger_nbytes)
            self._state.events.append(LedgerGone(namespace.namespace_id, namespace.ledger.memory))
        key = namespace.key
        if not any(
            (other.tenant, other.fingerprint, other.plan_key) == (key.tenant, key.fingerprint, key.plan_key)
            for other in self._by_key
        ):
            self._plans.pop((key.tenant, key.fingerprint, key.plan_key), None)

    def _create(self, key: NamespaceKey, spec: ModelSpec, removal: Removal) -> Namespace:
        config = self._state.config
        budget = self._state.budget
        quota = quota_for(config.quotas, key.tenant, spec.model_name)
        limit = min(quota.maximum or budget.total, budget.total)
        plan = plan_namespace(spec.block_bytes, limit, config.budget_bytes, config.max_sessions)
        promised = sum(other.quota.guaranteed or 0 for other in self._state.namespaces.values())
        if quota.guaranteed and (promised + quota.guaranteed > budget.total or quota.guaranteed > limit):
            raise BudgetTooSmallError(
                f"the guarantee of {quota.guaranteed} bytes for model {spec.model_name!r} can't be kept: {promised} of "
                f"{budget.total} bytes are guaranteed to others, its own maximum is {limit}. Lower the guarantees or "
                "raise the budget"
            )
        if len(self._state.namespaces) >= config.max_namespaces:
            self._make_room(removal)
        namespace = Namespace(next(self._state.namespace_ids), key, spec, plan, quota)
        assert maximum(namespace, budget) == limit
        self._by_key[key] = namespace
        self._state.namespaces[namespace.namespace_id] = namespace
        return namespace

    def _make_room(self, removal: Removal) -> None:
        """Drops the namespace that was left longest ago; nobody uses it, so that its slabs are gone at once."""
        idle = [other for other in self._state.namespaces.values() if not other.sessions and not other.requests]
        for namespace in sorted(idle, key=lambda other: other.last_used):
            for slab in namespace.live_slabs():
                removal.drain(slab)
            self.drop_if_idle(namespace)
            if len(self._state.namespaces) < self._state.config.max_namespaces:
                return
        raise LimitReachedError(
            f"{len(self._state.namespaces)} namespaces are in use: at most {self._state.config.max_namespaces} are "
            "allowed. End workers of other models, or run a second service"
        )

    def _check(self, spec: ModelSpec, *, is_new: bool) -> None:
        for name in ("fingerprint", "layout_digest"):
            value = getattr(spec, name)
            if len(value) != DIGEST_BYTES:
                raise InvalidRequestError(f"{name} of {len(value)} bytes: expected {DIGEST_BYTES}")
        for name in ("model_name", "layer_group", "codec", "plan_name"):
            value = getattr(spec, name)
            if len(value) > _MAX_NAME or (not value and name == "codec"):
                raise InvalidRequestError(f"{name} of {len(value)} characters: expected 1 to {_MAX_NAME}")
        for name, most in _RANGES.items():
            value = getattr(spec, name)
            if not 1 <= value <= most:
                raise InvalidRequestError(f"{name} is {value}: expected 1 to {most}")
        if spec.first_kv_head < 0 or spec.first_kv_head + spec.kv_heads > spec.total_kv_heads:
            raise InvalidRequestError(
                f"shard of KV heads {spec.first_kv_head} to {spec.first_kv_head + spec.kv_heads - 1}: expected heads "
                f"below total_kv_heads, which is {spec.total_kv_heads}"
            )
        if spec.dtype not in _DTYPES:
            raise InvalidRequestError(f"dtype {spec.dtype!r}: expected one of {', '.join(_DTYPES)}")
        if spec.block_bytes < 1 or spec.block_bytes % 8:
            raise InvalidRequestError(f"block_bytes is {spec.block_bytes}: expected a multiple of 8, at least 8")
        kept = sum(len(plan) for plan in self._plans.values())
        config = self._state.config
        total = kept + len(spec.codec_plan) if is_new else kept
        if len(spec.codec_plan) > config.max_plan_bytes or total > config.max_plan_bytes_total:
            raise LimitReachedError(
                f"codec plan of {len(spec.codec_plan)} bytes: at most {config.max_plan_bytes} for one model and "
                f"{config.max_plan_bytes_total} for all ({kept} are kept) are allowed"
            )


def _check_same_layout(kept: ModelSpec, sent: ModelSpec) -> None:
    names = [field.name for field in fields(ModelSpec) if field.name in _LAYOUT_FIELDS]
    differing = [name for name in names if getattr(kept, name) != getattr(sent, name)]
    if differing:
        values = "; ".join(
            f"{name} is {_show(getattr(sent, name))} here and {_show(getattr(kept, name))} in the service"
            for name in differing
        )
        raise LayoutConflictError(
            f"model {sent.model_name!r} is registered with another block layout: {values}. Expected the same layout "
            "for the same fingerprint, codec plan and shard: run the same client version in all workers"
        )


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
