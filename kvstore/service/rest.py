"""Slots in the same call as a look-up, for what it does not find: one round trip less before a prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore_proto.v1 import blocks_pb2

from kvstore.errors import InvalidRequestError
from kvstore.service.requests import DIGEST_BYTES, MAX_BLOCKS, check_range
from kvstore.store.store import Store
from kvstore.store.types import LeaseResult, MissReason, Reservation, SlotRef


class _Slots(Protocol):
    """Of a reservation or of a message: three lists that run parallel."""

    @property
    def slab_ids(self) -> Sequence[int]: ...
    @property
    def slots(self) -> Sequence[int]: ...
    @property
    def generations(self) -> Sequence[int]: ...


def check_rest(request: blocks_pb2.LookupAndLeaseRequest) -> None:
    """Raises InvalidRequestError unless what is asked for is of one namespace and no more than Reserve takes."""
    namespaces = {query.namespace_id for query in request.queries}
    if len(namespaces) != 1:
        raise InvalidRequestError(
            f"reserve with queries of {len(namespaces)} namespaces: expected one; call Reserve for each of them"
        )
    blocks = sum(len(query.digests) for query in request.queries) // DIGEST_BYTES
    check_range("reserve.anonymous", request.reserve.anonymous, 0, max(0, MAX_BLOCKS - blocks))


def reserve_rest(
    store: Store, session_id: bytes, request: blocks_pb2.LookupAndLeaseRequest, leases: Sequence[LeaseResult]
) -> Reservation | None:
    """Slots for the digests behind the leases; as Store.reserve, it may need a slab first.

    None if the caller has to wait for another writer before that.
    """
    if any(lease.miss_reason == MissReason.IN_FLIGHT for lease in leases):
        return None
    rest = [
        query.digests[at : at + DIGEST_BYTES]
        for query, lease in zip(request.queries, leases, strict=True)
        for at in range(lease.blocks * DIGEST_BYTES, len(query.digests), DIGEST_BYTES)
    ]
    distinct = list(dict.fromkeys(rest))
    anonymous = request.reserve.anonymous + len(rest) - len(distinct)
    namespace_id = request.queries[0].namespace_id
    return store.reserve(session_id, namespace_id, b"".join(distinct), anonymous)


def slot_refs(slots: _Slots) -> list[SlotRef]:
    """One a slot. Raises ValueError when the lists differ in length."""
    return [SlotRef(*ref) for ref in zip(slots.slab_ids, slots.slots, slots.generations, strict=True)]
