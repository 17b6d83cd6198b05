"""Leases: who may read which chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.store.index import Node, chain_of

if TYPE_CHECKING:
    from kvstore.store.namespace import Namespace
    from kvstore.store.sessions import Session


class Lease:
    """A session's right to read the chain that ends with `node`.

    Only the deepest block carries the lease: eviction takes leaves, so its ancestors are safe. `anchor` is the deepest
    block of the chain that is still indexed (None when all are condemned); the blocks behind it are condemned and
    counted in their `cover`.
    """

    __slots__ = ("_chain", "anchor", "lease_id", "namespace", "node", "session", "since", "slab_ids")

    def __init__(
        self, lease_id: int, session: Session, namespace: Namespace, node: Node, slab_ids: frozenset[int], since: float
    ) -> None:
        self.lease_id = lease_id
        self.session = session
        self.namespace = namespace
        self.node = node
        self.anchor: Node | None = node
        self.slab_ids = slab_ids
        self.since = since
        self._chain: list[Node] | None = None

    @property
    def chain(self) -> list[Node]:
        """The leased blocks, first block first. They keep slab, slot and generation while the lease lasts."""
        if self._chain is None:
            self._chain = chain_of(self.node)
        return self._chain

    def condemned_blocks(self) -> list[Node]:
        """Blocks of the chain that left the index, deepest first."""
        found = []
        step: Node | None = self.node
        while step is not None and step is not self.anchor:
            found.append(step)
            step = step.parent
        return found
