"""The bytes of blocks: the `bytes` transport, and checks against checksums."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.errors import InvalidRequestError, LimitReachedError, NotHeldError, SlotNotOwnedError
from kvstore.store.index import Node
from kvstore.store.lease import Lease
from kvstore.store.namespace import Namespace
from kvstore.store.removal import Removal
from kvstore.store.sessions import Session
from kvstore.store.slots import SlotState
from kvstore.store.state import StoreState
from kvstore.store.types import SlotRef


class Payloads:
    """Reads and writes slots that the caller may read and write. Ranges are checked against the block."""

    def __init__(self, state: StoreState, removal: Removal) -> None:
        self._state = state
        self._removal = removal

    def lease(self, session: Session, lease_id: int) -> Lease:
        """A lease of the session. Raises NotHeldError."""
        lease = session.leases.get(lease_id)
        if lease is None:
            raise NotHeldError(
                f"lease {lease_id} is not held by this session: expected one from LookupAndLease, not released yet"
            )
        return lease

    def read(self, session: Session, lease_id: int, block: int, offset: int, nbytes: int) -> bytes:
        """See Store.read_payload."""
        lease = self.lease(session, lease_id)
        if not 0 <= block < lease.node.depth:
            raise InvalidRequestError(
                f"block {block} of lease {lease_id}: expected 0 to {lease.node.depth - 1}, as the lease has so many"
            )
        node = lease.chain[block]
        _check_range(offset, nbytes, node.slab.slot_bytes)
        start = node.slot * node.slab.slot_bytes + offset
        return bytes(node.slab.memory.view[start : start + nbytes])

    def write(self, session: Session, ref: SlotRef, offset: int, data: bytes) -> None:
        """See Store.write_payload."""
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
        _check_range(offset, len(data), slab.slot_bytes)
        start = ref.slot * slab.slot_bytes + offset
        slab.memory.view[start : start + len(data)] = data

    def report_damage(self, namespace: Namespace, digests: bytes) -> int:
        """See Store.report_damage."""
        chain = self._state.split(digests)
        most = self._state.config.max_damage_reports
        if len(chain) > most:
            raise LimitReachedError(f"{len(chain)} damage reports in one call: at most {most} are allowed")
        condemned = 0
        for digest in chain:
            node = namespace.index.get(digest)
            if node is not None and not self._sound(node):
                condemned += self._condemn(namespace, node)
        return condemned

    def verify(self) -> Iterator[bool]:
        """See Store.verify_payloads."""
        for namespace in list(self._state.namespaces.values()):
            for node in list(namespace.index):
                if not node.indexed:
                    continue
                sound = self._sound(node)
                if not sound:
                    self._condemn(namespace, node)
                yield sound

    def _condemn(self, namespace: Namespace, node: Node) -> int:
        namespace.note_damage(node.digest)
        self._state.counters.damaged += 1
        return sum(self._removal.remove(namespace, node))

    @staticmethod
    def _sound(node: Node) -> bool:
        # numpy is loaded when the first block is checked, not with the store.
        from kvstore_kernels.checksum import block_checksum

        return block_checksum(node.slab.payload(node.slot)) == node.checksum


def _check_range(offset: int, nbytes: int, slot_bytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > slot_bytes:
        raise InvalidRequestError(
            f"bytes {offset} to {offset + nbytes} of a block: expected a range within its {slot_bytes} bytes"
        )
