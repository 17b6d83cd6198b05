"""Health: alive, and ready. Answered by the event loop itself, so it never queues behind slow work."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PERIOD_S = 1.0
LIVE = "live"
MAX_WATCHES = 64
_Status = health_pb2.HealthCheckResponse
_logger = logging.getLogger(__name__)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # comes without types
    """The standard health service.

    Name "live": SERVING as long as the event loop turns. Every other name ("" and the services'): SERVING when work
    gets done, NOT_SERVING while `problem()` names one, and for good once the service drains. At most MAX_WATCHES
    are watched at a time, and one that does not read holds up nobody.
    """

    def __init__(self, names: tuple[str, ...], problem: Callable[[], str | None]) -> None:
        self._names = frozenset(("", *names))
        self._problem = problem
        self._found: str | None = None
        self._draining = False
        self._watches = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Looks for problems until cancelled."""
        while True:
            found = self._problem()
            if (found is None) != (self._found is None):
                _logger.warning("not ready: %s", found) if found else _logger.info("ready again")
                self._notify()
            self._found = found
            await asyncio.sleep(PERIOD_S)

    def drain(self) -> None:
        """Says NOT_SERVING from now on."""
        self._draining = True
        self._notify()

    def status(self, name: str) -> int:
        """Status of a name; SERVICE_UNKNOWN for a name that is not served."""
        if name == LIVE:
            return int(_Status.SERVING)
        if name not in self._names:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.NOT_SERVING if self._draining or self._found else _Status.SERVING)

    def why_not_ready(self) -> str | None:
        """What keeps the service from working, in words; None when it is ready."""
        return "the service is about to stop" if self._draining else self._found

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            names = ", ".join(sorted(repr(name) for name in (*self._names, LIVE)))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:80]!r}. Expected one of {names}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self._watches >= MAX_WATCHES:
            text = f"{MAX_WATCHES} health watches are open. Expected fewer: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watches += 1
        try:
            said = None
            while True:
                changed, status = self._changed, self.status(request.service)
                if status != said:
                    said = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watches -= 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
