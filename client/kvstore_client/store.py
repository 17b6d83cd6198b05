"""The public object that connect() returns."""

from __future__ import annotations

import atexit
import secrets
import weakref
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client.address import EMBEDDED, parse_address
from kvstore_client.attaching import Introduction
from kvstore_client.choosing import TRANSPORTS
from kvstore_client.config import ClientConfig
from kvstore_client.connection import FATAL
from kvstore_client.core import Core
from kvstore_client.cuda import uuid_text
from kvstore_client.device_work import device_name
from kvstore_client.embedded import Embedded, start_embedded
from kvstore_client.errors import ServiceUnavailableError, SettingError, UsageError
from kvstore_client.namespace import ModelIdentity, Namespace
from kvstore_client.reach import check_reach
from kvstore_client.request import Request

if TYPE_CHECKING:
    from kvstore_kernels.codecs.plan import CodecPlan

    from kvstore_client.hook import Attachment

INSTANCE_BYTES = 16
# Commits of a script that ends without close() get this long.
_EXIT_TIMEOUT_S = 2.0


def connect(
    address: str = EMBEDDED,
    *,
    name: str | None = None,
    required: bool = False,
    require_transport: str | None = None,
    local_budget: int | None = None,
    device: str = "cpu",
    budget: int | None = None,
    config: ClientConfig | None = None,
) -> Store:
    """Connects this process to a cache service.

    `address`: "embedded", "unix:/path" or "/path" of the service's socket, or "host:port". The embedded service holds
    its blocks on `device`: "cpu" (a child process, ended with this one) or "cuda:N" (in this process, which so needs no
    second CUDA context), and takes `budget` bytes of it (default: the service's). `name` is this worker's name in
    reports. `local_budget`: bytes of worker-local slots on each device that computes (default: half of what is free
    when the first model is attached). `config` defaults to ClientConfig(); KVSTORE_CLIENT_* variables fill in what it
    leaves at its defaults.

    If nobody answers, the store works without a service, says so once and attaches when one appears; with `required`
    that is ServiceUnavailableError, now and later. Always raised: AddressError, SettingError, AccessDeniedError,
    ProtocolMismatchError, and TransportUnavailableError if `require_transport` ("fd", "cuda-ipc" or "bytes")
    doesn't work here.
    """
    parsed = parse_address(address)
    if require_transport is not None and require_transport not in TRANSPORTS:
        raise SettingError(f"require_transport={require_transport!r}: expected one of {', '.join(TRANSPORTS)} or None")
    settings = (config or ClientConfig()).with_environment()
    if local_budget is not None:
        settings = settings.with_local_budget(local_budget)
    service = None
    if address == EMBEDDED:
        service = start_embedded(device, budget)
        parsed = parse_address(service.address)
    elif device != "cpu" or budget is not None:
        raise SettingError(
            f"device={device!r}, budget={budget!r} with address {address!r}: they configure the embedded service only; "
            "give them to `kvstore serve`, or leave them out"
        )
    who = Introduction(
        address=parsed,
        instance_id=secrets.token_bytes(INSTANCE_BYTES),
        name=name or "",
        client_version=client_version(),
        require_transport=require_transport,
        config=settings,
    )
    store = Store(Core(who, required=required), service)
    try:
        store.wait_first_attempt()
    except BaseException:
        store.close()
        raise
    return store


class Store:
    """A connection to the cache and everything attached to it. Made by connect(). Threads may share it; a forked child
    may not use it. A context manager.

    Invariants: each attached model has one attachment; nothing is sent from a finalizer; close() ends all threads and
    the embedded service.
    """

    def __init__(self, core: Core, service: Embedded | None = None) -> None:
        self._core = core
        self._service = service
        self._attachments: list[Attachment] = []
        self.last_report: Any = None
        core.connection.start()
        # Weakly: a store that nobody uses any more must not live until the interpreter ends.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # ---- for users

    def attach(self, model: Any, tokenizer: Any = None, **options: Any) -> Any:
        """Makes `model.generate` use the cache; see kvstore_client.hook.attach. Returns the attachment."""
        from kvstore_client import hook

        self._core.check_usable()
        attachment = hook.attach(self, model, tokenizer, **options)
        self._attachments = [a for a in self._attachments if a is not attachment]
        self._attachments.append(attachment)
        return attachment

    def detach(self, model: Any) -> None:
        """Undoes attach(model). Does nothing for a model that isn't attached."""
        found = [a for a in self._attachments if a.model is model]
        self._attachments = [a for a in self._attachments if a.model is not model]
        for attachment in found:
            attachment.detach()

    def cache(self, input_ids: Any, attention_mask: Any = None, *, model: Any = None) -> Any:
        """A cache to pass as `past_key_values`, filled with what is held of the prompt. `model` picks one of several
        attached models.
        """
        return self._attachment(model).cache(input_ids, attention_mask)

    def prewarm(self, text_or_ids: Any, *, pin: bool = False, model: Any = None) -> Any:
        """Computes and stores the blocks of a text ahead; with `pin` they are never evicted."""
        return self._attachment(model).prewarm(text_or_ids, pin=pin)

    def weights_changed(self, model: Any = None) -> None:
        """Has the fingerprint of one attached model (of all) computed afresh."""
        for attachment in self._attachments if model is None else [self._attachment(model)]:
            attachment.weights_changed()

    @property
    def required(self) -> bool:
        """Whether a missing service is an exception instead of a miss."""
        return self._core.required

    # ---- for the hook

    def namespace_for(
        self, identity: ModelIdentity, plan_factory: Callable[[], CodecPlan], *, device: Any = "cpu"
    ) -> Namespace:
        """Registers a model. The plan is the service's, else the cache folder's, else plan_factory()'s.

        `device`: where the model computes, a torch.device or its name: blocks are written there, and read there.
        plan_factory() is called at most once, in this thread. An absent service is no error: blocks stay local until
        one appears. With `required`: ServiceUnavailableError or ConflictError.
        """
        self._core.check_usable()
        compute_device = device_name(device)
        self._core.local.settle_budget(compute_device)
        namespace = self._core.registry.namespace_for(
            identity, plan_factory, lambda: self._core.connection.link, compute_device
        )
        check_reach(self._core, namespace)
        # If the service did not answer in time, the background registers it.
        self._core.worker.poke(lambda: None)
        return namespace

    def named_plans(self, fingerprint: bytes, name: str) -> list[bytes]:
        """Codec plans kept for a model under a name (ModelIdentity.plan_name), best first: the service's, then the
        cache folder's. Their bytes are somebody else's: to be checked.
        """
        self._core.check_usable()
        return self._core.registry.named_plans(fingerprint, name, self._core.connection.link)

    def open_request(self, namespace: Namespace, *, max_block_error: float | None = None) -> Request:
        """Starts a request; held blocks with an error above `max_block_error` count as not found. No call of the
        service.
        """
        self._core.check_usable()
        return Request(self._core, namespace, max_block_error)

    def pin(self, namespace: Namespace, digest: bytes, pinned: bool = True) -> int:
        """Keeps the chain that ends with `digest` from eviction, or lets it go again.

        Returns the chain's length in blocks; 0 while there is no service. NotHeldError when the chain isn't held.
        """
        self._core.check_usable()
        routed = self._core.route(namespace)
        if isinstance(routed, str):
            self._core.fell_back(routed)
            return 0
        link, registration = routed
        request = pb.PinRequest(namespace_id=registration.namespace_id, digest=digest, pinned=pinned)
        reply: pb.PinResponse = link.call("Pin", link.blocks.Pin, request, self._core.config.control_timeout_s)
        return reply.blocks

    def record_report(self, report: Any) -> None:
        """Keeps the report of the last request."""
        self.last_report = report

    def warn(self, kind: str, text: str) -> None:
        """Logs a warning: at most one line per kind in `notice_interval_s`, with the number of those left out."""
        self._core.notices.warn(kind, text)

    # ---- for tests and tools

    @property
    def attached(self) -> bool:
        """Whether there is a service right now."""
        return self._core.connection.link is not None

    @property
    def address(self) -> str:
        """The service's address (of the embedded one too)."""
        return str(self._core.who.address)

    def stats(self) -> dict[str, Any]:
        """Where this store stands: transport and why, the service's memory and device, boot id, breaker, local bytes,
        open requests, blocks kept back for their error, notices by kind.
        """
        core = self._core
        link = core.connection.link
        ages = core.open_requests()
        return {
            "address": self.address,
            "attached": link is not None,
            "transport": "" if link is None else link.transport.name,
            "transport_reason": "" if link is None else link.transport_reason,
            "memory": "" if link is None else link.memory.kind,
            "device": "" if link is None else link.memory.name,
            "device_here": "" if link is None else link.memory.device,
            "device_uuid": "" if link is None or not link.memory.device_uuid else uuid_text(link.memory.device_uuid),
            "process_watched": link is not None and link.process_watched,
            "tenant": "" if link is None else link.tenant,
            "boot_id": "" if link is None else link.boot_id.hex(),
            "server_version": "" if link is None else link.server_version,
            "breaker_open": link is not None and link.breaker.open,
            "mapped_slabs": 0 if link is None or link.slabs is None else len(link.slabs),
            "local_bytes": core.local.allocated_bytes,
            "local_blocks": core.local.taken_blocks,
            "local_budget": core.local.budget_bytes,
            "open_requests": len(ages),
            "oldest_request_s": ages[-1] if ages else 0.0,
            "queued_jobs": len(core.worker),
            "dropped_jobs": core.worker.dropped,
            "blocks_not_shared_error": core.blocks_not_shared_error,
            "notices": core.notices.counts(),
        }

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until all that was queued so far (commits, returns) is done; False when time is up or the service is
        away and owed something.
        """
        self._core.check_usable()
        return self._core.worker.flush(timeout)

    def wait_attached(self, timeout: float) -> bool:
        """Waits for a service; False when time is up."""
        return self._core.connection.wait_attached(timeout)

    def wait_first_attempt(self) -> None:
        """Waits for the outcome of the first attempt to attach, and judges it as connect() says."""
        connection, config = self._core.connection, self._core.config
        # Hello, probe, welcome and handle have a deadline each, and there may be two sessions (see attach()).
        known = connection.first_attempt.wait(8 * config.connect_timeout_s)
        error = connection.error
        if known and error is None:
            return
        if isinstance(error, FATAL):
            raise error
        text = f"{error}" if error else f"no answer from {self.address}"
        if self.required:
            raise ServiceUnavailableError(f"{text}; a service is required") from error
        self._core.notices.warn_condition(
            "service-away",
            f"{text}. Working without a service, with blocks of this process; attaching in the background when one "
            "appears",
        )

    def close(self, timeout: float = 5.0) -> None:
        """Detaches all models, finishes what is queued within `timeout` seconds, and ends the session. Idempotent.

        While a cache that was handed out still refers to the service's memory, the session goes on in the background:
        it ends when the last such cache is gone.
        """
        self._end(timeout, linger=self._service is None)

    def _end(self, timeout: float, *, linger: bool) -> None:
        if not self._core.in_own_process():
            return
        attachments, self._attachments = self._attachments, []
        for attachment in attachments:
            attachment.detach()
        self._core.close(timeout, linger=linger)
        if self._service is not None:
            self._service.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _attachment(self, model: Any) -> Attachment:
        self._core.check_usable()
        found = [a for a in self._attachments if model is None or a.model is model]
        if len(found) != 1:
            raise UsageError(
                "no such model is attached; call store.attach(model) first"
                if not found
                else f"{len(found)} models are attached; pass model= to say which one"
            )
        return found[0]


def _close_at_exit(reference: weakref.ref[Store]) -> None:
    store = reference()
    if store is not None:
        store._end(_EXIT_TIMEOUT_S, linger=False)  # noqa: SLF001 - a part of the class


def client_version() -> str:
    """The version of the installed distribution."""
    try:
        return metadata.version("gpu-kvstore")
    except metadata.PackageNotFoundError:
        return "0+unknown"
