"""The chain index of a namespace: digest -> node, nodes linked to parent and children."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.store.types import DIGEST_BYTES

if TYPE_CHECKING:
    from kvstore.store.slab import Slab


Place = tuple[int, int, int, int]  # slab id, slot, generation, checksum

# A look-up splits its digests in chunks, so that a miss at the start costs nothing for the rest.
_CHUNK = 64
# Bounds of the answers kept: queries, and blocks of one.
_RECENT_QUERIES = 64
_RECENT_BLOCKS = 4096
_SPLIT = struct.Struct(f"{DIGEST_BYTES}s" * _CHUNK)


class Node:
    """A committed block; after it left the index, a condemned one.

    `depth` counts from 1; `before_run` is the last ancestor by another `writer`; `place` says where it lies (all fixed:
    neither blocks nor their ancestors move while a block is in the index). `worst` is the largest `error` from the
    first block to this one. `anchors` counts leases whose deepest
    *indexed* block this is, `holds` is 1 while the session that wrote it still uses it, `cover` counts leases on it
    once it is condemned.
    """

    __slots__ = (
        "anchors",
        "before_run",
        "checksum",
        "children",
        "cover",
        "depth",
        "digest",
        "error",
        "generation",
        "holds",
        "indexed",
        "last_used",
        "parent",
        "pinned",
        "place",
        "slab",
        "slab_id",
        "slot",
        "worst",
        "writer",
    )

    def __init__(
        self,
        digest: bytes,
        parent: Node | None,
        slab: Slab,
        slot: int,
        generation: int,
        checksum: int,
        writer: str,
        last_used: int,
        error: float = 0.0,
    ) -> None:
        self.digest = digest
        self.parent = parent
        self.children: set[Node] | None = None
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.before_run: Node | None = parent
        if parent is not None and parent.writer == writer:
            self.before_run = parent.before_run
        self.place: Place = (slab.slab_id, slot, generation, checksum)
        self.slab = slab
        self.slab_id = slab.slab_id
        self.slot = slot
        self.generation = generation
        self.checksum = checksum
        self.error = error
        self.worst: float = error if parent is None else max(parent.worst, error)
        self.writer: str = writer
        self.last_used = last_used
        self.anchors = 0
        self.holds = 0
        self.cover = 0
        self.pinned = False
        self.indexed = False


@dataclass(slots=True)
class Prefix:
    """The held blocks of one query, first block first: `deepest` is the last, the four lists run parallel.

    `wire` belongs to whoever answers queries: what it made of the lists, so that it makes it once.
    """

    deepest: Node
    slab_ids: list[int]
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    writers: list[tuple[str, int]]
    slabs: frozenset[int]
    wire: bytes = b""


class ChainIndex:
    """All committed blocks of a namespace.

    Invariants: the parent of an indexed node is indexed or None; a node is a candidate of its slab's policy exactly
    when it may be evicted: indexed, no children, no anchors, no holds, not pinned. So every indexed block can be
    reached, and ancestors of a used block are safe because they have a child.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        # Answers to the queries of late, by their digests: workers ask for the same document again and again.
        self._recent: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, digest: object) -> bool:
        return digest in self._nodes

    def get(self, digest: bytes) -> Node | None:
        """The node of a digest."""
        return self._nodes.get(digest)

    def prefix_within(self, digests: bytes, max_error: float) -> Prefix | None:
        """As `prefix`, up to the first block whose error is larger than `max_error`."""
        found = self.prefix(digests)
        if found is None or found.deepest.worst <= max_error:
            return found
        node: Node | None = found.deepest
        while node is not None and node.worst > max_error:
            node = node.parent
        return None if node is None else self.prefix(digests[: node.depth * DIGEST_BYTES])

    def prefix(self, digests: bytes) -> Prefix | None:
        """The longest held prefix of a query, None if not a block is held; don't change it."""
        recent = self._recent
        found = recent.get(digests)
        if found is not None:
            held = found.deepest.depth * DIGEST_BYTES
            # Its ancestors are indexed as long as it is; and nobody may have committed the block behind it.
            if found.deepest.indexed and digests[held : held + DIGEST_BYTES] not in self._nodes:
                recent.move_to_end(digests)
                return found
            del recent[digests]
        deepest, places = self.walk(digests)
        if deepest is None:
            return None
        slab_ids, slots, generations, checksums = map(list, zip(*places, strict=True))
        found = Prefix(deepest, slab_ids, slots, generations, checksums, writer_runs(deepest), frozenset(slab_ids))
        if len(digests) <= _RECENT_BLOCKS * DIGEST_BYTES:
            recent[digests] = found
            if len(recent) > _RECENT_QUERIES:
                recent.popitem(last=False)
        return found

    def walk(self, digests: bytes) -> tuple[Node | None, list[Place]]:
        """The longest held prefix: its deepest block and the places of all its blocks, first block first.

        A digest that is held as part of another chain ends it: a lease on the deepest block must protect all of them.
        """
        places: list[Place] = []
        append = places.append
        get = self._nodes.get
        deepest: Node | None = None
        for start in range(0, len(digests), _CHUNK * DIGEST_BYTES):
            for digest in _chunk(digests, start):
                node = get(digest)
                if node is None or node.parent is not deepest:
                    return deepest, places
                append(node.place)
                deepest = node
        return deepest, places

    def insert(self, node: Node) -> None:
        """Adds a node whose digest is not held and whose parent (if any) is indexed."""
        assert node.digest not in self._nodes
        assert node.parent is None or node.parent.indexed
        self._nodes[node.digest] = node
        node.indexed = True
        parent = node.parent
        if parent is not None:
            if parent.children is None:
                parent.children = set()
            parent.children.add(node)
            self.refresh(parent)
        self.refresh(node)

    def remove_subtree(self, top: Node) -> list[Node]:
        """Takes a node and everything that follows it out of the index, in one step; returns them.

        The parent inherits the recency: whoever used the child used the parent.
        """
        removed = [top]
        for node in removed:  # grows while it is walked: breadth first
            if node.children:
                removed.extend(node.children)
        for node in removed:
            del self._nodes[node.digest]
            node.indexed = False
            node.children = None
            node.slab.policy.remove(node)
        parent = top.parent
        if parent is not None and parent.children is not None:
            parent.children.discard(top)
            parent.last_used = max(parent.last_used, top.last_used)
            self.refresh(parent)
        return removed

    def refresh(self, node: Node) -> None:
        """Makes a node a candidate for eviction, or not, after something it depends on has changed."""
        if self.evictable(node):
            node.slab.policy.add(node)
        else:
            node.slab.policy.remove(node)

    @staticmethod
    def evictable(node: Node) -> bool:
        """Whether the block may be evicted now."""
        return node.indexed and not (node.children or node.anchors or node.holds or node.pinned)


def _chunk(digests: bytes, start: int) -> tuple[bytes, ...]:
    if len(digests) - start >= _SPLIT.size:
        return _SPLIT.unpack_from(digests, start)
    return tuple(digests[at : at + DIGEST_BYTES] for at in range(start, len(digests), DIGEST_BYTES))


def chain_of(node: Node) -> list[Node]:
    """The chain that ends with `node`, first block first."""
    nodes = []
    step: Node | None = node
    while step is not None:
        nodes.append(step)
        step = step.parent
    nodes.reverse()
    return nodes


def writer_runs(deepest: Node) -> list[tuple[str, int]]:
    """Who wrote the chain that ends with `deepest`: (session name, blocks), first block first."""
    runs = []
    last: Node | None = deepest
    while last is not None:
        before = last.before_run
        runs.append((last.writer, last.depth - (before.depth if before is not None else 0)))
        last = before
    runs.reverse()
    return runs
