"""Makes blocks visible, in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore_proto.v1 import blocks_pb2 as pb

from kvstore_client.block_bytes import checksums_of, noise_of
from kvstore_client.blocks import Block, CommitEntry, Origin
from kvstore_client.core import Core
from kvstore_client.device_work import DEADLINE_S, Done, Pending
from kvstore_client.errors import BadReplyError, KVStoreError, ServiceUnavailableError
from kvstore_client.holdings import Debt, Holdings
from kvstore_client.meter import Meter
from kvstore_client.namespace import Namespace
from kvstore_client.plans import NOISE_LIMIT
from kvstore_client.transports.base import SlotRef

if TYPE_CHECKING:
    from kvstore_client.link import Link
    from kvstore_client.namespace import Registration

_BLOCKS_A_CALL = 1024
_PROBLEMS = {
    "device-late": f"the device work that writes them did not end within {DEADLINE_S:.0f} s",
    "device-failed": "the device that writes them has failed",
}


class CommitJob:
    """Waits for the device work that writes the blocks; errors and checksums, then (for blocks that don't lie in the
    service's memory) a copy into reserved slots, then Commit.

    Invariants: a block's bytes are complete, and summed, before the service hears of it; slots for copies belong to the
    job from its construction on and are given back whatever happens; the request's local blocks are held until the job
    ends or is dropped; of a request, no block is committed behind one whose error misses the bound.
    """

    def __init__(
        self,
        core: Core,
        namespace: Namespace,
        holdings: Holdings,
        meter: Meter,
        targets: dict[bytes, tuple[int, SlotRef]],
        entries: Sequence[CommitEntry],
        after: Done | None = None,
        unshared: set[bytes] | None = None,
    ) -> None:
        """`targets`: slots reserved for digests whose blocks lie elsewhere, by (epoch, slot). `after`: the device work
        that writes the blocks; its deadline begins now. `unshared`: digests that the request's jobs keep to themselves
        for their error; only they touch it, in the worker's thread.
        """
        self._core = core
        self._namespace = namespace
        self._holdings = holdings
        self._meter = meter
        self._writing = Pending(after)
        self._unshared = set() if unshared is None else unshared
        distinct: dict[bytes, CommitEntry] = {}
        for entry in entries:
            if entry.block.origin is not Origin.LEASED:
                distinct.setdefault(entry.digest, entry)
        self._entries = list(distinct.values())
        self._reading: list[Block] = [e.block for e in self._entries]
        holdings.begin_reading(self._reading)
        # Now, not when the job runs: by then the request may be closed and its slots on their way back.
        self._claimed: dict[bytes, tuple[int, SlotRef]] = {}
        for entry in self._entries:
            epoch, ref = targets.pop(entry.digest, (0, SlotRef(0, 0, 0)))
            if epoch and holdings.remove(epoch, ref):
                self._claimed[entry.digest] = (epoch, ref)

    def ready(self) -> bool:
        """Whether the blocks are complete, or will not be."""
        return self._writing.settled()

    def run(self) -> None:
        """Commits. What the service does not take stays private to the request."""
        try:
            if self._writing.problem:
                self._drop_all(self._writing.problem)
                self._core.notices.warn("device-late", f"blocks were not committed: {_PROBLEMS[self._writing.problem]}")
                return
            routed = self._core.route(self._namespace)
            if isinstance(routed, str):
                self._drop_all(routed)
            else:
                self._commit(*routed)
        except ServiceUnavailableError:
            self._drop_all("service-silent")
        except KVStoreError as error:
            self._drop_all("refused")
            self._core.notices.warn("commit-refused", f"blocks were not committed: {error}")
        finally:
            self._end(self._core.owe)

    def drop(self) -> None:
        """The queue was full."""
        self._drop_all("queue-full")
        self._end(self._core.give_back)

    def _drop_all(self, reason: str) -> None:
        self._meter.add(commits_dropped=len(self._entries))
        self._meter.note(reason)
        self._entries = []

    def _end(self, give_back: Callable[[dict[int, Debt]], None]) -> None:
        claimed, self._claimed = self._claimed, {}
        for epoch, ref in claimed.values():
            give_back({epoch: Debt(slots={ref})})
        reading, self._reading = self._reading, []
        self._holdings.end_reading(reading)

    def _commit(self, link: Link, registration: Registration) -> None:
        namespace = self._namespace
        errors, kept_back = self._within_bound()
        placed: list[tuple[CommitEntry, SlotRef]] = []
        elsewhere: list[CommitEntry] = []
        for entry in self._entries:
            block = entry.block
            if block.origin is Origin.PRIVATE and block.epoch == link.epoch:
                placed.append((entry, SlotRef(block.slab_id, block.slot, block.generation)))
            else:
                elsewhere.append(entry)
        borrowed: set[SlotRef] = set()
        try:
            moves = self._find_room(link, registration, elsewhere, borrowed)
            summed = [entry for entry, _ in placed + moves]
            values = checksums_of([entry.block for entry in summed], namespace.layout)
            sums = {entry.digest: value for entry, value in zip(summed, values, strict=True)}
            if moves:
                transport = link.transport_for(namespace)
                sent = transport.send(link, namespace, [(entry.block, ref) for entry, ref in moves])
                self._meter.add(bytes_sent=sent)
            # In the order they came: parents first.
            order = {e.digest: i for i, e in enumerate(self._entries)}
            everything = sorted(placed + moves, key=lambda item: order[item[0].digest])
            for first in range(0, len(everything), _BLOCKS_A_CALL):
                self._call(link, registration, everything[first : first + _BLOCKS_A_CALL], sums, errors, kept_back)
                kept_back = 0
            if kept_back:
                self._call(link, registration, [], {}, {}, kept_back)
        finally:
            self._core.owe({link.epoch: Debt(slots=borrowed)})

    def _within_bound(self) -> tuple[dict[bytes, float], int]:
        """Lets go of blocks whose error misses the plan's bound, and of those behind them.

        The error of each block that is left, and how many aren't.
        """
        before = len(self._entries)
        namespace = self._namespace
        limit = namespace.plan.tensors.get(NOISE_LIMIT)
        if self._unshared:
            self._entries = [e for e in self._entries if not self._behind_unshared(e)]
        noise = noise_of([e.block for e in self._entries], namespace.layout, namespace.compute_device)
        if limit is not None and self._entries:
            for entry, over in zip(self._entries, (noise > limit).flatten(1).any(1).tolist(), strict=True):
                if over or entry.parent in self._unshared:
                    self._unshared.add(entry.digest)
        errors = dict(zip((e.digest for e in self._entries), noise.flatten(1).amax(1).tolist(), strict=True))
        self._entries = [e for e in self._entries if e.digest not in self._unshared]
        kept_back = before - len(self._entries)
        if kept_back:
            self._meter.add(blocks_not_shared_error=kept_back)
            self._core.blocks_not_shared_error += kept_back
            self._core.notices.warn("error-bound", f"{namespace.identity.model_name}: {kept_back_text(kept_back)}")
        return errors, kept_back

    def _behind_unshared(self, entry: CommitEntry) -> bool:
        if entry.parent in self._unshared:
            self._unshared.add(entry.digest)
        return entry.digest in self._unshared

    def _find_room(
        self, link: Link, registration: Registration, entries: list[CommitEntry], borrowed: set[SlotRef]
    ) -> list[tuple[CommitEntry, SlotRef]]:
        """Slots to copy blocks to: those claimed, and new ones, which go into `borrowed`."""
        moves: list[tuple[CommitEntry, SlotRef]] = []
        missing: list[CommitEntry] = []
        for entry in entries:
            epoch, ref = self._claimed.get(entry.digest, (0, SlotRef(0, 0, 0)))
            if epoch == link.epoch:
                moves.append((entry, ref))
            else:
                missing.append(entry)
        if missing:
            refs, reply = self._core.reserve(link, registration, [e.digest for e in missing], 0, probe=True)
            borrowed.update(refs)
            wanted = [s != pb.RESERVE_STATUS_COMMITTED for s in reply.statuses]
            moves.extend((e, ref) for e, ref, want in zip(missing, refs, wanted, strict=False) if want)
            short = sum(wanted[len(refs) :])
            if short:
                self._meter.add(commits_dropped=short)
                self._meter.note(reply.short_reason or "service-full")
            self._meter.add(commits_lost=len(wanted) - sum(wanted))
        return moves

    def _call(
        self,
        link: Link,
        registration: Registration,
        items: list[tuple[CommitEntry, SlotRef]],
        sums: dict[bytes, int],
        errors: dict[bytes, float],
        kept_back: int,
    ) -> None:
        request = pb.CommitRequest(
            namespace_id=registration.namespace_id,
            slab_ids=[ref.slab_id for _, ref in items],
            slots=[ref.slot for _, ref in items],
            generations=[ref.generation for _, ref in items],
            digests=b"".join(entry.digest for entry, _ in items),
            parents=b"".join(entry.parent for entry, _ in items),
            checksums=[sums[entry.digest] for entry, _ in items],
            errors=[errors[entry.digest] for entry, _ in items],
            not_shared_error=kept_back,
        )
        reply: pb.CommitResponse = link.call(
            "Commit", link.blocks.Commit, request, self._core.config.control_timeout_s, probe=True
        )
        if len(reply.committed) != len(items):
            raise BadReplyError(f"Commit answered {len(reply.committed)} results for {len(items)} blocks")
        won = 0
        for (_, ref), committed in zip(items, reply.committed, strict=True):
            if committed:
                won += 1
                # This process summed the bytes itself: no need to do so again at its first lease.
                link.verified[ref.slab_id, ref.slot] = ref.generation
        self._meter.add(blocks_committed=won, commits_lost=len(items) - won)
        done = {entry.digest for entry, _ in items}
        self._entries = [e for e in self._entries if e.digest not in done]


def kept_back_text(blocks: int) -> str:
    """For people: so many blocks miss the bound."""
    return f"{blocks} blocks over the error bound stay private"
