"""Slabs and block tables: addresses, views, and the rules of rows."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_kernels.attention import decode_attention
from kvstore_kernels.errors import LayoutError, TableError
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable, Entry


def test_views_lie_where_the_layout_says(make) -> None:
    bench = make("int8", layers=3, kv_heads=2, k_dim=72, v_dim=80)
    slab, layout = bench.slab(3), bench.layout
    for layer, views in enumerate(slab.views(layout)):
        for part in layout.parts:
            view = views[part.name]
            assert view.shape == (3, 2, *part.shape)
            for slot, head in ((0, 0), (2, 1)):
                expected = slab.base_address + layout.offset(slot, layer, head, part.name)
                assert view[slot, head].data_ptr() == expected
                assert view[slot, head].is_contiguous()
    assert slab.address(2) == slab.base_address + 2 * layout.block_bytes
    assert slab.views(layout) is slab.views(layout)


def test_slab_over_an_mmap_keeps_it_open(make) -> None:
    bench = make("int8", layers=1, kv_heads=1)
    mapped = mmap.mmap(-1, 3 * bench.layout.block_bytes + 4096)
    slab = Slab.from_buffer(mapped, bench.layout.block_bytes)
    views = slab.views(bench.layout)
    assert slab.slots == 3
    with pytest.raises(BufferError):
        mapped.close()
    slab.data[5] = 9
    assert mapped[5] == 9
    assert slab.slot_buffer(0)[5] == 9
    del slab, views
    gc.collect()
    mapped.close()


def test_a_table_that_dropped_its_blocks_lets_the_mapping_go(make) -> None:
    bench = make("int8", layers=2, kv_heads=2)
    mapped = mmap.mmap(-1, 4 * bench.layout.block_bytes)
    slab = Slab.from_buffer(mapped, bench.layout.block_bytes)
    table = BlockTable(1)
    for slot in range(3):
        table.append_block(0, slab, slot)
    for length, start in ((130, 0), (1, 130)):
        k = torch.randn(1, 2, length, 64)
        for layer in range(2):
            bench.codec.write(layer, k, k, table, [(0, start)])
    table.set_tokens(0, 131)
    decode_attention(torch.randn(1, 4, 1, 64), bench.codec, 1, table, scaling=0.1)
    decode_attention(torch.randn(1, 4, 3, 64), bench.codec, 1, table, scaling=0.1)
    assert len(table.drop_blocks(0, 0)) == 3
    del slab
    gc.collect()
    mapped.close()


def test_read_only_slab_is_read_but_not_written(make) -> None:
    bench = make("int8", layers=1, kv_heads=1)
    k = torch.randn(1, 1, 70, 64)
    table = bench.filled(k, k, [0])
    source = table.entry(0, 0).slab
    frozen = Slab.from_buffer(memoryview(source.data.numpy()).toreadonly(), bench.layout.block_bytes)
    assert not frozen.writable
    reading = BlockTable(1)
    reading.append_block(0, frozen, table.entry(0, 0).slot, 64)
    assert torch.equal(bench.codec.read(0, reading, 0)[0], bench.codec.read(0, table, 0, 0, 64)[0])
    for length in (1, 3):
        with pytest.raises(TableError, match="read-only"):
            bench.codec.write(0, k[:, :, :length], k[:, :, :length], reading, [(0, 5)])
    with pytest.raises(TableError, match="read-only"):
        bench.codec.copy_tokens(table.entry(0, 0), reading.entry(0, 0), 3)
    assert frozen.slot_buffer(0).readonly


@pytest.mark.parametrize(
    ("nbytes", "slot_bytes", "slots"), [(1000, 1024, None), (4096, 1000, None), (4096, 1024, 5), (4096, 0, None)]
)
def test_bad_slab_sizes(nbytes: int, slot_bytes: int, slots: int | None) -> None:
    raw = torch.zeros(nbytes + 128, dtype=torch.uint8)
    data = raw[-raw.data_ptr() % 128 :][:nbytes]
    with pytest.raises(LayoutError):
        Slab(data, slot_bytes, slots=slots)


def test_slab_of_another_layout(make) -> None:
    with pytest.raises(LayoutError, match="bytes a block"):
        make("int8", layers=1).slab().views(make("int8", layers=2).layout)
    with pytest.raises(LayoutError, match="slot 4"):
        make("int8").slab(4).address(4)


def test_rows_and_counts(make) -> None:
    bench = make("int8", layers=1, kv_heads=1)
    one, two = bench.slab(8), bench.slab(8)
    table = BlockTable(2)
    for slab, slot in ((one, 3), (one, 4), (two, 5), (one, 6), (one, 7)):
        table.append_block(0, slab, slot, 64)
    table.append_block(1, two, 0, 9)
    assert [(run.slab, run.first_slot, run.blocks, run.start) for run in table.runs(0)] == [
        (one, 3, 2, 0),
        (two, 5, 1, 128),
        (one, 6, 2, 192),
    ]
    table.set_count(0, 17)
    assert (table.tokens(0), table.tokens(1), table.capacity(0)) == (273, 9, 320)
    assert table.addresses().tolist() == [
        [one.address(3), one.address(4), two.address(5), one.address(6), one.address(7)],
        [two.address(0), 0, 0, 0, 0],
    ]
    assert table.addresses().dtype == torch.int64
    assert table.counts().tolist() == [[64, 64, 64, 64, 17], [9, 0, 0, 0, 0]]
    assert table.counts().dtype == torch.int32


def test_blocks_ahead_have_no_tokens(make) -> None:
    slab = make("int8").slab(4)
    table = BlockTable(1)
    for slot in range(3):
        table.append_block(0, slab, slot)
    table.set_tokens(0, 65)
    assert table.counts().tolist() == [[64, 1, 0]]
    with pytest.raises(TableError, match="65 tokens"):
        table.append_block(0, slab, 3, 1)
    with pytest.raises(TableError, match="193 tokens"):
        table.set_tokens(0, 193)
    with pytest.raises(LayoutError, match="slot 4"):
        table.append_block(0, slab, 4)
    assert [entry.slot for entry in table.drop_blocks(0, 1)] == [1, 2]
    assert table.tokens(0) == 64


def test_replaced_and_selected_blocks(make) -> None:
    slab, other = make("int8").slab(8), make("int8").slab(8)
    table = BlockTable(2)
    for row in range(2):
        for slot in range(3):
            table.append_block(row, slab, 4 * row + slot, 64)
    version = table.version(0)
    assert table.replace_block(0, 1, other, 7).slot == 1
    assert table.version(0) > version
    assert [(run.slab, run.first_slot, run.blocks) for run in table.runs(0)] == [
        (slab, 0, 1),
        (other, 7, 1),
        (slab, 2, 1),
    ]
    assert table.tokens(0) == 192
    chosen = table.select_rows([1, 0, 1])
    assert [chosen.entry(row, 0).slot for row in range(3)] == [4, 0, 4]
    assert [chosen.tokens(row) for row in range(3)] == [192] * 3
    with pytest.raises(TableError):
        table.replace_block(0, 3, other, 0)


def test_empty_table() -> None:
    with pytest.raises(TableError):
        BlockTable(0)
    with pytest.raises(TableError, match="no block"):
        BlockTable(1).set_count(0, 0)


def test_a_slot_as_a_tensor_shares_its_memory(make) -> None:
    slab = make("int8").slab(3)
    slab.slot_tensor(1)[7] = 42
    assert slab.slot_buffer(1)[7] == 42
    assert slab.slot_tensor(2).data_ptr() == slab.address(2)
    with pytest.raises(LayoutError):
        slab.slot_tensor(3)


def test_device_memory_has_no_host_buffer(make) -> None:
    slab = make("int8").slab(1)
    assert slab.device == torch.device("cpu")
    assert not slab.pinned
    # Stands for a slab on a GPU.
    slab.device = torch.device("cuda:0")
    with pytest.raises(LayoutError, match=r"cuda:0.*slot_tensor"):
        slab.slot_buffer(0)


def test_rebuilds_tell_appending_from_other_changes(make) -> None:
    slab = make("int8").slab(4)
    table = BlockTable(2)
    for slot in range(3):
        table.append_block(0, slab, slot)
    assert table.rebuilds == [0, 0]
    table.replace_block(0, 1, slab, 3)
    table.drop_blocks(0, 3)
    assert table.rebuilds == [1, 0]
    table.drop_blocks(0, 1)
    assert table.rebuilds == [2, 0]
    assert table.version(0) > 3
    assert table.device == torch.device("cpu")


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=8), max_size=4))
def test_blocks_appended_together_are_blocks_appended_one_by_one(groups: list[list[tuple[int, int]]]) -> None:
    slabs = [Slab.allocate(4096, 6) for _ in range(2)]
    together, single = BlockTable(1), BlockTable(1)
    for group in groups:
        together.append_blocks(0, [Entry(slabs[which], slot) for which, slot in group])
        for which, slot in group:
            single.append_block(0, slabs[which], slot)
        assert together.blocks(0) == single.blocks(0)
        assert together.runs(0) == single.runs(0)
        assert together.versions == single.versions
        assert together.rebuilds == single.rebuilds == [0]
    with pytest.raises(LayoutError):
        together.append_blocks(0, [Entry(slabs[0], 6)])
    assert together.blocks(0) == single.blocks(0)
