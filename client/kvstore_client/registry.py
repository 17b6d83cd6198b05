"""The namespaces of a store: registers them, now or when a service appears."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore_proto.v1 import session_pb2 as pb

from kvstore_client.config import ClientConfig
from kvstore_client.errors import KVStoreError, ServiceUnavailableError
from kvstore_client.namespace import ModelIdentity, Namespace, Registration
from kvstore_client.notices import Notices
from kvstore_client.plans import PlanFolder, read_plan

if TYPE_CHECKING:
    from kvstore_kernels.codecs.plan import CodecPlan

    from kvstore_client.link import Link

_Key = tuple[bytes, bytes, object, str, str]


class Registry:
    """Invariants: one Namespace an identity and compute device; a namespace's plan is fixed before anybody else sees
    it; a registration is of the epoch in which it was made.
    """

    def __init__(self, config: ClientConfig, notices: Notices, plans: PlanFolder, *, required: bool) -> None:
        self._config = config
        self._notices = notices
        self._plans = plans
        self._required = required
        self._making = threading.Lock()
        self._namespaces: dict[_Key, Namespace] = {}

    def namespace_for(
        self,
        identity: ModelIdentity,
        plan_factory: Callable[[], CodecPlan],
        current_link: Callable[[], Link | None],
        compute_device: str = "cpu",
    ) -> Namespace:
        """See Store.namespace_for."""
        key: _Key = (
            identity.fingerprint, identity.layout.digest(), identity.shard, identity.plan_name, compute_device,
        )  # fmt: skip
        with self._making:
            known = self._namespaces.get(key)
            if known is not None:
                return known
            link = current_link()
            plan = None if link is None else self._kept_plan(identity, link)
            plan = plan or self._plans.load(identity.fingerprint, identity.layout, identity.plan_name)
            plan = plan or plan_factory()
            namespace = Namespace(identity, plan, compute_device)
            link = current_link()
            if link is not None:
                namespace = self._first_registration(namespace, link)
            self._plans.save(identity.fingerprint, identity.layout, namespace.plan, identity.plan_name)
            self._namespaces[key] = namespace
        # A service may have appeared, or gone and come again, since.
        link = current_link()
        if link is not None and (namespace.registration is None or namespace.registration.epoch != link.epoch):
            self.register(namespace, link)
        return namespace

    def register_missing(self, link: Link) -> bool:
        """Registers what isn't registered with this attachment. Whether something is still missing."""
        missing = False
        for namespace in list(self._namespaces.values()):
            registration = namespace.registration
            if registration is not None and registration.epoch == link.epoch:
                continue
            if namespace.reason == "service-away":
                self.register(namespace, link)
            missing = missing or namespace.reason == "service-away"
        return missing

    def lost(self) -> None:
        """The attachment is gone: blocks stay local for now, and the next service decides anew."""
        for namespace in list(self._namespaces.values()):
            namespace.local_only("service-away")

    def register(self, namespace: Namespace, link: Link) -> None:
        """Registers a namespace whose plan is fixed. A refusal keeps its blocks local."""
        try:
            reply = self._call(namespace.identity, namespace.plan, link)
        except KVStoreError as error:
            self._refused(namespace, error)
            return
        if not reply.codec_plan_kept and reply.codec_plan != namespace.plan.to_bytes():
            namespace.local_only("plan-differs")
            self._notices.warn_condition(
                "plan-differs",
                f"{namespace.identity.model_name}: the service keeps another codec plan than this worker encodes with; "
                "its blocks stay local until it attaches the model again",
            )
            return
        namespace.registered(Registration(link.epoch, reply.namespace_id, reply.max_bytes))

    def _first_registration(self, namespace: Namespace, link: Link) -> Namespace:
        """Nothing is encoded yet, so another plan that the service keeps can be adopted."""
        identity = namespace.identity
        try:
            reply = self._call(identity, namespace.plan, link)
        except KVStoreError as error:
            if self._required:
                raise
            self._refused(namespace, error)
            return namespace
        if not reply.codec_plan_kept and reply.codec_plan != namespace.plan.to_bytes():
            kept = read_plan(reply.codec_plan, identity.layout)
            if kept is None:
                namespace.local_only("plan-differs")
                self._notices.warn(
                    "plan-unreadable",
                    f"{identity.model_name}: the codec plan that the service keeps does not fit this model; its blocks "
                    "stay local. Evict the namespace, or use the version of gpu-kvstore that wrote the plan",
                )
                return namespace
            namespace = Namespace(identity, kept, namespace.compute_device)
        namespace.registered(Registration(link.epoch, reply.namespace_id, reply.max_bytes))
        return namespace

    def _kept_plan(self, identity: ModelIdentity, link: Link) -> CodecPlan | None:
        data = self._kept(identity.fingerprint, identity.plan_name or identity.codec, link)
        return None if data is None else read_plan(data, identity.layout)

    def named_plans(self, fingerprint: bytes, name: str, link: Link | None) -> list[bytes]:
        """What is kept for a model under a plan name, as bytes: the service's, then the cache folder's."""
        found = [None if link is None else self._kept(fingerprint, name, link), self._plans.named(fingerprint, name)]
        return [data for data in found if data is not None]

    def _kept(self, fingerprint: bytes, name: str, link: Link) -> bytes | None:
        request = pb.GetCodecPlanRequest(model_fingerprint=fingerprint, codec=name)
        try:
            reply = link.call("GetCodecPlan", link.sessions.GetCodecPlan, request, self._config.control_timeout_s)
        except KVStoreError:
            return None
        return bytes(reply.codec_plan) if reply.found else None

    def _refused(self, namespace: Namespace, error: KVStoreError) -> None:
        if isinstance(error, ServiceUnavailableError):
            namespace.local_only("service-away")
            return
        namespace.local_only("refused")
        self._notices.warn_condition(
            f"refused-{namespace.identity.fingerprint.hex()}",
            f"{namespace.identity.model_name}: its blocks stay local. {error}",
        )

    def _call(self, identity: ModelIdentity, plan: CodecPlan, link: Link) -> pb.RegisterModelResponse:
        layout = identity.layout
        request = pb.RegisterModelRequest(
            model_fingerprint=identity.fingerprint,
            model_name=identity.model_name,
            shard=pb.Shard(
                layer_group=identity.shard.layer_group,
                first_kv_head=identity.shard.first_kv_head,
                total_kv_heads=identity.shard.total_kv_heads,
            ),
            layout=pb.BlockLayout(
                block_tokens=layout.block_tokens,
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                k_dim=layout.k_dim,
                v_dim=layout.v_dim,
                dtype=layout.dtype,
                codec=layout.codec,
                block_bytes=layout.block_bytes,
                digest=layout.digest(),
            ),
            codec_plan=plan.to_bytes(),
            plan_name=identity.plan_name,
        )
        reply: pb.RegisterModelResponse = link.call(
            "RegisterModel", link.sessions.RegisterModel, request, self._config.control_timeout_s
        )
        return reply
