"""The fetch ring on a device that copies only when somebody waits: what is read must have come, and still be there."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import pytest
import torch
from kvstore_kernels.errors import TableError
from kvstore_kernels.gpu.addresses import Addresses
from kvstore_kernels.gpu.copies import Copies
from kvstore_kernels.gpu.fetch import DEPTH, FetchRing
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable


class LateCopies:
    """A copy stream that runs as late as it may: when work waits for a mark behind it.

    `begun` is how far the work has come; a copy that must wait for later work is an error when it is run.
    """

    def __init__(self) -> None:
        self._queue: deque[Any] = deque()
        self.given = self.done = self.work = 0
        self.finished = 0
        self._kept: list[torch.Tensor] = []

    def copy_rows(self, target: int, source: int, pitch: int, nbytes: int, rows: int, *, from_host: bool) -> None:
        def copy() -> None:
            for row in range(rows):
                ctypes.memmove(target + row * nbytes, source + row * pitch, nbytes)

        self.given += 1
        self._queue.append((self.given, copy))

    def copied(self) -> Any:
        return ("copied", self.given)

    def computed(self) -> Any:
        self.work += 1
        return ("computed", self.work)

    def copies_wait(self, mark: Any) -> None:
        assert mark[0] == "computed"
        assert mark[1] <= self.work

    def work_waits(self, mark: Any) -> None:
        assert mark[0] == "copied"
        while self._queue and self._queue[0][0] <= mark[1]:
            self.done, copy = self._queue.popleft()
            copy()

    def buffer(self, nbytes: int) -> torch.Tensor:
        # Late copies may still write what nobody reads any more: torch keeps it for its stream, this list does here.
        self._kept.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self._kept[-1]

    def finish(self) -> None:
        self.finished += 1
        while self._queue:
            self._queue.popleft()[1]()


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout.create("int8", layers=5, kv_heads=2, k_dim=64, v_dim=64, dtype="float32")


def slab_of(layout: BlockLayout, slots: int) -> Slab:
    slab = Slab.allocate(layout.block_bytes, slots)
    slab.data.random_(0, 256)
    return slab


def check(ring: FetchRing, places: Any, blocks: dict[tuple[Slab, int], int], layout: BlockLayout, layer: int) -> None:
    buffer = ring.acquire(layer)
    for (slab, slot), place in blocks.items():
        found = ctypes.string_at(int(places[buffer, place]), layout.layer_bytes)
        first = layout.layer_offset(layer)
        assert found == slab.slot_tensor(slot)[first : first + layout.layer_bytes].numpy().tobytes()
    ring.release()


def test_every_layer_of_every_step(layout: BlockLayout) -> None:
    copies: Copies = LateCopies()
    ring = FetchRing(layout, copies)
    first, second = slab_of(layout, 6), slab_of(layout, 3)
    blocks = {(first, 1): 0, (first, 2): 1, (first, 5): 2, (second, 0): 3, (second, 1): 4}
    places = ring.aim(blocks)
    assert places.shape == (DEPTH, 5)
    for _ in range(3):
        for layer in range(5):
            check(ring, places, blocks, layout, layer)
    # A pass that stopped, and one that begins again.
    check(ring, places, blocks, layout, 0)
    check(ring, places, blocks, layout, 0)
    check(ring, places, blocks, layout, 4)
    # More blocks, then fewer: what was fetched ahead is of the old ones.
    blocks[second, 2] = 5
    places = ring.aim(blocks)
    for layer in range(5):
        check(ring, places, blocks, layout, layer)
    blocks = {(second, 2): 0}
    places = ring.aim(blocks)
    for layer in range(5):
        check(ring, places, blocks, layout, layer)


def test_of_several_codecs_each_has_a_ring_of_its_layers() -> None:
    spec = "int8:1,int4:1,k4v2:1,int8:2"
    mixed = BlockLayout.create(spec, layers=5, kv_heads=2, k_dim=64, v_dim=64, dtype="float32")
    slab = slab_of(mixed, 4)
    blocks = {(slab, 3): 0, (slab, 0): 1}
    for name, own in (("int8", [0, 3, 4]), ("int4", [1]), ("k4v2", [2])):
        layout = mixed.of(name)
        ring = FetchRing(layout, LateCopies(), own)
        places = ring.aim(blocks)
        for _ in range(3):
            for layer in own:
                check(ring, places, blocks, layout, layer)
        # A pass that stopped behind its first layer.
        check(ring, places, blocks, layout, own[0])
        check(ring, places, blocks, layout, own[0])


def test_three_runs_of_slots_are_three_copies(layout: BlockLayout) -> None:
    copies = LateCopies()
    ring = FetchRing(layout, copies)
    slab, other = slab_of(layout, 6), slab_of(layout, 1)
    ring.aim({(slab, 1): 0, (slab, 2): 1, (slab, 5): 2, (other, 0): 3})
    ring.acquire(0)
    assert copies.given == 3


def test_copies_are_done_before_their_slabs_go(layout: BlockLayout) -> None:
    copies = LateCopies()
    ring = FetchRing(layout, copies)
    slab, other = slab_of(layout, 2), slab_of(layout, 2)
    ring.aim({(slab, 0): 0})
    ring.acquire(0)
    ring.aim({(other, 0): 0})
    assert copies.finished == 1
    del ring
    assert copies.finished == 2


def test_addresses_follow_a_table(layout: BlockLayout) -> None:
    device = torch.device("cpu")
    near, far = slab_of(layout, 40), slab_of(layout, 4)
    # Stands for a peer: any device that isn't the one that computes.
    far.device = torch.device("cuda:7")
    table = BlockTable(2)
    addresses = Addresses(2, device)
    for slot in range(3):
        table.append_block(0, near, slot)
    addresses.refresh(table)
    assert addresses.matrix[0, :3].tolist() == [near.address(slot) for slot in range(3)]
    for slot in range(20):
        table.append_block(1, near, slot + 3)
    addresses.refresh(table)
    assert addresses.width >= 20
    assert addresses.matrix[1, :20].tolist() == [near.address(slot + 3) for slot in range(20)]
    assert not addresses.fetched
    table.replace_block(1, 4, far, 2)
    table.replace_block(0, 0, far, 2)
    addresses.refresh(table)
    assert list(addresses.fetched.values()) == [0]
    assert addresses.matrix[1, 4] == addresses.matrix[0, 0] == -1
    table.replace_block(1, 4, near, 7)
    table.replace_block(0, 0, near, 0)
    addresses.refresh(table)
    assert not addresses.fetched
    assert addresses.matrix[1, 4] == near.address(7)


def test_host_memory_that_is_not_registered_is_refused(layout: BlockLayout) -> None:
    table = BlockTable(1)
    slab = slab_of(layout, 2)
    table.append_block(0, slab, 0)
    addresses = Addresses(1, torch.device("cuda:0"))
    with pytest.raises(TableError, match="register"):
        addresses.refresh(table)
    slab.pinned = True
    addresses.refresh(table)
    assert list(addresses.fetched) == [(slab, 0)]
