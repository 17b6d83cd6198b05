"""Which transport a session uses, and why not a better one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_client.errors import TransportUnavailableError
from kvstore_client.offers import LEGACY, ServiceMemory
from kvstore_client.probing import probe_descriptors, probe_handle

if TYPE_CHECKING:
    from kvstore_proto.v1 import blocks_pb2 as pb

    from kvstore_client.address import Address
    from kvstore_client.descriptors import DescriptorSocket

TRANSPORTS = ("fd", "cuda-ipc", "bytes")
_REQUIRED = "required by the caller"


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport by name, and why not a better one (empty: it is the best)."""

    name: str
    reason: str


def first_choice(
    wanted: str | None, address: Address, descriptors: DescriptorSocket | None, timeout_s: float
) -> Choice:
    """What seems right before the service has said what its slabs are: descriptors if one can be mapped.

    Raises TransportUnavailableError when descriptors are required and can't.
    """
    if wanted == "bytes":
        return Choice("bytes", _REQUIRED)
    if descriptors is None:
        problem = f"{address} is not a Unix socket, so descriptors can't be passed"
    else:
        problem = probe_descriptors(descriptors, timeout_s)
    if problem and wanted == "fd":
        raise _unavailable(wanted, problem)
    return Choice("bytes", problem) if problem else Choice("fd", "")


def final_choice(
    wanted: str | None, first: Choice, memory: ServiceMemory, exchange: Callable[[], pb.ProbeHandleResponse]
) -> Choice:
    """The best transport that works for the slabs that there are. `exchange` asks for the probe handle.

    Raises TransportUnavailableError when another one is required.
    """
    if wanted == "bytes":
        return Choice("bytes", _REQUIRED)
    choice = _legacy_choice(memory, exchange) if memory.kind == LEGACY else first
    if wanted is None or wanted == choice.name:
        return choice
    raise _unavailable(wanted, _why_not(wanted, choice, memory))


def _unavailable(wanted: str, problem: str) -> TransportUnavailableError:
    error = TransportUnavailableError(
        f"transport {wanted} is required but doesn't work: {problem}; {_REMEDIES[wanted]}, or leave require_transport "
        "out"
    )
    error.problem = problem
    return error


def _legacy_choice(memory: ServiceMemory, exchange: Callable[[], pb.ProbeHandleResponse]) -> Choice:
    problem = probe_handle(exchange, memory)
    return Choice("bytes", problem) if problem else Choice("cuda-ipc", "")


def _why_not(wanted: str, choice: Choice, memory: ServiceMemory) -> str:
    if wanted == "fd" and memory.kind == LEGACY:
        return "the service's slabs are legacy CUDA allocations, which have no descriptors"
    if wanted == "cuda-ipc" and memory.kind != LEGACY:
        return f"the service's slabs are {memory.kind}, which have no legacy handles"
    return choice.reason


_REMEDIES = {
    "fd": "use the service's Unix socket on the same host, and --slab-kind vmm on a GPU",
    "cuda-ipc": "start the service with --device cuda:N --slab-kind legacy",
}
