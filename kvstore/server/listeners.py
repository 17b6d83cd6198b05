"""The two gRPC servers: workers' (Unix socket, optional TCP) and operators' (Unix socket)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvstore_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)

from kvstore.config import ConfigurationError, ServiceConfig, split_host_port
from kvstore.server.health import Health
from kvstore.service.admin_service import AdminService
from kvstore.service.block_service import BlockService
from kvstore.service.guard import tolerant
from kvstore.service.session_service import SessionService

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_CALLS_PER_SESSION = 32
WORKER_SERVICES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    blocks_pb2.DESCRIPTOR.services_by_name["BlockService"].full_name,
)
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

# Pings of clients are welcome at any rate a client of ours uses and without calls; a server's own pings find dead TCP
# peers. Without the first two an idle client is thrown out for too many pings.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A second server on one TCP port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 16 * 1024),
)


class Listeners:
    """Starts and stops both servers. Health and reflection are on both."""

    def __init__(
        self, config: ServiceConfig, sessions: SessionService, blocks: BlockService, admin: AdminService, health: Health
    ) -> None:
        self.listen = ""
        self._config = config
        calls = 256 + MAX_CALLS_PER_SESSION * config.max_sessions
        self._workers = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=calls)
        self._operators = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=256)
        session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, _tolerant_server(self._workers))
        blocks_pb2_grpc.add_BlockServiceServicer_to_server(blocks, _tolerant_server(self._workers))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, _tolerant_server(self._operators))
        for server, names in ((self._workers, WORKER_SERVICES), (self._operators, (ADMIN_SERVICE,))):
            health_pb2_grpc.add_HealthServicer_to_server(health, server)
            health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            reflection.enable_server_reflection((*names, health_name, reflection.SERVICE_NAME), server)

    async def start(self) -> None:
        """Binds and serves. ConfigurationError when an address can't be bound."""
        _bind_unix(self._workers, self._config.address, 0o660)
        _bind_unix(self._operators, self._config.admin_address, 0o600)
        if self._config.listen:
            host, port = split_host_port(self._config.listen)
            try:
                port = self._workers.add_insecure_port(f"{host}:{port}")
            except RuntimeError:
                port = 0
            if not port:
                raise ConfigurationError(
                    f"can't listen on {self._config.listen}. Expected a free address of this machine: choose another "
                    "one with --listen (port 0 = any free one)"
                )
            self.listen = f"{host}:{port}"
        await self._workers.start()
        await self._operators.start()

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls; those under way get `grace_s` to finish."""
        await self._workers.stop(grace_s)
        await self._operators.stop(1.0)


class _Tolerant:
    """A server as the generated code sees it: takes handlers, and makes those that answer malformed requests."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Not used: the same handlers come by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        generic = grpc.method_handlers_generic_handler(service, tolerant(handlers))
        self._server.add_generic_rpc_handlers((generic,))


def _tolerant_server(server: grpc.aio.Server) -> grpc.aio.Server:
    # The generated code asks for a whole server but calls only these two methods.
    return cast("grpc.aio.Server", _Tolerant(server))


def _bind_unix(server: grpc.aio.Server, path: Path, mode: int) -> None:
    # In a folder of one's own nobody sees the moment before the chmod; the mask is the whole process's.
    private = not path.parent.stat().st_mode & 0o077
    before = None if private else os.umask(0o777 & ~mode)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigurationError(
            f"can't listen on {path}: {error}. Expected a folder this user may write to: choose "
            "another one with --address"
        ) from None
    finally:
        if before is not None:
            os.umask(before)
    path.chmod(mode)
