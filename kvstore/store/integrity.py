"""Proves that bytes, slots, index, leases and holds add up: every invariant the classes state, computed anew."""

from __future__ import annotations

from kvstore.store.index import Node
from kvstore.store.namespace import Namespace
from kvstore.store.sessions import Session
from kvstore.store.slots import SlabState, SlotState
from kvstore.store.state import StoreState


def integrity_problems(state: StoreState) -> list[str]:
    """Broken invariants in words; empty = clean. Reads the ledgers, not the payloads."""
    found = _budget(state)
    for namespace in state.namespaces.values():
        found += _slabs(state, namespace)
        found += _index(namespace)
        found += _leases(namespace)
        found += _in_flight(namespace)
    for session in state.sessions.values():
        found += _session(state, session)
    found += _holds(state)
    return found


def _budget(state: StoreState) -> list[str]:
    found = []
    used = sum(namespace.used_bytes for namespace in state.namespaces.values())
    if used != state.budget.used:
        found.append(f"budget: namespaces hold {used} bytes, counted as {state.budget.used}")
    if state.budget.used > state.budget.total:
        found.append(f"budget: {state.budget.used} of {state.budget.total} bytes are used")
    found += [
        f"namespace {namespace.namespace_id}: {namespace.used_bytes} bytes, above its maximum"
        for namespace in state.namespaces.values()
        if namespace.quota.maximum and namespace.used_bytes > namespace.quota.maximum
    ]
    owned = {slab_id for namespace in state.namespaces.values() for slab_id in namespace.slabs}
    if owned != set(state.slabs):
        found.append(f"slabs {sorted(owned)} belong to namespaces, known are {sorted(state.slabs)}")
    return found


def _slabs(state: StoreState, namespace: Namespace) -> list[str]:
    found = []
    ranges = [slab.slab_range for slab in namespace.slabs.values()] + namespace.ranges
    if sorted(ranges) != list(range(namespace.plan.max_slabs)):
        found.append(f"namespace {namespace.namespace_id}: ledger ranges {sorted(ranges)} are not each used once")
    for slab in namespace.slabs.values():
        found += slab.problems()
        if slab.writer is not None and not slab.writer.alive:
            found.append(f"slab {slab.slab_id}: its writer {slab.writer.name!r} is dead")
        if slab.promised is not None and (not slab.promised.alive or slab.private):
            found.append(f"slab {slab.slab_id}: promised to a dead session, or with private slots")
        if namespace.ledger is None or namespace.ledger.slab_in(slab.slab_range) != slab.slab_id:
            found.append(f"slab {slab.slab_id}: the ledger's range {slab.slab_range} names another slab")
        mapped = any(slab.slab_id in session.mapped for session in state.sessions.values())
        unused = slab.free == slab.slots and not mapped and not slab.never_freed
        if slab.state is SlabState.DRAINING and unused:
            found.append(f"slab {slab.slab_id}: draining, unused, mapped by nobody, and not gone")
    return found


def _index(namespace: Namespace) -> list[str]:
    found = []
    name = f"namespace {namespace.namespace_id}"
    committed = 0
    for slab in namespace.slabs.values():
        committed += slab.committed
        found += [
            f"{name}: condemned block {_short(node)} is a candidate for eviction"
            for node in slab.nodes
            if node is not None and not node.indexed and node in slab.policy
        ]
    if committed != len(namespace.index):
        found.append(f"{name}: {committed} slots are committed, {len(namespace.index)} blocks indexed")
    candidates = 0
    for node in namespace.index:
        parent = node.parent
        if parent is not None and (namespace.index.get(parent.digest) is not parent or node not in _children(parent)):
            found.append(f"{name}: block {_short(node)} can't be reached: its parent is not indexed")
        if node.depth != (parent.depth + 1 if parent is not None else 1):
            found.append(f"{name}: block {_short(node)} has depth {node.depth}")
        if node.slab.nodes[node.slot] is not node:
            found.append(f"{name}: block {_short(node)} is not in its slot")
        if any(child.parent is not node or not child.indexed for child in _children(node)):
            found.append(f"{name}: block {_short(node)} has a child that is not its own")
        evictable = namespace.index.evictable(node)
        candidates += evictable
        if (node in node.slab.policy) != evictable:
            found.append(f"{name}: block {_short(node)} is evictable {evictable}, candidate {not evictable}")
        if node.pinned != (namespace.pinned.get(node.digest) is node):
            found.append(f"{name}: block {_short(node)} is pinned {node.pinned}, listed {not node.pinned}")
    listed = sum(len(slab.policy) for slab in namespace.slabs.values())
    if listed != candidates:
        found.append(f"{name}: {candidates} blocks are evictable, {listed} are candidates")
    if any(not node.indexed for node in namespace.pinned.values()):
        found.append(f"{name}: a pinned chain is not indexed")
    return found


def _leases(namespace: Namespace) -> list[str]:
    found = []
    anchors: dict[Node, int] = {}
    covers: dict[Node, int] = {}
    for lease in namespace.leases.values():
        name = f"lease {lease.lease_id}"
        if not lease.session.alive or lease.session.leases.get(lease.lease_id) is not lease:
            found.append(f"{name}: its session does not have it")
        if lease.anchor is not None:
            anchors[lease.anchor] = anchors.get(lease.anchor, 0) + 1
            if not lease.anchor.indexed:
                found.append(f"{name}: its anchor {_short(lease.anchor)} is not indexed")
        for block in lease.condemned_blocks():
            covers[block] = covers.get(block, 0) + 1
        found += [
            f"{name}: its block {_short(block)} has lost its slot"
            for block in lease.chain
            if block.slab.nodes[block.slot] is not block or block.slab.generation(block.slot) != block.generation
        ]
    for slab in namespace.slabs.values():
        for node in slab.nodes:
            if node is None:
                continue
            if node.anchors != anchors.get(node, 0) or node.cover != covers.get(node, 0):
                found.append(
                    f"block {_short(node)}: {node.anchors} anchors and cover {node.cover}, counted "
                    f"{anchors.get(node, 0)} and {covers.get(node, 0)}"
                )
            if not node.indexed and not node.cover and not node.holds:
                found.append(f"block {_short(node)}: condemned, used by nobody, and not free")
    return found


def _in_flight(namespace: Namespace) -> list[str]:
    found = []
    for digest, entry in namespace.in_flight.items():
        if digest in namespace.index:
            found.append(f"digest {digest.hex()[:12]} is in flight and committed")
        if not entry.session.alive or not entry.slots:
            found.append(f"digest {digest.hex()[:12]} is in flight by nobody")
        for slab_id, slot in entry.slots:
            slab = namespace.slabs.get(slab_id)
            if slab is None or slab.slot_state(slot) is not SlotState.PRIVATE or slab.intents.get(slot) != digest:
                found.append(f"digest {digest.hex()[:12]} is in flight in slot {slot} of slab {slab_id}, not its")
    return found


def _session(state: StoreState, session: Session) -> list[str]:
    found = []
    name = f"session {session.name!r}"
    for (slab_id, slot), generation in session.slots.items():
        slab = state.slabs.get(slab_id)
        if slab is None or slab.generation(slot) != generation or slab.slot_state(slot) is SlotState.FREE:
            found.append(f"{name}: holds slot {slot} of slab {slab_id}, not its any more")
        elif slab.slot_state(slot) is SlotState.PRIVATE:
            if slab.writer is not session:
                found.append(f"{name}: has private slot {slot} of slab {slab_id} without being its writer")
            if slab.owner(slot) != session.instance_id:
                found.append(f"{name}: the ledger names another owner for slot {slot} of slab {slab_id}")
    if any(session not in namespace.sessions for namespace in session.namespaces.values()):
        found.append(f"{name}: one of its namespaces does not know it")
    return found


def _holds(state: StoreState) -> list[str]:
    found = []
    holders: dict[tuple[int, int], int] = {}
    for session in state.sessions.values():
        for key in session.slots:
            holders[key] = holders.get(key, 0) + 1
    for slab in state.slabs.values():
        if not slab.abandoned <= slab.writes.keys():
            found.append(f"slab {slab.slab_id}: slots {sorted(slab.abandoned)} wait for writes, which are over")
        for slot, node in enumerate(slab.nodes):
            held = holders.get((slab.slab_id, slot), 0)
            if node is not None and node.holds != held:
                found.append(f"slot {slot} of slab {slab.slab_id}: {node.holds} holds, held by {held} sessions")
            expected = 0 if slot in slab.abandoned else 1
            if node is None and slab.slot_state(slot) is SlotState.PRIVATE and held != expected:
                found.append(f"slot {slot} of slab {slab.slab_id}: private to {held} sessions")
    return found


def _children(node: Node) -> set[Node]:
    return node.children if node.children is not None else set()


def _short(node: Node) -> str:
    return node.digest.hex()[:12]
