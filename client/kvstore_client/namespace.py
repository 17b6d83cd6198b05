"""What a worker announces about a model, and what it knows about the namespace that holds its blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_client.errors import UsageError

if TYPE_CHECKING:
    from kvstore_kernels.codecs.plan import CodecPlan
    from kvstore_kernels.layout import BlockLayout

FINGERPRINT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one device computes. `layer_group` names its layers ("full:0-29")."""

    layer_group: str
    first_kv_head: int = 0
    total_kv_heads: int = 1


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """One layer group of one shard of one model: what two workers must agree on to share blocks.

    `fingerprint` is 32 bytes; `model_name` is for people only; `codec` is the codec's registered name and must be that
    of `layout`. `plan_name`: what the codec plan is kept under, if not the codec's name: workers that agree on it need
    not agree on a codec, they adopt the first one's.
    """

    fingerprint: bytes
    model_name: str
    codec: str
    layout: BlockLayout
    shard: Shard
    plan_name: str = ""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise UsageError(f"model fingerprint has {len(self.fingerprint)} bytes; expected {FINGERPRINT_BYTES}")
        if self.codec != self.layout.codec:
            raise UsageError(f"codec {self.codec!r} differs from the layout's {self.layout.codec!r}; pass the same one")


@dataclass(frozen=True, slots=True)
class Registration:
    """A namespace id, valid during one attachment to a service."""

    epoch: int
    namespace_id: int
    max_bytes: int = 0


class Namespace:
    """A model's blocks as this worker sees them.

    `plan` never changes after construction: blocks that were encoded with it stay readable. Whether blocks are shared
    can change at any time (`shares`, `reason`): the service may be away, come back, or keep another plan.
    """

    def __init__(self, identity: ModelIdentity, plan: CodecPlan, compute_device: str = "cpu") -> None:
        """`compute_device`: where the model computes, "cpu" or "cuda:N"."""
        self.identity = identity
        self.plan = plan
        self.compute_device = compute_device
        self._lock = threading.Lock()
        self._registration: Registration | None = None
        self._reason = "service-away"

    @property
    def layout(self) -> BlockLayout:
        """Layout of its blocks."""
        return self.identity.layout

    @property
    def registration(self) -> Registration | None:
        """The current registration, or None while blocks stay local."""
        return self._registration

    @property
    def namespace_id(self) -> int | None:
        """The service's id of it, or None while blocks stay local."""
        registration = self._registration
        return None if registration is None else registration.namespace_id

    @property
    def shares(self) -> bool:
        """Whether blocks are shared through the service right now."""
        return self._registration is not None

    @property
    def reason(self) -> str:
        """Why blocks are not shared; empty while they are."""
        with self._lock:
            return "" if self._registration is not None else self._reason

    def registered(self, registration: Registration) -> None:
        """The service keeps this namespace's plan and holds its blocks."""
        with self._lock:
            self._registration = registration

    def local_only(self, reason: str) -> None:
        """Blocks stay in this process until the next registration."""
        with self._lock:
            self._registration = None
            self._reason = reason

    def __repr__(self) -> str:
        return f"Namespace({self.identity.model_name!r}, id={self.namespace_id}, shares={self.shares})"
