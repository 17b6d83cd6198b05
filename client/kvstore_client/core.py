"""The parts of a store and what happens between them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvstore_proto.v1 import blocks_pb2 as pb
from kvstore_proto.v1 import session_pb2

from kvstore_client.attaching import Introduction
from kvstore_client.blocks import DIGEST_BYTES
from kvstore_client.connection import Connection
from kvstore_client.device_work import Done, default_stream_done
from kvstore_client.errors import (
    ClosedError,
    ForkedProcessError,
    KVStoreError,
    LimitReachedError,
    ServiceUnavailableError,
)
from kvstore_client.holdings import Debt, Holdings
from kvstore_client.local import LocalSlabs
from kvstore_client.notices import Notices, log
from kvstore_client.plans import PlanFolder
from kvstore_client.registry import Registry
from kvstore_client.transports.base import SlotRef, TransportSet, check_reservation
from kvstore_client.transports.bytes import BytesTransport
from kvstore_client.transports.in_place import DescriptorTransport, HandleTransport
from kvstore_client.worker import Returns, Worker

if TYPE_CHECKING:
    from kvstore_client.link import Link
    from kvstore_client.namespace import Namespace, Registration

_RETURNS_A_CALL = 4096
_GOODBYE_S = 1.0


class Core:
    """Shared by a Store and its requests; told by the connection when services come and go.

    Invariants: `_debts` is touched by the worker's thread only; what is owed to an epoch is forgotten only when a later
    epoch begins, for then that service process, and all it knew, is gone.
    """

    def __init__(self, who: Introduction, *, required: bool, plans: PlanFolder | None = None) -> None:
        self.who = who
        self.config = who.config
        self.required = required
        self.notices = Notices(who.config.notice_interval_s)
        self.local = LocalSlabs(who.config.local_budget, who.config.local_slab_bytes)
        transports = TransportSet(
            fd=DescriptorTransport(who.config.verify),
            cuda_ipc=HandleTransport(who.config.verify),
            bytes=BytesTransport(self.local, who.config.control_timeout_s, who.config.payload_bytes_per_s),
        )
        folder = PlanFolder.of_user(self.notices) if plans is None else plans
        self.registry = Registry(who.config, self.notices, folder, required=required)
        self.connection = Connection(who, transports, self)
        self.worker = Worker("kvstore-background", who.config.queue_limit, self._idle)
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._lingering = threading.Event()
        self._debts: dict[int, Debt] = {}
        # Only the worker's thread adds to it.
        self.blocks_not_shared_error = 0
        # Said, and maybe lost with a stream: said again when the session goes on over another one.
        self._unmapped: dict[int, deque[int]] = {}
        self._open: weakref.WeakSet[Holdings] = weakref.WeakSet()

    # ---- used by store and requests

    def check_usable(self) -> None:
        """Raises ForkedProcessError in a forked child and ClosedError after close()."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this store was made by process {self._pid} and can't be used in its forked child {os.getpid()}: "
                "connect again in the child, or start it with the spawn method"
            )
        if self._closed.is_set():
            raise ClosedError("the store is closed; connect() again")

    def in_own_process(self) -> bool:
        """Whether this is the process that made the store."""
        return os.getpid() == self._pid

    def route(self, namespace: Namespace) -> tuple[Link, Registration] | str:
        """The link and registration to use for a namespace now, or the reason why there are none."""
        link = self.connection.link
        if link is None:
            return "service-away"
        registration = namespace.registration
        if registration is None or registration.epoch != link.epoch:
            return namespace.reason or "service-away"
        return link, registration

    def open_holdings(self) -> Holdings:
        """Holdings for a new request."""
        holdings = Holdings(self.local, time.monotonic())
        self._open.add(holdings)
        return holdings

    def open_requests(self) -> list[float]:
        """Ages in seconds of the requests that hold something."""
        now = time.monotonic()
        return sorted(now - h.opened_at for h in list(self._open) if not h.closed)

    def reserve(
        self, link: Link, registration: Registration, digests: Sequence[bytes], anonymous: int, *, probe: bool = False
    ) -> tuple[list[SlotRef], pb.ReserveResponse]:
        """One Reserve call. Raises a KVStoreError."""
        request = pb.ReserveRequest(
            namespace_id=registration.namespace_id, digests=b"".join(digests), anonymous=anonymous
        )
        timeout_s = self.config.control_timeout_s if probe else self.config.reserve_timeout_s
        reply: pb.ReserveResponse = link.call("Reserve", link.blocks.Reserve, request, timeout_s, probe=probe)
        return check_reservation(reply, len(digests), anonymous), reply

    def give_back(self, debts: dict[int, Debt], after: Done | None = None) -> None:
        """Gives leases and slots back, in the background, after the jobs queued before and the device work `after`.

        Never waits. What a device may still be using when it is given up on stays ours until this process ends.
        """
        owed = {epoch: debt for epoch, debt in debts.items() if debt and epoch >= self.connection.epoch}
        if owed:
            self.worker.give_back(Returns(owed, self.owe, after))

    def forget(self, holdings: Holdings, compute_device: str) -> None:
        """A request was dropped without close(). From a finalizer: only queues."""

        def give_up() -> None:
            after = default_stream_done(compute_device)
            self.give_back(holdings.close(after), after)

        self.worker.poke(give_up)

    def fell_back(self, cause: str, detail: str = "") -> None:
        """A worker-local slot or a miss instead of the service. Says it once; raises if the store is `required`."""
        text = {
            "service-away": f"no service at {self.who.address}: blocks stay in this process until it appears",
            "service-silent": f"the service at {self.who.address} does not answer: blocks stay in this process",
            "service-full": f"the service at {self.who.address} has no room: blocks stay in this process. {detail}",
        }.get(cause)
        if text is None:
            return
        if self.required:
            raise LimitReachedError(text) if cause == "service-full" else ServiceUnavailableError(text)
        self.notices.warn_condition(cause, text)

    # ---- told by the connection

    def attached(self, link: Link, *, resumed: bool) -> None:
        """The session is open."""
        if resumed:
            unmapped = self._unmapped.get(link.epoch)
            if unmapped:
                self._say_unmapped(link, list(unmapped))
        log.info(
            "attached to %s: transport %s%s",
            self.who.address,
            link.transport.name,
            f" ({link.transport_reason})" if link.transport_reason else "",
        )
        self.registry.register_missing(link)
        for condition in ("service-away", "service-silent", "service-full"):
            self.notices.over(condition)
        self.worker.poke(lambda: None)

    def detached(self, reason: str) -> None:
        """The session is lost."""
        if self._closed.is_set():
            self.worker.poke(lambda: None)
            return
        self.registry.lost()
        self.notices.warn_condition(
            "service-away",
            f"lost the service at {self.who.address} ({reason}): generation goes on with blocks of this process; "
            "attaching again in the background",
        )

    def not_attached(self, error: KVStoreError) -> None:
        """Another attempt failed."""
        if isinstance(error, ServiceUnavailableError):
            self.notices.warn_condition("service-away", f"{error}")
        else:
            self.notices.warn_condition("service-refuses", f"attaching again failed: {error}")

    def silent(self, reason: str) -> None:
        """The breaker opened."""
        self.notices.warn_condition(
            "service-silent",
            f"the service at {self.who.address} does not answer ({reason}): it is left alone until it does",
        )
        self.worker.poke(lambda: None)

    def unmapped(self, epoch: int, slab_id: int) -> None:
        """A mapping is gone."""
        self.worker.poke(partial(self._on_unmapped, epoch, slab_id))

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action in the worker's thread."""
        self.worker.poke(action)

    # ---- in the worker's thread

    def _on_unmapped(self, epoch: int, slab_id: int) -> None:
        if epoch not in self._unmapped:
            self._unmapped.clear()
        self._unmapped.setdefault(epoch, deque(maxlen=_RETURNS_A_CALL)).append(slab_id)
        link = self.connection.link
        if link is not None and link.epoch == epoch:
            self._say_unmapped(link, [slab_id])

    @staticmethod
    def _say_unmapped(link: Link, slab_ids: list[int]) -> None:
        link.outbox.send(session_pb2.SessionRequest(slabs_unmapped=session_pb2.SlabsUnmapped(slab_ids=slab_ids)))

    def owe(self, debts: dict[int, Debt]) -> None:
        """Like give_back(), at once: only in the worker's thread."""
        for epoch, debt in debts.items():
            self._debts.setdefault(epoch, Debt()).add(debt)

    def _idle(self) -> bool:
        """Deferred work. Whether there is more that the service may take soon."""
        more = self._catch_up()
        if self._lingering.is_set() and (self.connection.link is None or not (more or self._in_use())):
            self._end_lingering()
            return False
        return more

    def _catch_up(self) -> bool:
        link = self.connection.link
        if link is None:
            return bool(self._debts) and self._forget_past()
        self._forget_past()
        debt = self._debts.get(link.epoch)
        silent = link.breaker.open
        try:
            if debt:
                self._settle(link, debt)
            elif silent:
                release = pb.ReleaseRequest()
                link.call("Release", link.blocks.Release, release, self.config.control_timeout_s, probe=True)
            if silent:
                self.notices.over("service-silent")
        except ServiceUnavailableError:
            return True
        except KVStoreError as error:
            self._debts.pop(link.epoch, None)
            self.notices.warn("return-refused", f"the service did not take blocks back: {error}")
        if not self._debts.get(link.epoch):
            self._debts.pop(link.epoch, None)
        if self._lingering.is_set():
            return bool(self._debts)
        return self.registry.register_missing(link) or bool(self._debts)

    def _forget_past(self) -> bool:
        for epoch in [e for e in self._debts if e < self.connection.epoch]:
            del self._debts[epoch]
        return bool(self._debts)

    def _settle(self, link: Link, debt: Debt) -> None:
        timeout_s = self.config.control_timeout_s
        while debt.leases:
            leases = sorted(debt.leases)[:_RETURNS_A_CALL]
            request = pb.ReleaseRequest(lease_ids=leases)
            link.call("Release", link.blocks.Release, request, timeout_s, probe=True)
            debt.leases.difference_update(leases)
        while debt.slots:
            slots = sorted(debt.slots, key=lambda s: (s.slab_id, s.slot, s.generation))[:_RETURNS_A_CALL]
            abort = pb.AbortRequest(
                slab_ids=[s.slab_id for s in slots],
                slots=[s.slot for s in slots],
                generations=[s.generation for s in slots],
            )
            link.call("Abort", link.blocks.Abort, abort, timeout_s, probe=True)
            debt.slots.difference_update(slots)

    def close(self, timeout_s: float, *, linger: bool = True) -> None:
        """Flushes, says goodbye and ends the threads within about `timeout_s`. Idempotent.

        What somebody still reads can't be unmapped: with `linger` the session then goes on in the background until
        nothing is in use, and ends in order. Without, it ends with this process.
        """
        if not self.in_own_process() or self._closed.is_set():
            return
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        left = self.open_requests()
        if left:
            self.notices.warn(
                "still-open",
                f"requests still open: {len(left)}, the oldest for {left[-1]:.0f} s. What they hold is given back when "
                "their caches go, or this process ends; close caches before the store",
            )
        settled = self.worker.flush(timeout_s)
        link = self.connection.link
        if link is not None and link.slabs is not None:
            link.slabs.close()
            settled = self.worker.flush(max(0.0, deadline - time.monotonic()))
        in_use = self._in_use()
        if in_use and linger and self.connection.link is not None:
            # An exit waits for nobody: then the session ends with the process.
            atexit.register(self._stop_lingering)
            self.connection.linger()
            self._lingering.set()
            # What was in use may have gone since it was asked.
            self.worker.poke(lambda: None)
            return
        goodbye = settled and not in_use
        self.connection.close(min(1.0, max(0.1, deadline - time.monotonic())), goodbye=goodbye)
        self.worker.stop(max(0.1, deadline - time.monotonic()))

    def _in_use(self) -> bool:
        """Whether requests hold something, or something of the service's is mapped."""
        link = self.connection.link
        return bool(self.open_requests()) or (link is not None and link.slabs is not None and link.slabs.alive > 0)

    def _end_lingering(self) -> None:
        """In the worker's thread: nothing is in use any more, or nobody is left to tell."""
        self._lingering.clear()
        atexit.unregister(self._stop_lingering)
        self.connection.close(_GOODBYE_S, goodbye=True)
        self.worker.stop(0)

    def _stop_lingering(self) -> None:
        self._lingering.clear()
        self.connection.close(0.1, goodbye=False)
        self.worker.stop(0.1)


def split_digests(chain: bytes) -> list[bytes]:
    """The digests of a chain."""
    return [chain[i : i + DIGEST_BYTES] for i in range(0, len(chain), DIGEST_BYTES)]
