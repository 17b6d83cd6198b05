"""The bytes of blocks: the `bytes` transport, and checks against checksums.

Where the CPU addresses the memory, calls of the store do their work at once. For other memory the caller takes a `Span`
or a `Check`, works on it in a thread, and comes back: what the store knows may have changed, and is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.device.base import SlabMemory
from kvstore.errors import InvalidRequestError, LimitReachedError, NotHeldError, SlotNotOwnedError
from kvstore.store.index import Node
from kvstore.store.lease import Lease
from kvstore.store.removal import Removal
from kvstore.store.slab import Slab
from kvstore.store.slots import SlotState
from kvstore.store.state import StoreState
from kvstore.store.types import SlotRef


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a slot. Usable from any thread; ValueError once the slab is closed."""

    memory: SlabMemory
    offset: int
    nbytes: int

    def read(self) -> bytes:
        """A copy."""
        return bytes(self.memory.read(self.offset, self.nbytes))

    def write(self, data: bytes) -> None:
        """Stores `nbytes` bytes."""
        self.memory.write(self.offset, data)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A block to read against its checksum, in any thread; tell the result with `Payloads.checked`."""

    node: Node
    span: Span

    def is_sound(self) -> bool:
        """Whether the bytes are those that were committed. True for a block that is gone: there is nothing to say."""
        # numpy is loaded when the first block is checked, not with the store.
        from kvstore_kernels.checksum import block_checksum

        try:
            data = self.span.memory.read(self.span.offset, self.span.nbytes)
        except ValueError:
            return True
        return block_checksum(data) == self.node.checksum


class Payloads:
    """Reads and writes slots that the caller may read and write. Ranges are checked against the block."""

    def __init__(self, state: StoreState, removal: Removal) -> None:
        self._state = state
        self._removal = removal

    def blocks(self, session_id: bytes, lease_id: int) -> tuple[int, int]:
        """(blocks of the lease, bytes of one block). Raises NotHeldError."""
        lease = self._lease(session_id, lease_id)
        return lease.node.depth, lease.namespace.slot_bytes

    def leased_span(self, session_id: bytes, lease_id: int, block: int, offset: int, nbytes: int) -> Span:
        """What to read for bytes of a leased block. Raises NotHeldError, InvalidRequestError.

        Ask for it again after the copy: NotHeldError says that the lease ended, and what was read may be another block.
        """
        lease = self._lease(session_id, lease_id)
        if not 0 <= block < lease.node.depth:
            raise InvalidRequestError(
                f"block {block} of lease {lease_id}: expected 0 to {lease.node.depth - 1}, as the lease has so many"
            )
        node = lease.chain[block]
        return _span(node.slab, node.slot, offset, nbytes)

    def begin_write(self, session_id: bytes, ref: SlotRef, offset: int, nbytes: int) -> Span:
        """Where to write bytes of the caller's private slot; call `end_write` afterwards.

        Until then nobody else gets the slot, even if the session ends, and it is not committed. Raises
        SlotNotOwnedError, InvalidRequestError.
        """
        session = self._state.session(session_id)
        slab = self._state.slabs.get(ref.slab_id)
        if (
            slab is None
            or session.slots.get((ref.slab_id, ref.slot)) != ref.generation
            or slab.slot_state(ref.slot) is not SlotState.PRIVATE
        ):
            raise SlotNotOwnedError(
                f"slot {ref.slot} of slab {ref.slab_id} at generation {ref.generation} is not private to this session: "
                "expected a slot from Reserve that was neither committed nor aborted"
            )
        span = _span(slab, ref.slot, offset, nbytes)
        slab.writes[ref.slot] = slab.writes.get(ref.slot, 0) + 1
        return span

    def end_write(self, ref: SlotRef) -> None:
        """A write is over, however it went. Exactly once for each `begin_write` that returned."""
        slab = self._state.slabs[ref.slab_id]
        slab.writes[ref.slot] -= 1
        if not slab.writes[ref.slot]:
            del slab.writes[ref.slot]
            if ref.slot in slab.abandoned:
                slab.abandoned.discard(ref.slot)
                self._removal.free_private(slab, ref.slot)

    def damage_checks(self, session_id: bytes, namespace_id: int, digests: bytes) -> list[Check]:
        """The blocks to look at for `Store.report_damage`. Raises LimitReachedError."""
        namespace = self._state.namespace_of(self._state.session(session_id), namespace_id)
        chain = self._state.split(digests)
        most = self._state.config.max_damage_reports
        if len(chain) > most:
            raise LimitReachedError(f"{len(chain)} damage reports in one call: at most {most} are allowed")
        nodes = (namespace.index.get(digest) for digest in chain)
        return [_check(node) for node in nodes if node is not None]

    def checks(self) -> Iterator[Check]:
        """Every committed block, to look at one after the other; other calls are allowed in between."""
        for namespace in list(self._state.namespaces.values()):
            for node in list(namespace.index):
                if node.indexed:
                    yield _check(node)

    def checked(self, check: Check, sound: bool) -> int:
        """Takes the result of a check: a damaged block is condemned, with all that follow it. Number condemned."""
        node = check.node
        # A block that has left the index meanwhile may have been read while another one was written in its slot.
        if sound or not node.indexed:
            return 0
        namespace = node.slab.namespace
        namespace.note_damage(node.digest)
        self._state.counters.damaged += 1
        return sum(self._removal.remove(namespace, node))

    def _lease(self, session_id: bytes, lease_id: int) -> Lease:
        lease = self._state.session(session_id).leases.get(lease_id)
        if lease is None:
            raise NotHeldError(
                f"lease {lease_id} is not held by this session: expected one from LookupAndLease, not released yet"
            )
        return lease


def _check(node: Node) -> Check:
    return Check(node, _span(node.slab, node.slot, 0, node.slab.slot_bytes))


def _span(slab: Slab, slot: int, offset: int, nbytes: int) -> Span:
    if offset < 0 or nbytes < 0 or offset + nbytes > slab.slot_bytes:
        raise InvalidRequestError(
            f"bytes {offset} to {offset + nbytes} of a block: expected a range within its {slab.slot_bytes} bytes"
        )
    return Span(slab.memory, slot * slab.slot_bytes + offset, nbytes)
