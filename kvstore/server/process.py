"""One server from its first message to its exit."""

import asyncio
import logging
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable

from kvstore.config import ServiceConfig, StartError
from kvstore.control import Configure, ControlChannel, EndClient, Ready, StartFailed
from kvstore.device.base import MEMFD, Device
from kvstore.device.cpu import CpuDevice
from kvstore.device.opening import open_device
from kvstore.errors import LimitReachedError, ServiceUnavailableError
from kvstore.log import configure_logging
from kvstore.metrics.collector import render, renderer
from kvstore.metrics.endpoint import MetricsEndpoint
from kvstore.server.control_link import ControlLink
from kvstore.server.health import Health
from kvstore.server.listeners import ADMIN_SERVICE, WORKER_SERVICES, Listeners
from kvstore.server.workers import Workers
from kvstore.service.admin_service import AdminService
from kvstore.service.block_service import BlockService
from kvstore.service.clients import Client, Clients
from kvstore.service.core import PROBE_BYTES, Core
from kvstore.service.session_service import SessionService
from kvstore.service.sessions import SessionTable
from kvstore.store.store import Store
from kvstore.store.types import Quota, QuotaRule, StoreConfig

CONFIGURE_DEADLINE_S = 10.0
WORK_LIMIT_S = 30.0
WORK_THREADS = 4
_logger = logging.getLogger("kvstore.server")


async def run(control: socket.socket) -> int:
    """Serves until SIGTERM or until the supervisor is gone; returns the exit code."""
    channel = ControlChannel(control)
    config = receive_config(channel)
    configure_logging("server", as_json=config.json_logs, level=config.log_level)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await serve(config, channel, stop)


async def serve(
    config: ServiceConfig,
    channel: ControlChannel,
    stop: asyncio.Event,
    choose_device: Callable[[ServiceConfig], Device] = open_device,
) -> int:
    """Serves until `stop` is set or the supervisor is gone; returns the exit code. The supervisor hears of failures."""
    try:
        device = choose_device(config)
    except StartError as error:
        channel.send(StartFailed(str(error)))
        channel.close()
        return 1
    server = Server(config, channel, device, stop)
    try:
        await server.start()
    except (StartError, LimitReachedError, ServiceUnavailableError) as error:
        channel.send(StartFailed(str(error)))
        await server.close(0)
        return 1
    failed = await server.serve()
    return 1 if failed else 0


def receive_config(channel: ControlChannel) -> ServiceConfig:
    """The supervisor's first message. SystemExit when there is none in time."""
    readable, _, _ = select.select([channel], [], [], CONFIGURE_DEADLINE_S)
    received = channel.receive() if readable else None
    if received is None or not isinstance(received[0], Configure):
        raise SystemExit("error: no configuration on the control channel. Expected to be started by `kvstore serve`")
    return ServiceConfig.from_json(received[0].config)


class Server:
    """Puts the parts together and takes them apart in the right order.

    Order of the stop: health says NOT_SERVING, sessions hear goodbye, calls finish, then descriptors are closed.
    """

    def __init__(self, config: ServiceConfig, channel: ControlChannel, device: Device, stop: asyncio.Event) -> None:
        self._config = config
        self._channel = channel
        self._stop = stop
        self._failure = ""
        self._workers = Workers(threads=WORK_THREADS, limit_s=WORK_LIMIT_S)
        store = Store(
            StoreConfig(
                budget_bytes=config.budget_bytes,
                device=device.name,
                fixed_bytes=0 if device.kind == MEMFD else PROBE_BYTES,
                max_sessions=config.max_sessions,
                quotas=(QuotaRule(quota=Quota(maximum=config.namespace_max_bytes)),),
            ),
            # The ledger is host memory, also of blocks on a GPU: the server reads it all the time.
            create_ledger=CpuDevice().create_slab,
            clock=time.monotonic,
        )
        self._core = Core(
            store=store,
            device=device,
            workers=self._workers,
            sessions=SessionTable(),
            boot_id=secrets.token_bytes(16),
            on_fatal=self._fail,
        )
        self._core.clients = Clients(on_death=self._client_died, on_unused=self._client_unused)
        self._core.link = ControlLink(
            channel,
            on_hello=self._core.clients.hello,
            on_left=self._core.clients.left,
            on_closed=self._supervisor_gone,
        )
        self._health = Health((*WORKER_SERVICES, ADMIN_SERVICE), self._workers.stuck)
        self._metrics: MetricsEndpoint | None = None
        if config.metrics:
            registry = renderer(self._core)
            self._metrics = MetricsEndpoint(config.metrics, lambda: render(registry), self._health.why_not_ready)
        self._listeners = Listeners(
            config,
            SessionService(self._core, session_grace_s=config.session_grace_s),
            BlockService(self._core),
            AdminService(self._core),
            self._health,
        )

    async def start(self) -> None:
        """Serves all sockets and says so. StartError, or an error of the device, when it can't."""
        await self._core.offer_probe()
        await self._listeners.start()
        if self._metrics is not None:
            await self._metrics.start()
        self._core.spawn(self._health.run())
        self._core.link.send(Ready(self._listeners.listen, "" if self._metrics is None else self._metrics.url))

    async def serve(self) -> str:
        """Serves until told to stop; returns what went wrong, if anything."""
        await self._stop.wait()
        _logger.info("stopping%s", f": {self._failure}" if self._failure else "")
        self._health.drain()
        self._core.stopping = True
        for session in self._core.sessions.all():
            session.outbox.goodbye("the service is about to stop")
        await self.close(self._config.grace_s)
        return self._failure

    async def close(self, grace_s: float) -> None:
        await self._listeners.stop(grace_s)
        # After the calls: whoever asks meanwhile hears why the service is not ready.
        if self._metrics is not None:
            self._metrics.close()
        await self._core.close()
        self._core.clients.close()
        self._core.link.close()
        self._workers.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._stop.set()

    def _supervisor_gone(self) -> None:
        self._fail("the supervisor is gone")

    def _client_died(self, client: Client) -> None:
        if client.session_id is None:
            self._client_unused(client.token)
            return
        self._core.store.close_session(client.session_id, f"process {client.pid} died")
        self._core.settle_soon()

    def _client_unused(self, token: str) -> None:
        self._core.link.send(EndClient(token))
