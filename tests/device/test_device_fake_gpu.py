"""GPU slabs over a driver that is none: choice of the device, both kinds of slabs, everything that fails."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
from kvstore_kernels import direct

from kvstore.config import ConfigurationError, ServiceConfig
from kvstore.device.base import CUDA_LEGACY, CUDA_VMM
from kvstore.device.gpu import GRANULE, GpuDevice, GpuDriverError, choose_gpu
from kvstore.device.opening import open_device
from kvstore.errors import ConflictError, DeviceFailedError, InvalidRequestError, OutOfMemoryError
from kvstore.testing_gpu import FakeGpuDriver, gpu_infos

KINDS = [CUDA_VMM, CUDA_LEGACY]


def device(driver: FakeGpuDriver, kind: str = CUDA_VMM) -> GpuDevice:
    return GpuDevice(driver, driver.devices()[0], kind)


def config(**fields: object) -> ServiceConfig:
    return ServiceConfig(Path("/nowhere/kv.sock"), **fields)  # type: ignore[arg-type]


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_devices_are_named_by_ordinal_and_by_uuid_as_this_process_sees_them() -> None:
    # CUDA_VISIBLE_DEVICES=2,0: ordinal 0 is card 2.
    driver = FakeGpuDriver(gpu_infos(2, 0))
    card_0 = gpu_infos(0)[0].text
    assert card_0 == "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
    assert choose_gpu(driver, "cuda").name == choose_gpu(driver, "cuda:0").name == "Fake 2"
    assert choose_gpu(driver, "cuda:1").name == "Fake 0"
    for text in (card_0, card_0.upper().replace("GPU-", "GPU-"), card_0[:12]):
        assert choose_gpu(driver, text).ordinal == 1
    chosen = open_device(config(device=card_0, budget_bytes=4 * GRANULE), lambda: driver)
    assert (chosen.name, chosen.uuid, chosen.kind, driver.opened) == ("cuda:1", b"\xa0" * 16, CUDA_VMM, 1)


@pytest.mark.parametrize("wanted", ["cuda:2", "GPU-ffffffff", "GPU-a"])
def test_an_unknown_or_ambiguous_device_names_those_there_are(wanted: str) -> None:
    driver = FakeGpuDriver(gpu_infos(2, 0))
    with pytest.raises(
        ConfigurationError, match=r"cuda:0 = GPU-a2a2.*cuda:1 = GPU-a0a0.*CUDA_VISIBLE_DEVICES"
    ) as caught:
        choose_gpu(driver, wanted)
    assert f"--device {wanted}" in str(caught.value)


def test_a_budget_above_what_is_free_is_refused_at_the_start() -> None:
    driver = FakeGpuDriver(capacity=8 * GRANULE)
    open_device(config(device="cuda", budget_bytes=8 * GRANULE), lambda: driver)
    kept = device(driver).create_slab(GRANULE)
    with pytest.raises(ConfigurationError, match=rf"--budget {8 * GRANULE}.*{7 * GRANULE} bytes.*free.*smaller"):
        open_device(config(device="cuda", budget_bytes=8 * GRANULE), lambda: driver)
    kept.close()


def test_a_device_that_cannot_be_used_is_an_error_of_the_configuration() -> None:
    driver = FakeGpuDriver(exports=False)
    with pytest.raises(ConfigurationError, match="--slab-kind legacy"):
        device(driver)
    assert device(driver, CUDA_LEGACY).kind == CUDA_LEGACY
    driver.fail_next("open", "CUDA_ERROR_DEVICE_UNAVAILABLE")
    with pytest.raises(ConfigurationError, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        device(driver)


def test_missing_packages_and_drivers_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigurationError, match=r"cuda-bindings.*pip install"):
        open_device(config(device="cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_is_cleared_and_can_be_read_and_written(kind: str) -> None:
    driver = FakeGpuDriver()
    memory = device(driver, kind).create_slab(2 * GRANULE)
    assert (memory.nbytes, memory.kind, memory.device_uuid) == (2 * GRANULE, kind, b"\xa0" * 16)
    assert len(memory.allocation_id) == 16
    assert driver.used == 2 * GRANULE
    assert [nbytes for _, nbytes in driver.cleared] == [2 * GRANULE]
    memory.write(GRANULE - 3, b"across")
    assert bytes(memory.read(GRANULE - 4, 8)) == b"\0across\0"
    assert bytes(memory.read(2 * GRANULE, 0)) == b""
    for offset, nbytes in ((-1, 2), (2 * GRANULE, 1), (0, 2 * GRANULE + 1), (0, -1)):
        with pytest.raises(InvalidRequestError, match="within"):
            memory.read(offset, nbytes)
    with pytest.raises(InvalidRequestError, match="within"):
        memory.write(2 * GRANULE - 1, b"xy")
    with pytest.raises(ConflictError, match="CPU"):
        _ = memory.view
    memory.close()
    memory.close()
    assert driver.used == 0
    with pytest.raises(ValueError, match="closed"):
        memory.read(0, 1)


@pytest.mark.parametrize("nbytes", [0, -GRANULE, GRANULE + 512])
def test_slabs_are_whole_granules(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(GRANULE)):
        device(FakeGpuDriver()).create_slab(nbytes)


def test_a_descriptor_leads_to_the_memory_and_outlives_the_slab() -> None:
    memory = device(FakeGpuDriver()).create_slab(GRANULE)
    assert memory.fd is not None
    assert not os.get_inheritable(memory.fd)
    fd = os.dup(memory.fd)
    memory.write(7, b"seven")
    memory.close()
    with mmap.mmap(fd, GRANULE) as importer:
        assert importer[7:12] == b"seven"
    os.close(fd)
    with pytest.raises(ConflictError, match="no IPC handle"):
        memory.ipc_handle()


def test_a_handle_leads_to_the_memory_and_is_stale_once_it_is_freed() -> None:
    driver = FakeGpuDriver()
    memory = device(driver, CUDA_LEGACY).create_slab(GRANULE)
    assert memory.fd is None
    handle = memory.ipc_handle()
    assert len(handle) == 64
    memory.write(0, b"shared")
    assert bytes(driver.open_handle(handle)[:6]) == b"shared"
    memory.close()
    with pytest.raises(GpuDriverError, match="INVALID_HANDLE"):
        driver.open_handle(handle)


@pytest.mark.parametrize(("kind", "call"), [(CUDA_VMM, "create"), (CUDA_LEGACY, "malloc"), (CUDA_VMM, "clear")])
def test_out_of_memory_says_what_was_wanted_and_what_is_free(kind: str, call: str) -> None:
    driver = FakeGpuDriver(capacity=4 * GRANULE)
    driver.fail_next(call)
    with pytest.raises(OutOfMemoryError, match=rf"{GRANULE} bytes.*cuda:0.*{call}.*bytes are free.*--budget"):
        device(driver, kind).create_slab(GRANULE)
    gc.collect()
    assert driver.used == 0
    assert device(driver, kind).create_slab(4 * GRANULE).nbytes == 4 * GRANULE


@pytest.mark.parametrize(("kind", "call"), [(CUDA_VMM, "create"), (CUDA_LEGACY, "ipc_handle"), (CUDA_LEGACY, "clear")])
def test_other_failures_are_errors_of_the_device_and_leave_nothing_behind(kind: str, call: str) -> None:
    driver = FakeGpuDriver()
    before = open_descriptors()
    driver.fail_next(call, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceFailedError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device(driver, kind).create_slab(GRANULE)
    gc.collect()
    assert driver.used == 0
    assert open_descriptors() == before


def test_a_failed_copy_is_an_error_of_the_device() -> None:
    driver = FakeGpuDriver()
    memory = device(driver).create_slab(GRANULE)
    for call, use in (("read", lambda: memory.read(0, 1)), ("write", lambda: memory.write(0, b"x"))):
        driver.fail_next(call, "CUDA_ERROR_ECC_UNCORRECTABLE")
        with pytest.raises(DeviceFailedError, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
            use()
    memory.close()


def test_memory_that_can_not_be_freed_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeGpuDriver()
    memory = device(driver).create_slab(GRANULE)
    driver.fail_next("unmap", "CUDA_ERROR_DEINITIALIZED")
    memory.close()
    assert "CUDA_ERROR_DEINITIALIZED" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_memory_found_in_this_process_stays_until_it_is_let_go(kind: str) -> None:
    driver = FakeGpuDriver()
    memory = device(driver, kind).create_slab(GRANULE)
    memory.write(3, b"direct")
    found = direct.find(memory.allocation_id)
    assert found is not None
    assert found.nbytes == GRANULE
    memory.close()
    assert direct.find(memory.allocation_id) is None
    assert bytes(driver.read(found.address + 3, 6)) == b"direct"
    assert driver.used == GRANULE
    del found
    assert driver.used == 0


def test_a_slab_that_nobody_closes_leaves_nothing_behind() -> None:
    driver = FakeGpuDriver()
    memory = device(driver).create_slab(GRANULE)
    allocation_id, fd = memory.allocation_id, memory.fd
    assert fd is not None
    del memory
    gc.collect()
    assert direct.find(allocation_id) is None
    assert driver.used == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_slab_that_is_closed_while_it_is_read_stays_until_the_end_of_the_copy() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class SlowDriver(FakeGpuDriver):
        def read(self, address: int, nbytes: int) -> memoryview:
            entered.set()
            assert go_on.wait(10)
            return super().read(address, nbytes)

    driver = SlowDriver()
    memory = device(driver).create_slab(GRANULE)
    memory.write(0, b"alive")
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append(bytes(memory.read(0, 5))))
    reader.start()
    assert entered.wait(10)
    memory.close()
    assert driver.used == GRANULE
    go_on.set()
    reader.join(10)
    assert seen == [b"alive"]
    assert driver.used == 0
