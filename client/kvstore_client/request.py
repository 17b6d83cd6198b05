"""Everything one generate() holds."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore_client.blocks import DIGEST_BYTES, Block, CommitEntry, Match, Origin, RequestTraffic
from kvstore_client.committing import CommitJob
from kvstore_client.core import Core, split_digests
from kvstore_client.device_work import Done, default_stream_done
from kvstore_client.errors import ClosedError, KVStoreError, ServiceUnavailableError, UsageError
from kvstore_client.holdings import Debt
from kvstore_client.looking_up import look_up
from kvstore_client.meter import Meter
from kvstore_client.namespace import Namespace
from kvstore_client.reserving import Granted, TopUpJob, reserve_slots
from kvstore_client.transports.base import SlotRef

if TYPE_CHECKING:
    from kvstore_client.link import Link


class Request:
    """Everything one generate() holds: leases, private slots, worker-local slots.

    Use it from one thread (another thread may close it). Made by `Store.open_request(namespace)`; a context manager.
    A dead, stopped or full service never raises here and never makes take(), commit(), give_back() or close() wait,
    unless the store is `required`.

    Invariants: `_ready` and `_reserved` hold private slots that nobody has taken; every slot in them, every one taken
    and every lease is in `_holdings` until it is given back; no lock is held during a call of the service.
    """

    def __init__(self, core: Core, namespace: Namespace, max_block_error: float | None = None) -> None:
        """`max_block_error`: held blocks with a larger error count as not found."""
        self.namespace = namespace
        self.max_block_error = max_block_error
        self._core = core
        self._holdings = core.open_holdings()
        self._meter = Meter()
        self._lock = threading.Lock()
        self._ready: deque[Block] = deque()
        self._reserved: dict[bytes, Block] = {}
        self._targets: dict[bytes, tuple[int, SlotRef]] = {}
        self._committing: set[Block] = set()
        self._anonymous: set[Block] = set()
        self._unshared: set[bytes] = set()
        self._short = Granted({})
        # Came with a look-up; the next reserve() takes it into account.
        self._early: Granted | None = None
        self._topping_up = False
        self._wants_ahead = False
        # Nothing is sent from a finalizer: it queues what is to be given back.
        weakref.finalize(self, core.forget, self._holdings, namespace.compute_device).atexit = False

    def match(self, chains: Sequence[bytes], wait_ms: int = 0, *, anonymous: int | None = None) -> list[Match]:
        """Leases the longest held prefix of every chain; one call of the service for all rows.

        `chains`: one a row, whole 32-byte digests one after the other, first block first. One Match a row. `wait_ms`:
        wait at most this long for the commit of the next block if somebody is writing it right now. Leased blocks stay
        readable until close(). `anonymous`: what reserve() will be asked for on top of what isn't found; given, the
        slots come with the same call if they are there, and reserve() asks only for what is missing.
        """
        self._check_open()
        _check_chains(chains)
        if not any(chains):
            return [Match() for _ in chains]
        routed = self._core.route(self.namespace)
        if isinstance(routed, str):
            self._core.fell_back(routed)
            self._meter.note(routed)
            return [Match(reason=routed) for _ in chains]
        try:
            found = look_up(
                self._core,
                *routed,
                self.namespace,
                self._holdings,
                self._meter,
                chains,
                wait_ms,
                max_block_error=self.max_block_error,
                anonymous=anonymous if self._writes_in_place(routed[0]) else None,
            )
            if found.reserved is not None:
                self._accept(found.reserved)
        except ServiceUnavailableError as error:
            if self._core.required:
                raise
            reason = "service-away" if routed[0].lost.is_set() else "service-silent"
            self._core.notices.warn_condition(reason, f"a look-up got no answer: {error}")
        except KVStoreError as error:
            if self._core.required:
                raise
            reason = "error"
            self._core.notices.warn("look-up", f"a look-up failed: {error}")
        else:
            self._early = found.reserved
            return found.matches
        self._meter.note(reason)
        return [Match(reason=reason) for _ in chains]

    def reserve(self, chains: Sequence[bytes], anonymous: int = 0) -> list[str]:
        """Gets private slots before prefill: one per *distinct* digest of `chains`, plus `anonymous` and one for each
        repetition.

        One blocking call with a deadline. Returns one status per digest, over all chains in order: "write" (this
        request writes it), "committed" (somebody has), "in_flight" (somebody else, or an earlier row of this request,
        is writing it). Whatever the status, take(digest) gives a slot to compute in.
        """
        self._check_open()
        _check_chains(chains)
        digests = [d for chain in chains for d in split_digests(chain)]
        distinct = list(dict.fromkeys(digests))
        anonymous += len(digests) - len(distinct)
        known: dict[bytes, str] = {}
        early, self._early = self._early, None
        if early is not None:
            known |= early.statuses
            # A service that had no room then has none now.
            anonymous = 0 if early.short else max(0, anonymous - len(early.anonymous))
        missing = [digest for digest in distinct if digest not in known]
        if early is None or missing or anonymous:
            granted = reserve_slots(self._core, self.namespace, self._holdings, self._meter, missing, anonymous)
            self._accept(granted)
            known |= granted.statuses
        seen: set[bytes] = set()
        statuses: list[str] = []
        for digest in digests:
            status = known[digest]
            statuses.append("in_flight" if digest in seen and status == "write" else status)
            seen.add(digest)
        return statuses

    def take(self, digest: bytes | None = None) -> Block:
        """A writable block, at once: the slot reserved for `digest`, else an anonymous one, else a worker-local one.

        Its content is undefined. Raises LocalBudgetExceeded when nothing is left; ServiceUnavailableError or
        LimitReachedError instead of a worker-local slot when the store is `required`.
        """
        return self.take_all([digest])[0]

    def take_all(self, digests: Sequence[bytes | None]) -> list[Block]:
        """What take() gives for each of these, in one go; if it raises, nothing is taken."""
        self._check_open()
        with self._lock:
            taken = [self._take_service(digest) for digest in digests]
        blocks: list[Block] = []
        try:
            blocks.extend(self._take_local() if block is None else block for block in taken)
        except BaseException:
            for block in [*blocks, *(rest for rest in taken[len(blocks) :] if rest is not None)]:
                self.give_back(block)
            raise
        return blocks

    def _take_service(self, digest: bytes | None) -> Block | None:
        block = self._reserved.pop(digest, None) if digest is not None else None
        if block is None and self._ready:
            block = self._ready.popleft()
            self._anonymous.add(block)
        return block

    def ensure_ahead(self, count: int) -> None:
        """Asks in the background for anonymous slots, so that at least `count` lie ready."""
        self._check_open()
        with self._lock:
            self._wants_ahead = True
            if self._topping_up or len(self._ready) >= count:
                return
            routed = self._core.route(self.namespace)
            if isinstance(routed, str) or not self._writes_in_place(routed[0]) or routed[0].breaker.open:
                return
            self._topping_up = True
            missing = count - len(self._ready)
        self._core.worker.put(TopUpJob(self, missing), urgent=True)

    def release_ahead(self, after: Done | None = None) -> None:
        """Gives the slots back that lie ready, and those of a top-up that is under way. Never waits.

        `after`: the device work that may still use them; default as in close().
        """
        self._check_open()
        with self._lock:
            self._wants_ahead = False
        self._let_go(after)

    def _let_go(self, after: Done | None) -> None:
        with self._lock:
            ready = list(self._ready)
            self._ready.clear()
        debts: dict[int, Debt] = {}
        for block in ready:
            ref = SlotRef(block.slab_id, block.slot, block.generation)
            if self._holdings.remove(block.epoch, ref):
                debts.setdefault(block.epoch, Debt()).slots.add(ref)
        if debts:
            self._core.give_back(debts, default_stream_done(self.namespace.compute_device) if after is None else after)

    def commit(self, entries: Sequence[CommitEntry | tuple[Block, bytes, bytes]], after: Done | None = None) -> None:
        """Makes full blocks visible, in the background: (block, digest, parent digest), parents first.

        The caller never writes them again. `after`: the device work that writes them (a torch.cuda.Event, recorded
        behind it; default as in close()); nobody sees a block before that has ended, and a commit whose device is not
        done within 60 s is dropped ("device-late"). Worker-local blocks are copied to the service. Blocks whose digest
        somebody else committed first stay this request's private ones, and so do those whose error misses the bound of
        the codec plan, with all that follow them.
        """
        self._check_open()
        checked = [e if isinstance(e, CommitEntry) else CommitEntry(*e) for e in entries]
        if any(len(e.digest) != DIGEST_BYTES or len(e.parent) != DIGEST_BYTES for e in checked):
            raise UsageError(f"a digest or parent to commit doesn't have {DIGEST_BYTES} bytes")
        if not checked:
            return
        if after is None:
            after = default_stream_done(self.namespace.compute_device)
        with self._lock:
            self._committing.update(e.block for e in checked)
        job = CommitJob(
            self._core, self.namespace, self._holdings, self._meter, self._targets, checked, after, self._unshared
        )
        self._core.worker.put(job)

    def give_back(self, block: Block, after: Done | None = None) -> None:
        """Frees one block before close(). Leased blocks stay leased until close(). Idempotent, never waits.

        `after`: the device work that still uses it; the service gets it back behind that.
        """
        self._check_open()
        if block.origin is Origin.LOCAL:
            self._holdings.free_local(block, after)
        if block.origin is not Origin.PRIVATE:
            return
        with self._lock:
            if block in self._anonymous and block not in self._committing:
                # Nobody else knows it: ready for the next take().
                self._anonymous.remove(block)
                self._ready.append(block)
                return
        ref = SlotRef(block.slab_id, block.slot, block.generation)
        if self._holdings.remove(block.epoch, ref):
            self._core.give_back({block.epoch: Debt(slots={ref})}, after)

    def close(self, after: Done | None = None) -> None:
        """Frees everything, in the background, after pending commits. Idempotent, never waits.

        `after`: the device work that still uses its blocks; the service gets them back behind that. Default, on a CUDA
        device: everything sent so far to its default stream.
        """
        if not self._core.in_own_process():
            return
        with self._lock:
            for blocks in (self._ready, self._reserved, self._committing, self._anonymous):
                blocks.clear()
        if self._holdings.closed:
            return
        if after is None:
            after = default_stream_done(self.namespace.compute_device)
        self._core.give_back(self._holdings.close(after), after)

    def report(self) -> RequestTraffic:
        """A copy of the counters so far."""
        return self._meter.copy()

    def top_up(self, count: int) -> None:
        """In the worker's thread: `count` more anonymous slots, if there are any."""
        try:
            self._accept(
                reserve_slots(self._core, self.namespace, self._holdings, self._meter, [], count, background=True)
            )
        finally:
            self.topped_up()
        if not self._wants_ahead:
            self._let_go(None)

    def topped_up(self) -> None:
        """The top-up that was asked for is over."""
        with self._lock:
            self._topping_up = False

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self, granted: Granted) -> None:
        with self._lock:
            self._short = granted
            if not self._holdings.closed:
                self._reserved.update(granted.blocks)
                self._ready.extend(granted.anonymous)
                self._targets.update(granted.targets)

    def _take_local(self) -> Block:
        routed = self._core.route(self.namespace)
        if isinstance(routed, str):
            cause = routed
        elif routed[0].breaker.open:
            cause = "service-silent"
        elif not self._writes_in_place(routed[0]):
            cause = ""
        else:
            cause = self._short.cause or "late"
        self._core.fell_back(cause, self._short.short)
        block = self._core.local.take(self.namespace.layout, self.namespace.compute_device)
        if not self._holdings.add_local([block]):
            raise ClosedError("the request was closed while it took a block")
        if cause:
            self._meter.add(local_blocks=1)
            self._meter.note(cause)
        return block

    def _writes_in_place(self, link: Link) -> bool:
        return link.writes_in_place(self.namespace)

    def _check_open(self) -> None:
        self._core.check_usable()
        if self._holdings.closed:
            raise ClosedError("the request is closed; open another one")


def _check_chains(chains: Sequence[bytes]) -> None:
    for chain in chains:
        if len(chain) % DIGEST_BYTES:
            raise UsageError(f"a chain of {len(chain)} bytes; expected a multiple of {DIGEST_BYTES}")
