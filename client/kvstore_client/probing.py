"""Tries, before anything depends on it, whether the service's memory can be mapped here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client import cuda
from kvstore_client.errors import CudaError, KVStoreError, ServiceError
from kvstore_client.holds import Hold, HostHold, take_hold
from kvstore_client.memory import buffer_at
from kvstore_client.offers import (
    MEMFD,
    VMM,
    Offer,
    ServiceMemory,
    memory_problem,
    offer_of_handle,
    offer_of_segment,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_client.descriptors import DescriptorSocket


def probe_descriptors(descriptors: DescriptorSocket, timeout_s: float) -> str:
    """Maps memory of the kind that the slabs have, and compares the nonce in it: empty if that works, else what does
    not.
    """
    try:
        reply, received = descriptors.probe(timeout_s)
    except ServiceError as error:
        return f"the probe page did not arrive: {error}"
    offer = offer_of_segment(reply.segment, received)
    with offer:
        if offer.kind == MEMFD:
            # The page is whatever its descriptor says.
            offer.nbytes = received.size
        elif offer.kind != VMM:
            return f"the probe came as memory of kind {offer.kind}, which this client does not know"
        return _compare(offer, device_memory(offer.kind, offer.device_uuid, "its device", b""), reply.nonce)


def probe_handle(exchange: Callable[[], pb.ProbeHandleResponse], home: ServiceMemory) -> str:
    """Opens a legacy handle and compares the nonce behind it: empty if that works, else what does not."""
    try:
        reply = exchange()
    except ServiceError as error:
        return f"the probe handle did not arrive: {error}"
    return _compare(offer_of_handle(reply.handle), home, reply.nonce)


def device_memory(kind: str, device_uuid: bytes, name: str, boot_id: bytes) -> ServiceMemory:
    """What the service says of its memory, with the device as this process knows it."""
    if kind == MEMFD:
        return ServiceMemory(kind, b"", name, "cpu", boot_id)
    try:
        device = f"cuda:{cuda.get().ordinal_of(device_uuid)}"
    except CudaError:
        # Reported by whoever needs it.
        device = ""
    return ServiceMemory(kind, device_uuid, name, device, boot_id)


def _compare(offer: Offer, home: ServiceMemory, nonce: bytes) -> str:
    problem = memory_problem(offer, home)
    if problem:
        return f"the probe memory {problem}"
    if not 0 < len(nonce) <= offer.nbytes:
        return f"the probe page has {offer.nbytes} bytes and its nonce {len(nonce)}"
    try:
        if offer.kind != MEMFD:
            driver = cuda.get()
            ordinal = driver.ordinal_of(offer.device_uuid)
            problem = driver.tensor_problem(ordinal)
            if problem:
                return problem
        hold = take_hold(offer, home, writable=False)
        try:
            found = _first_bytes(hold, home, len(nonce))
        finally:
            hold.release()
    except OSError as error:
        return f"the probe page can't be mapped: {error}"
    except KVStoreError as error:
        return f"{error}"
    return "" if found == nonce else "the probe page does not hold its nonce"


def _first_bytes(hold: Hold, home: ServiceMemory, count: int) -> bytes:
    if isinstance(hold, HostHold):
        return bytes(memoryview(buffer_at(hold.address, hold.nbytes))[:count])
    return cuda.get().read(hold.address, count, home.ordinal)
