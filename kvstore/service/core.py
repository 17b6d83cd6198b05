"""The store on the event loop: carries out what it asks for, before the call that caused it is answered."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore_proto.v1 import descriptor_pb2

from kvstore.control import EndClient, Grant, SetWriter
from kvstore.device.base import Device, SlabMemory
from kvstore.errors import KvstoreError, ServiceUnavailableError
from kvstore.log import LimitedLog
from kvstore.server.control_link import ControlLink
from kvstore.server.workers import Workers
from kvstore.service.clients import Clients
from kvstore.service.sessions import SessionTable
from kvstore.store.events import (
    DowngradeRequested,
    Event,
    Granted,
    LedgerCreated,
    LedgerGone,
    SessionEnded,
    SlabAdded,
    SlabGone,
    UnmapRequested,
    WriterChanged,
)
from kvstore.store.store import Store
from kvstore.store.types import SlabRequest

_SLAB = descriptor_pb2.SEGMENT_KIND_SLAB
_LEDGER = descriptor_pb2.SEGMENT_KIND_LEDGER
_logger = logging.getLogger(__name__)


class Core:
    """What the services share.

    Invariants: when `settled` returns, everything that the store asked for before is done: the supervisor holds each
    segment, knows each grant and each writer. Events are carried out in the store's order, by one task at a time.
    """

    def __init__(
        self,
        *,
        store: Store,
        device: Device,
        workers: Workers,
        sessions: SessionTable,
        boot_id: bytes,
        on_fatal: Callable[[str], None],
    ) -> None:
        self.stopping = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.store = store
        self.sessions = sessions
        self.boot_id = boot_id
        self.link: ControlLink
        self.clients: Clients
        self._allocations: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[Event] = deque()
        self._settling = asyncio.Lock()
        self._log = LimitedLog(_logger)
        self._device = device
        self._workers = workers
        self._on_fatal = on_fatal

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs `work` on its own and logs its failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def settled(self) -> None:
        """Carries out all events of the store. ServiceUnavailableError when the supervisor does not answer."""
        self._events.extend(self.store.take_events())
        if self._events or self._settling.locked():
            # What the store asked for is done even when this call is cancelled.
            await asyncio.shield(self.spawn(self._settle()))

    def settle_soon(self) -> None:
        """`settled`, from a callback that can't wait."""
        self.spawn(self.settled())

    def log_damage(self, blocks: int, source: str) -> None:
        """Says that blocks were condemned because their bytes, or those before them, did not match their checksum."""
        self._log.log(logging.WARNING, "damage", f"{blocks} damaged blocks were taken out of the index, {source}")

    async def provide(self, request: SlabRequest) -> None:
        """Allocates the slab of a request, or waits for the task that does already. Never raises for want of memory."""
        task = self._allocations.get(request.request_id)
        if task is None:
            task = self.spawn(self._allocate(request))
            self._allocations[request.request_id] = task
            task.add_done_callback(lambda _: self._allocations.pop(request.request_id, None))
        # The others who wait for this slab go on when one of them is cancelled.
        await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _allocate(self, request: SlabRequest) -> None:
        try:
            memory = await self._workers.run("allocating a slab", self._device.create_slab, request.nbytes)
        except (KvstoreError, OSError) as error:
            _logger.warning("no slab of %d bytes for namespace %d: %s", request.nbytes, request.namespace_id, error)
            self.store.slab_failed(request, str(error))
            return
        try:
            slab_id = self.store.add_slab(request, memory)
        except KvstoreError as error:
            _logger.warning("no slab for namespace %d: %s", request.namespace_id, error)
            await self._dispose(memory)
            return
        _logger.info("slab %d of %d bytes for namespace %d", slab_id, request.nbytes, request.namespace_id)
        await self.settled()

    async def _settle(self) -> None:
        try:
            async with self._settling:
                while self._events:
                    await self._carry_out(self._events.popleft())
                await self.link.flushed()
        except (TimeoutError, BufferError, OSError) as error:
            # A segment or a grant may be lost: going on would hand out what nobody can open.
            text = f"the supervisor does not answer ({type(error).__name__})"
            self._on_fatal(text)
            raise ServiceUnavailableError(f"{text}. Expected it to; the service stops: start it again") from error

    async def _carry_out(self, event: Event) -> None:
        match event:
            case LedgerCreated():
                dims = (event.memory.nbytes, 0, event.records)
                await self.link.keep(_LEDGER, event.namespace_id, event.namespace_id, dims, event.memory.fd)
            case SlabAdded():
                dims = (event.memory.nbytes, event.slot_bytes, event.slots)
                await self.link.keep(_SLAB, event.slab_id, event.namespace_id, dims, event.memory.fd)
            case LedgerGone():
                self.link.drop(_LEDGER, event.namespace_id)
                await self._dispose(event.memory)
            case SlabGone():
                self.link.drop(_SLAB, event.slab_id)
                await self._dispose(event.memory)
            case WriterChanged():
                session = self.sessions.get(event.session_id) if event.session_id is not None else None
                self.link.send(SetWriter(event.slab_id, "" if session is None else session.token))
            case Granted():
                session = self.sessions.get(event.session_id)
                if session is not None and session.token:
                    self.link.send(Grant(session.token, event.namespace_id))
            case UnmapRequested():
                session = self.sessions.get(event.session_id)
                if session is not None:
                    session.outbox.unmap(event.slab_ids)
            case DowngradeRequested():
                session = self.sessions.get(event.session_id)
                if session is not None:
                    session.outbox.downgrade(event.slab_ids)
            case SessionEnded():
                self._end_session(event)

    def _end_session(self, event: SessionEnded) -> None:
        session = self.sessions.remove(event.session_id)
        if session is None:
            return
        _logger.info("session %s of %s ended: %s", event.session_id.hex()[:8], session.name, event.reason)
        session.outbox.goodbye(event.reason)
        if session.client is not None:
            self.clients.forget(session.client)
            self.link.send(EndClient(session.token))

    async def _dispose(self, memory: SlabMemory) -> None:
        # Unmapping gibibytes takes a while.
        await self._workers.run("freeing a slab", memory.close)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("background work failed: %s", error, exc_info=error)
