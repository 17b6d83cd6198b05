"""The store on the event loop: carries out what it asks for, before the call that caused it is answered."""

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore_proto.v1 import descriptor_pb2

from kvstore.control import EndClient, Grant, SetWriter
from kvstore.device.base import MEMFD, Device, SlabMemory
from kvstore.errors import KvstoreError, NotHeldError, ServiceUnavailableError, UnknownSessionError
from kvstore.log import LimitedLog
from kvstore.server.control_link import ControlLink
from kvstore.server.workers import Workers
from kvstore.service.call_times import CallTimes
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
_PROBE = 3
NONCE_BYTES = 32
# The least that device memory is allocated in.
PROBE_BYTES = 2 << 20
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Allocation:
    """A slab that is being allocated; `hurry` is set once somebody waits for it."""

    task: "asyncio.Task[None]"
    hurry: threading.Event


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
        self.calls = CallTimes()
        self.store = store
        self.sessions = sessions
        self.boot_id = boot_id
        self.link: ControlLink
        self.clients: Clients
        self._allocations: dict[int, _Allocation] = {}
        self._ahead: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: deque[Event] = deque()
        self._settling = asyncio.Lock()
        self._log = LimitedLog(_logger)
        self.device = device
        # What the probe of this boot begins with.
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.probe: SlabMemory | None = None
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
        allocation = self._allocation(request)
        # Somebody waits now, whoever began it.
        allocation.hurry.set()
        # The others who wait for this slab go on when one of them is cancelled.
        await asyncio.shield(allocation.task)

    def provide_ahead(self, session_id: bytes, namespace_id: int) -> None:
        """Lets slabs be allocated for the reservations to come, without haste and one after the other."""
        if namespace_id not in self._ahead and not self.stopping:
            self._ahead.add(namespace_id)
            self.spawn(self._look_ahead(session_id, namespace_id))

    async def offer_probe(self) -> None:
        """Makes the memory that clients try before they trust a transport, where slabs are not host memory.

        Raises OutOfMemoryError, DeviceFailedError, TimeoutError, OSError.
        """
        if self.device.kind == MEMFD:
            return
        memory = await self._workers.run("allocating the probe", self.device.create_slab, PROBE_BYTES)
        self.probe = memory
        await self._workers.run("writing the probe", memory.write, 0, self.nonce)
        await self.link.keep(_PROBE, 0, 0, memory, slot_bytes=PROBE_BYTES, slots=1, nonce=self.nonce)

    async def on_memory(self, name: str, work: Callable[[], T]) -> T:
        """Runs work on payload bytes: here where the CPU addresses them, in a thread where it may wait for a GPU."""
        if self.device.kind == MEMFD:
            return work()
        return await self._workers.run(name, work)

    async def close(self) -> None:
        """Ends the tasks and frees the memory, which lives on where somebody else maps it."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for memory in (*self.store.memories(), *([] if self.probe is None else [self.probe])):
            memory.close()

    async def _look_ahead(self, session_id: bytes, namespace_id: int) -> None:
        try:
            while (request := self.store.slab_ahead(session_id, namespace_id)) is not None:
                await asyncio.shield(self._allocation(request).task)
        except (UnknownSessionError, NotHeldError):
            # The session ended meanwhile.
            return
        finally:
            self._ahead.discard(namespace_id)

    def _allocation(self, request: SlabRequest) -> _Allocation:
        allocation = self._allocations.get(request.request_id)
        if allocation is None:
            hurry = threading.Event()
            allocation = _Allocation(self.spawn(self._allocate(request, hurry)), hurry)
            self._allocations[request.request_id] = allocation
            allocation.task.add_done_callback(lambda _: self._allocations.pop(request.request_id, None))
        return allocation

    async def _allocate(self, request: SlabRequest, hurry: threading.Event) -> None:
        def pace(seconds: float) -> None:
            # A quarter of one core at most, until somebody waits. A thread of idle priority would hold the lock of the
            # interpreter and that of the process's memory map while it waits for a core.
            hurry.wait(3 * seconds)

        try:
            memory = await self._workers.run("allocating a slab", self.device.create_slab, request.nbytes, pace)
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
                await self.link.keep(_LEDGER, event.namespace_id, event.namespace_id, event.memory, slots=event.records)
            case SlabAdded():
                await self.link.keep(
                    _SLAB,
                    event.slab_id,
                    event.namespace_id,
                    event.memory,
                    slot_bytes=event.slot_bytes,
                    slots=event.slots,
                )
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
