"""A slab: the slots of one allocation, who writes them, and how it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.device.base import CUDA_LEGACY, SlabMemory
from kvstore.store.index import Node
from kvstore.store.ledger import Ledger
from kvstore.store.policy import EvictionPolicy
from kvstore.store.slots import SlabEvent, SlabState, SlotEvent, SlotState, next_slab_state, next_slot_state

if TYPE_CHECKING:
    from kvstore.store.namespace import Namespace
    from kvstore.store.sessions import Session


class Slab:
    """Slots of one namespace on one device.

    Invariants: the ledger's word is the state of a slot; `counts` and the map of free slots agree with it; a private
    slot belongs to `writer` (or, while draining, to whoever was it; to nobody when abandoned); `nodes[slot]` is set
    exactly for committed and condemned slots; a draining slab has no committed slot and hands out none.
    """

    def __init__(
        self,
        slab_id: int,
        namespace: Namespace,
        memory: SlabMemory,
        ledger: Ledger,
        slab_range: int,
        slots: int,
        slot_bytes: int,
        policy: EvictionPolicy[Node],
    ) -> None:
        self.slab_id = slab_id
        self.namespace = namespace
        self.memory = memory
        self.slab_range = slab_range
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.state = SlabState.LIVE
        self.writer: Session | None = None
        # Set while the writer has been asked to downgrade in favour of this session: no new slots until it answers.
        self.promised: Session | None = None
        # A session that nobody watches may read it for ever: its pages are never punched.
        self.tainted = False
        # The namespace that gets the bytes when the slab is gone.
        self.claimant: Namespace | None = None
        # Sessions that acknowledged an unmap while they still used the slab; they are asked again.
        self.ask_again: set[Session] = set()
        self.nodes: list[Node | None] = [None] * slots
        # Writes under way in other threads, by slot; `abandoned` slots have lost their session and wait for their end.
        self.writes: dict[int, int] = {}
        self.abandoned: set[int] = set()
        # Digest that a private slot was reserved for, where that registered the digest as in flight.
        self.intents: dict[int, bytes] = {}
        self.counts = [slots, 0, 0, 0]
        self._ledger = ledger
        self._base = slab_range * ledger.slots_per_slab
        self._free = bytearray(b"\x01") * slots

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.memory.nbytes

    @property
    def never_freed(self) -> bool:
        """Whether an unwatched process may have memory open that its owner must not free before it: it stays, unused.

        Descriptors keep their memory by themselves; a handle does not.
        """
        return self.tainted and self.memory.kind == CUDA_LEGACY

    @property
    def free(self) -> int:
        """Free slots (also of a draining slab, which hands none out)."""
        return self.counts[SlotState.FREE]

    @property
    def private(self) -> int:
        """Private slots."""
        return self.counts[SlotState.PRIVATE]

    @property
    def committed(self) -> int:
        """Committed slots."""
        return self.counts[SlotState.COMMITTED]

    @property
    def condemned(self) -> int:
        """Condemned slots."""
        return self.counts[SlotState.CONDEMNED]

    def slot_state(self, slot: int) -> SlotState:
        """State of a slot, from the ledger."""
        return self._ledger.state(self._base + slot)

    def generation(self, slot: int) -> int:
        """Generation of a slot, from the ledger."""
        return self._ledger.generation(self._base + slot)

    def payload(self, slot: int) -> memoryview:
        """The bytes of a slot; see SlabMemory.read."""
        return self.memory.read(slot * self.slot_bytes, self.slot_bytes)

    def longest_run(self, wanted: int) -> bool:
        """Whether `wanted` free slots lie side by side."""
        return self._free.find(b"\x01" * wanted) >= 0

    def take(self, wanted: int, owner: bytes) -> list[int]:
        """Makes up to `wanted` free slots private to `owner`; ascending, in as long runs as there are."""
        assert self.state is SlabState.LIVE
        taken: list[int] = []
        run = wanted = min(wanted, self.free)
        while wanted > 0:
            run = min(run, wanted)
            first = self._free.find(b"\x01" * run)
            if first < 0:
                run = max(1, run // 2)
                continue
            for slot in range(first, first + run):
                self._move(slot, SlotEvent.RESERVE)
                self._ledger.set_private(self._base + slot, owner)
                self._free[slot] = 0
                taken.append(slot)
            wanted -= run
        taken.sort()
        return taken

    def abort(self, slot: int) -> None:
        """A private slot is free again."""
        self._ledger.set_state(self._base + slot, self._move(slot, SlotEvent.ABORT))
        self._free[slot] = 1

    def commit(self, node: Node, parent: bytes, tokens: int) -> None:
        """A private slot holds `node` now, visible to all who map the ledger."""
        slot = node.slot
        self._move(slot, SlotEvent.COMMIT)
        self.nodes[slot] = node
        self._ledger.set_committed(
            self._base + slot,
            digest=node.digest,
            parent=parent,
            tokens=tokens,
            checksum=node.checksum,
            error=node.error,
        )

    def condemn(self, slot: int) -> None:
        """The block has left the index."""
        self._ledger.set_state(self._base + slot, self._move(slot, SlotEvent.CONDEMN))

    def reclaim(self, slot: int) -> None:
        """Nobody reads the condemned block any more."""
        self._ledger.set_state(self._base + slot, self._move(slot, SlotEvent.RECLAIM))
        self.nodes[slot] = None
        self._free[slot] = 1

    def drain(self) -> None:
        """The slab is to go."""
        self.state = next_slab_state(self.state, SlabEvent.DRAIN, self.slab_id)

    def vanish(self) -> None:
        """The slab is gone; its ledger range is free for another."""
        assert self.free == self.slots
        self.state = next_slab_state(self.state, SlabEvent.VANISH, self.slab_id)
        self._ledger.detach_slab(self.slab_range)

    def owner(self, slot: int) -> bytes:
        """Instance id of the session that got the slot last, from the ledger."""
        return self._ledger.read(self._base + slot).owner

    def _move(self, slot: int, event: SlotEvent) -> SlotState:
        record = self._base + slot
        before = self._ledger.state(record)
        after = next_slot_state(before, event, self.slab_id, slot)
        self.counts[before] -= 1
        self.counts[after] += 1
        return after

    def problems(self) -> list[str]:
        """Broken invariants of this slab alone."""
        found = []
        name = f"slab {self.slab_id}"
        counts = [0, 0, 0, 0]
        for slot in range(self.slots):
            record = self._ledger.read(self._base + slot)
            counts[record.state] += 1
            if (record.slab_id, record.slot) != (self.slab_id, slot):
                found.append(f"{name}: the record of slot {slot} names slab {record.slab_id} slot {record.slot}")
            if self._free[slot] != (record.state is SlotState.FREE):
                found.append(f"{name}: slot {slot} is {record.state.name} but the free map says {self._free[slot]}")
            node = self.nodes[slot]
            if (node is not None) != (record.state in (SlotState.COMMITTED, SlotState.CONDEMNED)):
                found.append(f"{name}: slot {slot} is {record.state.name} with node {node is not None}")
            elif node is not None:
                if (node.slab, node.slot, node.generation) != (self, slot, record.generation):
                    found.append(f"{name}: slot {slot} holds a node that lies elsewhere")
                if (node.digest, node.checksum) != (record.digest, record.checksum):
                    found.append(f"{name}: slot {slot}: ledger and index differ in digest or checksum")
                if node.indexed != (record.state is SlotState.COMMITTED):
                    found.append(f"{name}: slot {slot} is {record.state.name}, indexed {node.indexed}")
        if counts != self.counts:
            found.append(f"{name}: slots by state are {counts}, counted as {self.counts}")
        if self.state is SlabState.DRAINING and self.committed:
            found.append(f"{name}: draining with {self.committed} committed slots")
        return found
