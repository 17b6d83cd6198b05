"""The server's end of the control channel on its event loop."""

import asyncio
import logging
from collections.abc import Callable

from kvstore.control import (
    ClientHello,
    ClientLeft,
    ControlChannel,
    DropSegment,
    KeepSegment,
    Kept,
    Message,
    close_all,
)
from kvstore.device.base import SlabMemory

KEEP_DEADLINE_S = 10.0
_logger = logging.getLogger(__name__)


class ControlLink:
    """Talks with the supervisor.

    Invariants: messages are sent in the order of the calls; `keep` returns only when the supervisor holds the segment;
    `hear` handles all that has arrived, so a token that a client shows is known if the supervisor issued it.
    """

    def __init__(
        self,
        channel: ControlChannel,
        *,
        on_hello: Callable[[ClientHello, int | None], None],
        on_left: Callable[[ClientLeft], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._next_ticket = 1
        self._drained = asyncio.Event()
        self._drained.set()
        self._channel = channel
        self._on_hello = on_hello
        self._on_left = on_left
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno(), self.hear)

    def hear(self) -> None:
        """Handles all messages that have arrived."""
        try:
            while (received := self._channel.receive()) is not None:
                self._handle(*received)
        except EOFError:
            self._loop.remove_reader(self._channel.fileno())
            self._on_closed()

    def send(self, message: Message) -> None:
        """Sends without waiting. What the socket does not take now goes out in order later."""
        try:
            self._channel.send(message)
        except OSError:
            # The supervisor is gone, and with it this process at once.
            _logger.warning("the supervisor is gone; not sent: %s", type(message).__name__)
            return
        self._flush_later()

    async def flushed(self) -> None:
        """Returns when everything sent has left this process. TimeoutError after KEEP_DEADLINE_S."""
        if self._channel.backlog:
            async with asyncio.timeout(KEEP_DEADLINE_S):
                await self._drained.wait()

    async def keep(
        self,
        kind: int,
        segment_id: int,
        namespace_id: int,
        memory: SlabMemory,
        *,
        slot_bytes: int = 0,
        slots: int = 0,
        nonce: bytes = b"",
    ) -> None:
        """Hands a segment to the supervisor, if it has a descriptor. TimeoutError, OSError."""
        if memory.fd is None:
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        kept = self._tickets[ticket] = self._loop.create_future()
        try:
            message = KeepSegment(
                ticket, kind, segment_id, namespace_id, memory.nbytes, slot_bytes, slots,
                memory.kind, memory.device_uuid.hex(), memory.allocation_id.hex(), nonce.hex(),
            )  # fmt: skip
            self._channel.send(message, [memory.fd])
            self._flush_later()
            async with asyncio.timeout(KEEP_DEADLINE_S):
                await kept
        finally:
            del self._tickets[ticket]

    def drop(self, kind: int, segment_id: int) -> None:
        self.send(DropSegment(kind, segment_id))

    def close(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _flush_later(self) -> None:
        if self._channel.backlog and self._drained.is_set():
            self._drained.clear()
            self._loop.add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        if self._channel.flush():
            self._drained.set()
            self._loop.remove_writer(self._channel.fileno())

    def _handle(self, message: Message, fds: list[int]) -> None:
        match message:
            case Kept():
                waiting = self._tickets.get(message.ticket)
                if waiting is not None and not waiting.done():
                    if message.error:
                        waiting.set_exception(OSError(message.error))
                    else:
                        waiting.set_result(None)
            case ClientHello():
                self._on_hello(message, fds.pop() if fds else None)
            case ClientLeft():
                self._on_left(message)
            case _:
                _logger.error("unexpected message of the supervisor: %s", type(message).__name__)
        close_all(fds)
