"""Host memory slabs: sealed, pre-faulted, refused before anything is touched that can't be had."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from pathlib import Path

import pytest

from kvstore.device import CpuDevice
from kvstore.device.cpu import _CHUNK, _RESERVE
from kvstore.device.headroom import Headroom, memory_headroom
from kvstore.errors import InvalidRequestError, OutOfMemoryError
from kvstore.store import Store, StoreConfig
from kvstore.testing import digest_chain, model_spec

ODD = 3 * mmap.PAGESIZE + 17


def resident_pages(view: memoryview) -> int:
    """Pages of a mapping that are in memory, by mincore."""
    nbytes = len(view)
    pages = -(-nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    buffer = (ctypes.c_ubyte * nbytes).from_buffer(view)
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(nbytes), vector)
    del buffer
    assert status == 0, os.strerror(ctypes.get_errno())
    return sum(flags & 1 for flags in vector)


@pytest.mark.parametrize("nbytes", [1, ODD, 2 << 20, _CHUNK + ODD], ids=["1", "odd", "2 MiB", "two chunks"])
def test_a_slab_is_zeroed_and_all_there(nbytes: int) -> None:
    memory = CpuDevice().create_slab(nbytes)
    try:
        assert memory.nbytes == len(memory.view) == nbytes
        assert not any(memory.view[:: mmap.PAGESIZE])
        assert resident_pages(memory.view) == -(-nbytes // mmap.PAGESIZE)
        assert os.fstat(memory.fd).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(memory.fd)
    finally:
        memory.close()


def test_the_size_is_sealed_but_writing_is_not() -> None:
    memory = CpuDevice().create_slab(ODD)
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (ODD - 1, ODD + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with mmap.mmap(memory.fd, ODD) as second:
        second[5] = 7
    assert memory.view[5] == 7
    memory.close()


def test_a_reader_sees_what_is_written_and_cannot_write() -> None:
    memory = CpuDevice().create_slab(ODD)
    fd = memory.read_only_fd()
    try:
        memory.view[ODD - 1] = 9
        with mmap.mmap(fd, ODD, prot=mmap.PROT_READ) as reader:
            assert reader[ODD - 1] == 9
        with pytest.raises(PermissionError):
            mmap.mmap(fd, ODD, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
        memory.close()


def test_discard_frees_the_pages_at_once() -> None:
    memory = CpuDevice().create_slab(2 << 20)
    memory.view[:5] = b"hello"
    blocks = os.fstat(memory.fd).st_blocks
    memory.discard()
    assert os.fstat(memory.fd).st_blocks == 0 < blocks
    assert bytes(memory.view[:5]) == bytes(5)
    memory.close()


def test_close_is_idempotent_and_what_is_still_held_does_not_crash() -> None:
    memory = CpuDevice().create_slab(ODD)
    kept = memory.view[10:20]
    memory.close()
    memory.close()
    memory.discard()
    kept[0] = 1
    assert kept[0] == 1
    for use in (lambda: memory.fd, lambda: memory.view, memory.read_only_fd):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_no_descriptor_is_left_after_an_error_or_a_close() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    answers = iter([Headroom(1 << 40, "plenty"), Headroom(1 << 40, "plenty"), Headroom(0, "nothing left")])
    with pytest.raises(OutOfMemoryError, match="nothing left"):
        CpuDevice(lambda: next(answers)).create_slab(_CHUNK + 1)
    CpuDevice().create_slab(ODD).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_b193_what_cannot_be_had_is_refused_with_both_numbers_before_it_is_touched() -> None:
    available = 100 << 20
    device = CpuDevice(lambda: Headroom(available, "the limit on control group /box"))
    with pytest.raises(OutOfMemoryError) as caught:
        device.create_slab(512 << 20)
    for word in (str(512 << 20), str(available), "control group /box", "Lower the budget"):
        assert word in str(caught.value)
    # What is there but for the reserve can be had.
    device.create_slab(1 << 20).close()
    with pytest.raises(OutOfMemoryError):
        device.create_slab(available - _RESERVE + 1)


def test_b193_more_than_the_machine_has_is_refused_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(OutOfMemoryError, match="can't be had"):
        CpuDevice().create_slab(1 << 50)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("nbytes", [0, -1])
def test_b161_no_size_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match="expected at least 1"):
        CpuDevice().create_slab(nbytes)


def fake_system(root: Path, meminfo_kb: int, cgroup: str, files: dict[str, str]) -> Headroom:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {meminfo_kb} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_headroom(proc, groups)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("cgroup", "files", "expected", "limit"),
    [
        pytest.param("", {}, 500 * MIB, "MemAvailable", id="no control groups"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/memory.max": f"{300 * MIB}\n", "a/b/memory.current": f"{100 * MIB}\n"},
            200 * MIB,
            "/a/b",
            id="version 2",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "5\n",
                "a/memory.max": f"{64 * MIB}",
                "a/memory.current": "0",
            },
            64 * MIB,
            "control group",
            id="the limit is further up",
        ),
        pytest.param(
            "0::/\n",
            {
                "memory.max": f"{100 * MIB}",
                "memory.current": f"{100 * MIB}",
                "memory.stat": f"anon 3\ninactive_file {40 * MIB}\n",
            },
            40 * MIB,
            "control group",
            id="page cache gives way",
        ),
        pytest.param(
            "4:memory:/box\n9:cpu:/box\n0::/\n",
            {
                "memory/box/memory.limit_in_bytes": f"{80 * MIB}",
                "memory/box/memory.usage_in_bytes": f"{10 * MIB}",
                "memory/memory.limit_in_bytes": str(1 << 62),
                "memory/memory.usage_in_bytes": "0",
            },
            70 * MIB,
            "/box",
            id="version 1",
        ),
        pytest.param(
            "0::/elsewhere\n",
            {"memory.max": f"{9 * MIB}", "memory.current": f"{10 * MIB}"},
            0,
            "control group",
            id="a path of the host, used up",
        ),
    ],
)
def test_b193_headroom_is_the_least_of_machine_and_control_groups(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int, limit: str
) -> None:
    headroom = fake_system(tmp_path, 500 << 10, cgroup, files)
    assert headroom.nbytes == expected
    assert limit in headroom.limit


def test_the_headroom_of_this_machine_is_a_number() -> None:
    assert memory_headroom().nbytes > 0


def test_a_store_on_real_memory() -> None:
    device = CpuDevice()
    store = Store(StoreConfig(budget_bytes=8 << 20), create_ledger=device.create_slab, clock=time.monotonic)
    session_id = bytes(15) + b"\x01"
    store.open_session(
        session_id=session_id,
        instance_id=bytes(15) + b"\x02",
        tenant="t",
        name="w",
        transport="bytes",
        transport_reason="",
        watched=True,
        client_version="1",
    )
    namespace_id = store.register_model(session_id, model_spec(64 << 10)).namespace_id
    request = store.prepare_slab(session_id, namespace_id)
    assert request is not None
    store.add_slab(request, device.create_slab(request.nbytes))
    assert len(store.reserve(session_id, namespace_id, b"".join(digest_chain(3)), 2).slots) == 5
    assert store.check_integrity() == []
