"""Keeps a store attached to its service, in the background, for as long as the store lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import grpc
from kvstore_proto.v1 import session_pb2 as pb

from kvstore_client.attaching import Callbacks, Introduction, attach
from kvstore_client.errors import (
    AccessDeniedError,
    BadReplyError,
    ConflictError,
    KVStoreError,
    ServiceUnavailableError,
    TransportUnavailableError,
    UsageError,
    from_rpc,
)
from kvstore_client.link import Link
from kvstore_client.transports.base import TransportSet

log = logging.getLogger("kvstore_client")
# Errors of the first attempt that no waiting mends.
FATAL = (UsageError, AccessDeniedError, ConflictError, TransportUnavailableError, BadReplyError)


class Owner(Protocol):
    """Who is told, in the connection's thread unless said otherwise."""

    def attached(self, link: Link, *, resumed: bool) -> None: ...
    def detached(self, reason: str) -> None: ...
    def not_attached(self, error: KVStoreError) -> None: ...
    def silent(self, reason: str) -> None:
        """From any thread."""

    def unmapped(self, epoch: int, slab_id: int) -> None:
        """From any thread, and from finalizers: takes no lock."""

    def later(self, action: Callable[[], None]) -> None:
        """The same; runs the action in a thread that may wait."""


class Connection:
    """One thread that attaches, serves the session stream, and attaches again when that ends.

    Invariants: `link` is the living attachment or None; a link is lost before the next one is made; the first attempt's
    outcome is known within its deadlines (`first_attempt`), as `error` or a link.
    """

    def __init__(self, who: Introduction, transports: TransportSet, owner: Owner) -> None:
        self._who = who
        self._transports = transports
        self._owner = owner
        self._callbacks = Callbacks(owner.unmapped, owner.silent, owner.later)
        self._link: Link | None = None
        self._previous: Link | None = None
        self._closing = threading.Event()
        self._lingering = threading.Event()
        self.first_attempt = threading.Event()
        self._attached = threading.Event()
        self.error: KVStoreError | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-session", daemon=True)

    @property
    def link(self) -> Link | None:
        """The living attachment."""
        link = self._link
        return None if link is None or link.lost.is_set() else link

    @property
    def epoch(self) -> int:
        """Of the current or last attachment; 0 before the first."""
        previous = self._previous
        return 0 if previous is None else previous.epoch

    def wait_attached(self, timeout_s: float) -> bool:
        """Waits for a living attachment; False when time is up."""
        return self._attached.wait(timeout_s)

    def start(self) -> None:
        """Begins to attach."""
        self._thread.start()

    def linger(self) -> None:
        """Keeps this attachment, but makes no other: whatever is still to be said goes to this session."""
        self._lingering.set()

    def close(self, timeout_s: float, *, goodbye: bool) -> None:
        """Ends the attachment. With `goodbye` in order: the service takes back at once all that the session holds.

        Without, it does so when this process ends: what is still mapped stays as it is.
        """
        self._closing.set()
        link = self._link
        if link is not None:
            if goodbye:
                link.outbox.close()
                self._thread.join(timeout_s)
            link.lose("the store was closed")
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not (self._closing.is_set() or self._lingering.is_set()):
            pause_s = self._who.config.retry_interval_s
            try:
                link = attach(self._who, self._previous, self._transports, self._callbacks)
            except KVStoreError as error:
                self.error = error
                if self.first_attempt.is_set():
                    self._owner.not_attached(error)
                if not isinstance(error, ServiceUnavailableError):
                    pause_s *= 10
            except Exception:
                # A bug here must not leave the worker without a service for good.
                log.exception("attaching to %s failed", self._who.address)
                pause_s *= 10
            else:
                resumed = self._previous is not None and self._previous.epoch == link.epoch
                self._link = self._previous = link
                self.error = None
                self._owner.attached(link, resumed=resumed)
                self.first_attempt.set()
                self._attached.set()
                reason = self._serve(link)
                self._attached.clear()
                self._link = None
                link.lose(reason)
                if not self._closing.is_set():
                    self._owner.detached(reason)
            self.first_attempt.set()
            self._closing.wait(pause_s)

    def _serve(self, link: Link) -> str:
        """Answers the service's requests until the stream ends; why it did."""
        goodbye = ""
        try:
            for message in link.stream:
                kind = message.WhichOneof("message")
                if kind == "unmap":
                    self._unmap(link, list(message.unmap.slab_ids))
                elif kind == "downgrade":
                    self._downgrade(link, list(message.downgrade.slab_ids))
                elif kind == "goodbye":
                    goodbye = f"the service said goodbye: {message.goodbye.reason}"
        except grpc.RpcError as error:
            return goodbye or link.lost_reason or str(from_rpc(error, "the session stream"))
        return goodbye or link.lost_reason or "the service ended the session stream"

    def _unmap(self, link: Link, slab_ids: list[int]) -> None:
        if link.slabs is not None:
            link.slabs.retire(slab_ids)
            gone = set(slab_ids)
            for key in [key for key in list(link.verified) if key[0] in gone]:
                link.verified.pop(key, None)
        else:
            link.outbox.send(pb.SessionRequest(slabs_unmapped=pb.SlabsUnmapped(slab_ids=slab_ids)))

    def _downgrade(self, link: Link, slab_ids: list[int]) -> None:
        done = slab_ids if link.slabs is None else link.slabs.downgrade(slab_ids)
        if done:
            link.outbox.send(pb.SessionRequest(slabs_downgraded=pb.SlabsDowngraded(slab_ids=done)))
