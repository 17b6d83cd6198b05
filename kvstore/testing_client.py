"""A client without conveniences, for tests and benchmarks of the service: every message goes out as it is asked for."""

import hashlib
import mmap
import os
import queue
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from kvstore_kernels.checksum import block_checksum
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import admin_pb2_grpc, blocks_pb2, blocks_pb2_grpc, descriptor_pb2, session_pb2, session_pb2_grpc

DEADLINE_S = 10.0
SLAB = descriptor_pb2.SEGMENT_KIND_SLAB
LEDGER = descriptor_pb2.SEGMENT_KIND_LEDGER
_NO_PROXY = (("grpc.enable_http_proxy", 0),)


class DescriptorRefusedError(Exception):
    """The descriptor socket answered with an error. `code` is a gRPC status code number."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class DescriptorClient:
    """One connection to the descriptor socket."""

    def __init__(self, address: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(address) + ".fd")

    def ask(
        self, request: descriptor_pb2.DescriptorRequest, fds: tuple[int, ...] = ()
    ) -> tuple[descriptor_pb2.DescriptorResponse, list[int]]:
        """Sends a request and returns the answer with its descriptors. DescriptorRefusedError, EOFError."""
        socket.send_fds(self.sock, [request.SerializeToString()], list(fds))
        data, received, _, _ = socket.recv_fds(self.sock, 65536, 4)
        if not data:
            raise EOFError("the descriptor socket closed the connection")
        response = descriptor_pb2.DescriptorResponse.FromString(data)
        if response.WhichOneof("response") == "error":
            raise DescriptorRefusedError(response.error.code, response.error.message)
        return response, received

    def hello(
        self, instance_id: bytes, *, protocol_version: int = PROTOCOL_VERSION, pidfd: int | None = None
    ) -> descriptor_pb2.HelloReply:
        hello = descriptor_pb2.Hello(protocol_version=protocol_version, instance_id=instance_id)
        request = descriptor_pb2.DescriptorRequest(hello=hello)
        return self.ask(request, () if pidfd is None else (pidfd,))[0].hello

    def open_segment(self, kind: int, segment_id: int, *, writable: bool) -> tuple[descriptor_pb2.Segment, int]:
        """A segment's dimensions and descriptor, the caller's to close."""
        wanted = descriptor_pb2.OpenSegment(kind=kind, id=segment_id, writable=writable)  # type: ignore[arg-type]
        response, fds = self.ask(descriptor_pb2.DescriptorRequest(open_segment=wanted))
        return response.segment, fds[0]

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What to register: a namespace of blocks of `block_bytes`."""

    name: str = "model"
    block_bytes: int = 4096
    codec: str = "passthrough"
    codec_plan: bytes = b""
    block_tokens: int = 64
    layer_group: str = "full:0-1"

    def request(self) -> session_pb2.RegisterModelRequest:
        layout = f"{self.name} {self.block_bytes} {self.codec} {self.block_tokens}"
        return session_pb2.RegisterModelRequest(
            model_fingerprint=hashlib.sha256(self.name.encode()).digest(),
            model_name=self.name,
            shard=session_pb2.Shard(layer_group=self.layer_group, first_kv_head=0, total_kv_heads=2),
            layout=session_pb2.BlockLayout(
                block_tokens=self.block_tokens, layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="float32",
                codec=self.codec, block_bytes=self.block_bytes, digest=hashlib.sha256(layout.encode()).digest(),
            ),
            codec_plan=self.codec_plan,
        )  # fmt: skip


class RawClient:
    """A session: hello, stream and stubs. `events` holds what the service said on the stream after welcome.

    `target` is a Unix socket's path, or "host:port" for a session without hello.
    """

    def __init__(
        self,
        target: Path | str,
        *,
        name: str = "",
        instance_id: bytes | None = None,
        transport: str | None = None,
        protocol_version: int = PROTOCOL_VERSION,
        token: str | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[session_pb2.SessionResponse | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[session_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._writable: set[int] = set()
        self._maps: dict[int, tuple[descriptor_pb2.Segment, mmap.mmap]] = {}
        self._leases: list[int] = []
        self._reserved: list[blocks_pb2.ReserveResponse] = []
        self._slabs: set[int] = set()
        self.instance_id = instance_id or secrets.token_bytes(16)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self.descriptors: DescriptorClient | None = None
        metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(target, Path):
            self.descriptors = DescriptorClient(target)
            pidfd = os.pidfd_open(os.getpid())
            try:
                reply = self.descriptors.hello(self.instance_id, pidfd=pidfd)
            finally:
                os.close(pidfd)
            self.watched = reply.process_watched
            metadata = (("kvstore-token", token or reply.token),)
        self.channel = grpc.insecure_channel(
            f"unix:{target}" if isinstance(target, Path) else target, options=_NO_PROXY
        )
        self._stream = session_pb2_grpc.SessionServiceStub(self.channel).Session(
            iter(self._sent.get, None), metadata=metadata
        )
        opening = session_pb2.OpenSession(
            instance_id=self.instance_id,
            client_version="test",
            protocol_version=protocol_version,
            name=name,
            transport=transport or ("fd" if isinstance(target, Path) else "bytes"),
        )
        self.say(session_pb2.SessionRequest(open=opening))
        try:
            self.welcome: session_pb2.Welcome = next(self._stream).welcome
        except grpc.RpcError:
            self._sent.put(None)
            self.channel.close()
            if self.descriptors is not None:
                self.descriptors.close()
            raise
        self.metadata = (("kvstore-session", self.welcome.session_id.hex()),)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.blocks = blocks_pb2_grpc.BlockServiceStub(self.channel)
        self._listener.start()

    def say(self, message: session_pb2.SessionRequest) -> None:
        """Sends on the session stream."""
        self._sent.put(message)

    def call(self, method: Any, request: Any) -> Any:
        """One unary call with this session's metadata and a deadline."""
        return method(request, metadata=self.metadata, timeout=DEADLINE_S)

    def register(self, shape: ModelShape | None = None) -> session_pb2.RegisterModelResponse:
        response: session_pb2.RegisterModelResponse = self.call(
            self.sessions.RegisterModel, (shape or ModelShape()).request()
        )
        return response

    def reserve(self, namespace_id: int, digests: list[bytes], anonymous: int = 0) -> blocks_pb2.ReserveResponse:
        request = blocks_pb2.ReserveRequest(namespace_id=namespace_id, digests=b"".join(digests), anonymous=anonymous)
        response: blocks_pb2.ReserveResponse = self.call(self.blocks.Reserve, request)
        self._reserved.append(response)
        self._slabs.update(response.slab_ids)
        return response

    def commit(
        self,
        namespace_id: int,
        reserved: blocks_pb2.ReserveResponse,
        digests: list[bytes],
        checksums: list[int],
        errors: list[float] | None = None,
    ) -> blocks_pb2.CommitResponse:
        """Commits the first slots of a reservation as one chain; `errors` default to 0."""
        count = len(digests)
        request = blocks_pb2.CommitRequest(
            namespace_id=namespace_id,
            slab_ids=reserved.slab_ids[:count],
            slots=reserved.slots[:count],
            generations=reserved.generations[:count],
            digests=b"".join(digests),
            parents=b"".join([bytes(32), *digests[:-1]]),
            checksums=checksums,
            errors=[0.0] * count if errors is None else errors,
        )
        response: blocks_pb2.CommitResponse = self.call(self.blocks.Commit, request)
        return response

    def lookup_and_lease(self, namespace_id: int, digests: list[bytes], wait_ms: int = 0) -> blocks_pb2.Lease:
        query = blocks_pb2.Query(namespace_id=namespace_id, digests=b"".join(digests))
        request = blocks_pb2.LookupAndLeaseRequest(queries=[query], wait_ms=wait_ms)
        lease: blocks_pb2.Lease = self.call(self.blocks.LookupAndLease, request).leases[0]
        self._leases.append(lease.lease_id)
        self._slabs.update(lease.slab_ids)
        return lease

    def look_up_and_reserve(
        self, chains: list[tuple[int, list[bytes]]], anonymous: int = 0
    ) -> blocks_pb2.LookupAndLeaseResponse:
        """Leases what is held of each (namespace, digests), and reserves slots for the rest in the same call."""
        request = blocks_pb2.LookupAndLeaseRequest(
            queries=[blocks_pb2.Query(namespace_id=space, digests=b"".join(digests)) for space, digests in chains],
            reserve=blocks_pb2.ReserveRest(anonymous=anonymous),
        )
        response: blocks_pb2.LookupAndLeaseResponse = self.call(self.blocks.LookupAndLease, request)
        self._leases.extend(lease.lease_id for lease in response.leases)
        if response.HasField("reservation"):
            self._reserved.append(response.reservation)
            self._slabs.update(response.reservation.slab_ids)
        return response

    def map(self, slab_id: int, *, writable: bool) -> tuple[descriptor_pb2.Segment, mmap.mmap]:
        """A slab's dimensions and its mapping, made once, and once more where it was made for reading alone."""
        if slab_id not in self._maps or (writable and slab_id not in self._writable):
            if self.descriptors is None:
                raise ValueError("a session over TCP can't map slabs: connect to the Unix socket")
            segment, fd = self.descriptors.open_segment(SLAB, slab_id, writable=writable)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._maps[slab_id] = (segment, mmap.mmap(fd, segment.bytes, prot=prot))
            if writable:
                self._writable.add(slab_id)
            os.close(fd)
        return self._maps[slab_id]

    def publish(self, namespace_id: int, digests: list[bytes], payloads: list[bytes]) -> blocks_pb2.ReserveResponse:
        """Reserves slots, writes the payloads in place and commits them as one chain."""
        reserved = self.reserve(namespace_id, digests)
        if len(reserved.slots) < len(digests):
            raise ValueError(f"{len(reserved.slots)} of {len(digests)} slots: {reserved.short_reason}")
        for slab_id, slot, payload in zip(reserved.slab_ids, reserved.slots, payloads, strict=True):
            segment, memory = self.map(slab_id, writable=True)
            memory[slot * segment.slot_bytes : slot * segment.slot_bytes + len(payload)] = payload
        self.commit(namespace_id, reserved, digests, [block_checksum(payload) for payload in payloads])
        return reserved

    def read(self, lease: blocks_pb2.Lease) -> list[bytes]:
        """Copies the leased slots out of their mappings."""
        blocks = []
        for slab_id, slot in zip(lease.slab_ids, lease.slots, strict=True):
            segment, memory = self.map(slab_id, writable=False)
            blocks.append(memory[slot * segment.slot_bytes : (slot + 1) * segment.slot_bytes])
        return blocks

    def abort(self, reserved: blocks_pb2.ReserveResponse) -> int:
        """Gives all slots of a reservation back; returns how many were held still."""
        request = blocks_pb2.AbortRequest(
            slab_ids=reserved.slab_ids, slots=reserved.slots, generations=reserved.generations
        )
        aborted: int = self.call(self.blocks.Abort, request).aborted
        return aborted

    def release(self, *lease_ids: int) -> int:
        """Ends leases; returns how many were held still."""
        released: int = self.call(self.blocks.Release, blocks_pb2.ReleaseRequest(lease_ids=lease_ids)).released
        return released

    def close(self, *, orderly: bool = False) -> None:
        """Drops the connection; in order: gives back all that its methods got, so that the session ends at once."""
        for _, memory in self._maps.values():
            memory.close()
        self._maps.clear()
        if orderly and self._listener.is_alive():
            self._give_back()
        else:
            self._stream.cancel()
        self._sent.put(None)
        self._listener.join(DEADLINE_S)
        self.channel.close()
        if self.descriptors is not None:
            self.descriptors.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(orderly=True)

    def _give_back(self) -> None:
        try:
            self.release(*self._leases)
            for reserved in self._reserved:
                self.abort(reserved)
        except grpc.RpcError:
            # The service has gone, or has ended the session.
            return
        done = session_pb2.SlabsUnmapped(slab_ids=sorted(self._slabs))
        self.say(session_pb2.SessionRequest(slabs_unmapped=done))

    def _listen(self) -> None:
        try:
            for message in self._stream:
                self.events.put(message)
        except grpc.RpcError:
            # The end of the stream, however it comes.
            pass
        finally:
            self.events.put(None)


def admin_channel(address: Path) -> grpc.Channel:
    """A channel to the admin socket of a service."""
    return grpc.insecure_channel(f"unix:{address}.admin", options=_NO_PROXY)


def admin_stub(channel: grpc.Channel) -> admin_pb2_grpc.AdminServiceStub:
    """The AdminService on such a channel."""
    return admin_pb2_grpc.AdminServiceStub(channel)


def chain(seed: str, blocks: int) -> list[bytes]:
    """Digests of a made-up chain."""
    return [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(blocks)]
