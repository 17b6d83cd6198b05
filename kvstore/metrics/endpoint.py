"""A small HTTP server on the event loop: GET of a few paths, one request a connection, everything bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus

from kvstore.config import ConfigurationError, split_host_port

MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 32
TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_LINGER_S = 0.5
_logger = logging.getLogger(__name__)
Answer = tuple[HTTPStatus, str, bytes]


class MetricsEndpoint:
    """Serves /metrics, /healthz and /readyz.

    Invariants: at most MAX_CONNECTIONS at a time, further ones hear 503; a connection lives for at most two TIMEOUT_S
    and a moment; whatever a peer sends, the server goes on.
    """

    def __init__(self, address: str, render: Callable[[], bytes], why_not_ready: Callable[[], str | None]) -> None:
        self._address = address
        self._render = render
        self._why_not_ready = why_not_ready
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def start(self) -> None:
        """Binds and serves. ConfigurationError when the address can't be bound."""
        host, port = split_host_port(self._address, "--metrics")
        try:
            # One address only: with port 0 a name of several would get as many ports.
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            ip = found[0][4][0]
            self._server = await asyncio.start_server(self._serve, str(ip), port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigurationError(
                f"can't listen on {self._address}: {error.strerror}. Expected a free address of this machine: choose "
                "another one with --metrics (port 0 = any free one)"
            ) from error
        self.url = f"http://{host}:{self._server.sockets[0].getsockname()[1]}/metrics"

    def close(self) -> None:
        """Takes no more connections and ends the open ones."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            # Not a word is read of it, and nothing waits for it.
            writer.write(_response(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"too many connections: try again\n"))
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._exchange(reader, writer)
        except (OSError, TimeoutError):
            _logger.debug("a connection to the metrics broke off")
        except asyncio.CancelledError:
            # Only `close` cancels: the connection ends here.
            _logger.debug("a connection to the metrics was ended")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, kind, body = _refusal(HTTPStatus.BAD_REQUEST, "expected a GET within 5 s")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, kind, body = self._answer(head)
        except asyncio.LimitOverrunError:
            text = f"expected a request line and headers of at most {MAX_HEAD_BYTES} bytes"
            status, kind, body = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return
        except TimeoutError:
            _logger.debug("a request for the metrics was not sent in time")
        writer.write(_response(status, kind, body))
        async with asyncio.timeout(TIMEOUT_S):
            await writer.drain()
            writer.write_eof()
        # What the peer still sends is read for a moment: closing at once would take the answer from it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await reader.read(MAX_HEAD_BYTES):
                    pass

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _refusal(HTTPStatus.BAD_REQUEST, "expected a request line such as GET /metrics HTTP/1.1")
        path = words[1].split(b"?", 1)[0]
        if path not in (b"/metrics", b"/healthz", b"/readyz"):
            return _refusal(HTTPStatus.NOT_FOUND, "expected /metrics, /healthz or /readyz")
        if words[0] != b"GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET: nothing can be changed here")
        if path == b"/metrics":
            try:
                return HTTPStatus.OK, METRICS_TEXT, self._render()
            except Exception:  # the boundary: whatever a metric raises, the scraper hears of it and the service goes on
                _logger.exception("the metrics can't be rendered")
                return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics failed: see the service's log")
        problem = self._why_not_ready() if path == b"/readyz" else None
        if problem is not None:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, problem)
        return HTTPStatus.OK, TEXT, b"ok\n"


def _refusal(status: HTTPStatus, text: str) -> Answer:
    return status, TEXT, f"{text}\n".encode()


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET")
    lines += ["Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body
