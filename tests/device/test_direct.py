"""Memory of this process, found by its id."""

from __future__ import annotations

import ctypes
import gc
import secrets
import subprocess
import sys
import weakref

import pytest
from kvstore_kernels import direct

from kvstore.device import CpuDevice


def test_what_is_published_is_found_until_it_is_withdrawn() -> None:
    class Owner:
        pass

    owner = Owner()
    watch = weakref.ref(owner)
    name = secrets.token_bytes(16)
    direct.publish(name, 4096, 17, owner)
    found = direct.find(name)
    assert found == direct.DirectMemory(4096, 17, owner)
    del owner
    direct.withdraw(name)
    direct.withdraw(name)
    assert direct.find(name) is None
    assert watch() is not None
    del found
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("name", [b"", bytes(15), bytes(17)])
def test_an_id_has_sixteen_bytes(name: bytes) -> None:
    with pytest.raises(ValueError, match="16 random bytes"):
        direct.publish(name, 0, 0, None)
    assert direct.find(name) is None


def test_an_id_is_published_once() -> None:
    name = secrets.token_bytes(16)
    direct.publish(name, 1, 1, None)
    with pytest.raises(ValueError, match="already"):
        direct.publish(name, 2, 2, None)
    direct.withdraw(name)


def test_host_slabs_are_found_where_they_lie_and_stay_while_they_are_used() -> None:
    memory = CpuDevice().create_slab(8192)
    memory.write(5000, b"here")
    found = direct.find(memory.allocation_id)
    assert found is not None
    assert ctypes.string_at(found.address + 5000, 4) == b"here"
    memory.close()
    assert direct.find(memory.allocation_id) is None
    assert ctypes.string_at(found.address + 5000, 4) == b"here"


def test_it_needs_no_torch() -> None:
    code = "import sys; from kvstore_kernels import direct; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
