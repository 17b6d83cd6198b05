"""What works between this process and a service, and why the rest does not: for operators."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_client import cuda
from kvstore_client.address import parse_address
from kvstore_client.choosing import TRANSPORTS
from kvstore_client.config import ClientConfig
from kvstore_client.errors import CudaError, KVStoreError, TransportUnavailableError
from kvstore_client.store import client_version, connect


@dataclass(frozen=True, slots=True)
class Candidate:
    """One transport, tried: `reason` says why it does not work."""

    transport: str
    works: bool
    reason: str = ""


@dataclass(slots=True)
class Diagnosis:
    """What was found. `error`: why nothing could be tried; the fields of the service are empty then."""

    address: str
    client_version: str
    pid: int
    error: str = ""
    server_version: str = ""
    candidates: list[Candidate] = field(default_factory=list)
    chosen: str = ""
    """The transport that a worker here gets."""
    chosen_reason: str = ""
    device: str = ""
    """Of the service, in its words."""
    device_uuid: str = ""
    device_here: str = ""
    """The same device as this process knows it; empty if it isn't visible here."""
    memory: str = ""
    process_watched: bool = False
    cuda_here: str = ""
    """The CUDA devices that this process sees, or why it sees none."""
    remarks: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether any transport does."""
        return any(candidate.works for candidate in self.candidates)


def diagnose(address: str, config: ClientConfig | None = None) -> Diagnosis:
    """Connects with each transport in turn, as a worker would, and once without a wish. Raises AddressError."""
    parsed = parse_address(address)
    found = Diagnosis(str(parsed), client_version(), os.getpid(), cuda_here=_cuda_here())
    for transport in TRANSPORTS:
        try:
            _try(found, address, transport, config)
        except TransportUnavailableError as error:
            found.candidates.append(Candidate(transport, works=False, reason=error.problem or str(error)))
        except KVStoreError as error:
            found.error = str(error)
            return found
        else:
            found.candidates.append(Candidate(transport, works=True))
    try:
        _try(found, address, None, config)
    except KVStoreError as error:
        found.error = str(error)
    found.remarks = _remarks(found, parsed.path)
    return found


def _try(found: Diagnosis, address: str, transport: str | None, config: ClientConfig | None) -> None:
    with connect(address, name="doctor", required=True, require_transport=transport, config=config) as store:
        stats = store.stats()
    if transport is None:
        found.chosen, found.chosen_reason = stats["transport"], stats["transport_reason"]
    found.server_version = stats["server_version"]
    found.memory, found.process_watched = stats["memory"], stats["process_watched"]
    found.device, found.device_here, found.device_uuid = stats["device"], stats["device_here"], stats["device_uuid"]


def _cuda_here() -> str:
    try:
        return ", ".join(cuda.get().devices())
    except CudaError as error:
        return f"none: {error}"


def _remarks(found: Diagnosis, socket: Path | None) -> list[str]:
    remarks = []
    if not found.process_watched:
        remarks.append(
            "the service does not watch this process: what it holds is given up a grace period after its connection "
            "ends, and slabs that it mapped are never used again. On the Unix socket, with Linux 5.3 or newer, it is "
            "watched"
        )
    if found.memory == "cuda-legacy":
        remarks.append(
            f"CUDA opens no legacy handle between processes of equal pid, as two containers often are; this one is "
            f"{found.pid}. The fd transport (--slab-kind vmm, Unix socket) has no such rule"
        )
    elif found.memory == "cuda-vmm":
        remarks.append("read-only mappings of GPU memory guard against bugs, not against a hostile worker")
    if socket is not None and _same_user(socket):
        remarks.append(
            "service and worker run under the same user, so read-only mappings of host memory are no protection; "
            "run the service under a user of its own"
        )
    if found.server_version and found.server_version != found.client_version:
        remarks.append(f"versions differ: client {found.client_version}, service {found.server_version}")
    return remarks


def _same_user(socket: Path) -> bool:
    try:
        return socket.stat().st_uid == os.getuid()
    except OSError:
        return False
