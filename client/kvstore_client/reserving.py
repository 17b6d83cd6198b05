"""Gets private slots for a request."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client.blocks import Block
from kvstore_client.core import Core
from kvstore_client.errors import KVStoreError, ServiceUnavailableError
from kvstore_client.holdings import Debt, Holdings
from kvstore_client.meter import Meter
from kvstore_client.namespace import Namespace
from kvstore_client.transports.base import SlotRef
from kvstore_client.transports.in_place import open_slab, private_block

if TYPE_CHECKING:
    from kvstore_client.link import Link
    from kvstore_client.request import Request

_STATUS = {pb.RESERVE_STATUS_COMMITTED: "committed", pb.RESERVE_STATUS_IN_FLIGHT: "in_flight"}


@dataclass(slots=True)
class Granted:
    """What a reservation brought: mapped blocks, or (when blocks aren't written in place) slots to copy them to."""

    statuses: dict[bytes, str]
    blocks: dict[bytes, Block] = field(default_factory=dict)
    anonymous: list[Block] = field(default_factory=list)
    targets: dict[bytes, tuple[int, SlotRef]] = field(default_factory=dict)
    short: str = ""
    """Why there are fewer than asked for, in the service's words."""
    cause: str = ""
    """The same as a kind of notice: "service-full", "service-silent", "reserve-failed"; "" if all were granted."""


def reserve_slots(
    core: Core,
    namespace: Namespace,
    holdings: Holdings,
    meter: Meter,
    digests: Sequence[bytes],
    anonymous: int,
    *,
    background: bool = False,
) -> Granted:
    """One Reserve call, and the mappings it needs. Everything granted is in `holdings`. Never raises a ServiceError
    unless the store is `required`.
    """
    granted = Granted(dict.fromkeys(digests, "write"))
    routed = core.route(namespace)
    if isinstance(routed, str):
        if not background:
            core.fell_back(routed)
        meter.note(routed)
        return granted
    link, registration = routed
    if not link.writes_in_place(namespace):
        anonymous = 0
    if not digests and not anonymous:
        return granted
    try:
        if background:
            refs, reply = core.reserve(link, registration, digests, anonymous, probe=True)
        else:
            with meter.asking():
                refs, reply = core.reserve(link, registration, digests, anonymous)
        granted = _granted(digests, reply)
        if not holdings.add(link.epoch, slots=refs):
            core.give_back({link.epoch: Debt(slots=set(refs))})
            return granted
        _place(link, namespace, digests, refs, granted)
    except KVStoreError as error:
        if core.required and not background:
            raise
        kind = "service-silent" if isinstance(error, ServiceUnavailableError) else "reserve-failed"
        if isinstance(error, ServiceUnavailableError):
            core.notices.warn_condition(kind, f"no slots from the service: {error}")
        else:
            core.notices.warn(kind, f"no slots from the service: {error}")
        granted.cause = kind
    meter.note(granted.short or granted.cause)
    return granted


def accept_early(
    link: Link,
    namespace: Namespace,
    meter: Meter,
    digests: Sequence[bytes],
    refs: list[SlotRef],
    reply: pb.ReserveResponse,
) -> Granted:
    """What a look-up brought along; its slots are in the request's holdings already. Raises a KVStoreError."""
    granted = _granted(digests, reply)
    _place(link, namespace, digests, refs, granted)
    meter.note(granted.short)
    return granted


def _granted(digests: Sequence[bytes], reply: pb.ReserveResponse) -> Granted:
    statuses = {d: _STATUS.get(s, "write") for d, s in zip(digests, reply.statuses, strict=True)}
    return Granted(statuses, short=reply.short_reason, cause="service-full" if reply.short_reason else "")


def _place(link: Link, namespace: Namespace, digests: Sequence[bytes], refs: list[SlotRef], granted: Granted) -> None:
    if not link.writes_in_place(namespace):
        granted.targets = {d: (link.epoch, ref) for d, ref in zip(digests, refs, strict=False)}
        return
    slabs = {slab_id: open_slab(link, namespace, slab_id, writable=True) for slab_id in {ref.slab_id for ref in refs}}
    blocks = [private_block(slabs[ref.slab_id], ref, link.epoch) for ref in refs]
    granted.blocks = dict(zip(digests, blocks, strict=False))
    granted.anonymous = blocks[len(digests) :]


class TopUpJob:
    """Reserves ahead for a request that still exists by then."""

    def __init__(self, request: Request, count: int) -> None:
        self._request = weakref.ref(request)
        self._count = count

    def ready(self) -> bool:
        """At any time."""
        return True

    def run(self) -> None:
        """Asks for the slots."""
        request = self._request()
        if request is not None:
            request.top_up(self._count)

    def drop(self) -> None:
        """The queue was full: the next ensure_ahead() asks again."""
        request = self._request()
        if request is not None:
            request.topped_up()
