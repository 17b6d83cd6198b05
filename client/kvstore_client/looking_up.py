"""Leases held prefixes for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client.blocks import DIGEST_BYTES, Match
from kvstore_client.core import Core, split_digests
from kvstore_client.errors import BadReplyError, KVStoreError
from kvstore_client.holdings import Debt, Holdings
from kvstore_client.meter import Meter
from kvstore_client.reserving import Granted, accept_early
from kvstore_client.transports.base import Receipt, check_lease, check_reservation, slots_of

if TYPE_CHECKING:
    from kvstore_client.link import Link
    from kvstore_client.namespace import Namespace, Registration

_REASONS = {
    pb.MISS_REASON_NOT_FOUND: "not-found",
    pb.MISS_REASON_IN_FLIGHT: "in-flight",
    pb.MISS_REASON_DAMAGED: "damaged",
    pb.MISS_REASON_FIDELITY: "fidelity",
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up brought: one Match a chain, and, if it was asked for and could be had at once, slots for the
    digests behind the leases.
    """

    matches: list[Match]
    reserved: Granted | None = None


def look_up(
    core: Core,
    link: Link,
    registration: Registration,
    namespace: Namespace,
    holdings: Holdings,
    meter: Meter,
    chains: Sequence[bytes],
    wait_ms: int,
    *,
    max_block_error: float | None = None,
    anonymous: int | None = None,
) -> Found:
    """One LookupAndLease for all chains; blocks with an error above `max_block_error` don't count.

    `anonymous`: not None: slots are reserved with it, so many on top of those for digests. Raises a KVStoreError when
    the call fails; then nothing is held.
    """
    request = pb.LookupAndLeaseRequest(
        queries=[
            pb.Query(namespace_id=registration.namespace_id, digests=chain, max_block_error=max_block_error)
            for chain in chains
        ],
        wait_ms=wait_ms,
        reserve=None if anonymous is None else pb.ReserveRest(anonymous=anonymous),
    )
    timeout_s = core.config.lookup_timeout_s + wait_ms / 1e3
    with meter.asking():
        reply: pb.LookupAndLeaseResponse = link.call("LookupAndLease", link.blocks.LookupAndLease, request, timeout_s)
    leases = {lease.lease_id for lease in reply.leases if lease.lease_id}
    slots = slots_of(reply.reservation)
    # First of all they are ours, so that none is lost whatever is wrong with the rest.
    if not holdings.add(link.epoch, leases=leases, slots=slots):
        core.give_back({link.epoch: Debt(leases, set(slots))})
        return Found([Match(reason="error") for _ in chains])
    if len(reply.leases) != len(chains):
        raise BadReplyError(f"LookupAndLease answered {len(reply.leases)} leases for {len(chains)} chains")
    matches = [
        _receive(core, link, registration, namespace, holdings, meter, lease, chain)
        for lease, chain in zip(reply.leases, chains, strict=True)
    ]
    if not link.transport_for(namespace).in_place:
        holdings.drop_leases(link.epoch, leases)
        core.give_back({link.epoch: Debt(leases=leases)})
    if not reply.HasField("reservation") or anonymous is None:
        return Found(matches)
    rest = [
        digest
        for chain, lease in zip(chains, reply.leases, strict=True)
        for digest in split_digests(chain)[len(lease.slots) :]
    ]
    digests = list(dict.fromkeys(rest))
    check_reservation(reply.reservation, len(digests), anonymous + len(rest) - len(digests))
    return Found(matches, accept_early(link, namespace, meter, digests, slots, reply.reservation))


def _receive(
    core: Core,
    link: Link,
    registration: Registration,
    namespace: Namespace,
    holdings: Holdings,
    meter: Meter,
    lease: pb.Lease,
    chain: bytes,
) -> Match:
    check_lease(lease, len(chain) // DIGEST_BYTES)
    receipt = Receipt()
    transport = link.transport_for(namespace)
    if lease.lease_id:
        try:
            receipt = transport.receive(link, namespace, lease)
        except KVStoreError as error:
            core.notices.warn("unreadable", f"leased blocks can't be read: {error}")
            receipt.reason = "unmapped"
    if not transport.in_place and not holdings.add_local(receipt.blocks):
        receipt.blocks, receipt.reason = [], "error"
    meter.add(
        blocks_leased=len(receipt.blocks),
        bytes_received=receipt.nbytes,
        verify_ms=receipt.verify_s * 1e3,
        damaged_blocks=len(receipt.damaged),
    )
    if receipt.damaged:
        _report_damage(core, link, registration, chain, receipt.damaged)
    reason = receipt.reason or _REASONS.get(lease.miss_reason, "")
    meter.note(receipt.reason)
    return Match(receipt.blocks, _writers(lease, len(receipt.blocks)), reason, lease.in_flight_age_ms)


def _writers(lease: pb.Lease, blocks: int) -> list[tuple[str, int]]:
    """The runs of the blocks that are used."""
    runs: list[tuple[str, int]] = []
    for run in lease.writers:
        used = min(run.blocks, blocks)
        if used > 0:
            runs.append((run.writer, used))
        blocks -= used
    return runs


def _report_damage(core: Core, link: Link, registration: Registration, chain: bytes, damaged: Sequence[int]) -> None:
    digests = b"".join(chain[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in damaged)
    core.notices.warn(
        "damaged",
        f"the bytes of block {digests[:8].hex()}... don't match their checksum: "
        "it and what follows are computed again, and the service was told. Check this host's memory and who may write "
        "the service's slabs (docs/guarantees.md)",
    )
    request = pb.ReportDamageRequest(namespace_id=registration.namespace_id, digests=digests)
    try:
        link.call("ReportDamage", link.blocks.ReportDamage, request, core.config.control_timeout_s)
    except KVStoreError as error:
        core.notices.warn("damage-report", f"the damage could not be reported: {error}")
