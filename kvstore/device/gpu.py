"""Slabs in GPU memory, over a driver: the real one is in `cuda`, a fake one in kvstore.testing_gpu."""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvstore_kernels import direct

from kvstore.config import ConfigurationError, shorten
from kvstore.device.base import ALLOCATION_ID_BYTES, CUDA_LEGACY, Device, Pace, SlabMemory, let_go
from kvstore.errors import DeviceFailedError, InvalidRequestError, OutOfMemoryError

# Smaller allocations may share pages with others, and an exported page is exported whole.
GRANULE = 2 << 20
UUID_PREFIX = "GPU-"
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class GpuDriverError(Exception):
    """A call of the driver failed. `call` and `status` are its names for what was tried and what happened."""

    def __init__(self, call: str, status: str, *, out_of_memory: bool) -> None:
        super().__init__(f"{call}: {status}")
        self.call = call
        self.status = status
        self.out_of_memory = out_of_memory


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One device that this process sees. `uuid` has 16 bytes."""

    ordinal: int
    uuid: bytes
    name: str

    @property
    def text(self) -> str:
        """Its UUID as nvidia-smi prints it."""
        digits = self.uuid.hex()
        return UUID_PREFIX + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class GpuDriver(ABC):
    """What slabs need of a driver. Thread-safe; every call but `devices` and `open` raises GpuDriverError."""

    @abstractmethod
    def devices(self) -> list[GpuInfo]:
        """All devices that this process sees, in the order of their ordinals."""

    @abstractmethod
    def open(self, ordinal: int) -> None:
        """Makes all other calls work on this device."""

    @abstractmethod
    def use_runtime(self) -> None:
        """Prepares malloc, free and ipc_handle. ConfigurationError when something is not installed."""

    @abstractmethod
    def exports_descriptors(self) -> bool:
        """Whether `create` works on the device."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Bytes free and bytes in all."""

    @abstractmethod
    def create(self, nbytes: int) -> tuple[int, int]:
        """Memory that can be exported, mapped for reading and writing: its address and a descriptor (the caller's)."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None:
        """Ends the mapping of `create`; the memory lives as long as descriptors and importers do."""

    @abstractmethod
    def malloc(self, nbytes: int) -> int:
        """An allocation of its own, by the runtime; its address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Ends such an allocation; no other process may have it open."""

    @abstractmethod
    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes by which another process opens such an allocation."""

    @abstractmethod
    def clear(self, address: int, nbytes: int) -> None:
        """Writes zeros; they are there when it returns."""

    @abstractmethod
    def read(self, address: int, nbytes: int) -> memoryview:
        """A copy in host memory."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Copies from host memory; the bytes are there when it returns."""


class GpuMapping:
    """Device memory that this process may use at `address`; freed with the last reference to this object.

    The references are the slab's own, those of calls under way, and those of a client in this very process.
    """

    def __init__(self, address: int, nbytes: int, free: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        # At the exit of the process the driver frees everything, and may be gone already.
        weakref.finalize(self, _free_quietly, free).atexit = False


class GpuSlabMemory(SlabMemory):
    """One allocation on a GPU, cleared, published in kvstore_kernels.direct while it is open.

    Invariants: `_fd` is valid from the start until close for CUDA_VMM, and -1 always for CUDA_LEGACY, which has
    `_handle` instead; the memory is mapped while anybody refers to the mapping.
    """

    def __init__(self, device: GpuDevice, mapping: GpuMapping, fd: int, handle: bytes) -> None:
        self._mapping: GpuMapping | None = mapping
        self._fd = fd
        self._handle = handle
        self._device = device
        self._nbytes = mapping.nbytes
        self._allocation_id = secrets.token_bytes(ALLOCATION_ID_BYTES)
        # Also when nobody gets to close it: a call that waited for it may be gone.
        self._let_go = weakref.finalize(self, let_go, self._allocation_id, fd)
        # Not at the exit of the interpreter, when a service of this process is still being stopped.
        self._let_go.atexit = False
        direct.publish(self._allocation_id, mapping.address, mapping.nbytes, mapping)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation, a multiple of GRANULE."""
        return self._nbytes

    @property
    def kind(self) -> str:
        """That of its device."""
        return self._device.kind

    @property
    def device_uuid(self) -> bytes:
        """That of its device."""
        return self._device.uuid

    @property
    def allocation_id(self) -> bytes:
        """Drawn at random."""
        return self._allocation_id

    @property
    def fd(self) -> int | None:
        """Descriptor of CUDA_VMM memory; whoever imports it chooses its own access flags."""
        self._open_mapping()
        return None if self._handle else self._fd

    def read(self, offset: int, nbytes: int) -> memoryview:
        """A copy of bytes of the memory."""
        self.check_range(offset, nbytes)
        mapping = self._open_mapping()
        return self._device.driven("read", lambda driver: driver.read(mapping.address + offset, nbytes))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies bytes to the memory."""
        self.check_range(offset, len(data))
        mapping = self._open_mapping()
        self._device.driven("written", lambda driver: driver.write(mapping.address + offset, bytes(data)))

    def ipc_handle(self) -> bytes:
        """See the base class."""
        return self._handle or super().ipc_handle()

    def discard(self) -> None:
        """Does nothing: GPU memory goes when the last importer closes it."""

    def close(self) -> None:
        """Drops the descriptor, and the mapping once no call and no client of this process uses it."""
        if self._mapping is None:
            return
        self._let_go()
        self._fd = -1
        self._mapping = None

    def _open_mapping(self) -> GpuMapping:
        mapping = self._mapping
        if mapping is None:
            raise ValueError("the slab is closed: its bytes can't be used any more")
        return mapping


class GpuDevice(Device):
    """One GPU. `kind` says how its slabs travel: CUDA_VMM by descriptor, CUDA_LEGACY by IPC handle."""

    def __init__(self, driver: GpuDriver, info: GpuInfo, kind: str) -> None:
        """Takes the device's primary context. ConfigurationError when the device can't make slabs of that kind."""
        self._driver = driver
        self._info = info
        self._kind = kind
        try:
            driver.open(info.ordinal)
            if kind == CUDA_LEGACY:
                driver.use_runtime()
            elif not driver.exports_descriptors():
                raise ConfigurationError(
                    f"{self.name} ({info.name}) can't export memory as descriptors. Expected it to for --slab-kind "
                    "vmm, the default: use --slab-kind legacy"
                )
        except GpuDriverError as error:
            raise ConfigurationError(
                f"{self.name} ({info.name}) can't be used ({error}). Expected a working device: check nvidia-smi, or "
                "choose another --device"
            ) from None

    @property
    def name(self) -> str:
        """Always "cuda:" and the ordinal that this process sees."""
        return f"cuda:{self._info.ordinal}"

    @property
    def kind(self) -> str:
        """CUDA_VMM or CUDA_LEGACY."""
        return self._kind

    @property
    def uuid(self) -> bytes:
        """16 bytes."""
        return self._info.uuid

    def check_budget(self, budget_bytes: int) -> None:
        """Raises ConfigurationError for a budget that is not free on the device now."""
        free, total = self.driven("counted", lambda driver: driver.memory_info())
        if budget_bytes > free:
            raise ConfigurationError(
                f"--budget {budget_bytes}: expected at most the {free} bytes ({free / 2**30:.1f} GiB) that are free of "
                f"the {total} of {self.name} ({self._info.text}): give a smaller --budget, or end other programs there"
            )

    def create_slab(self, nbytes: int, pace: Pace | None = None) -> GpuSlabMemory:  # noqa: ARG002  # takes no time
        """A cleared allocation of its own. Raises OutOfMemoryError, DeviceFailedError, InvalidRequestError."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise InvalidRequestError(f"a slab of {nbytes} bytes was asked for: expected a multiple of {GRANULE}")
        make = self._make_legacy if self._kind == CUDA_LEGACY else self._make_exported
        try:
            return make(nbytes)
        except GpuDriverError as error:
            if error.out_of_memory:
                raise OutOfMemoryError(self._shortage(nbytes, error)) from None
            raise self._failed("given memory", error) from None

    def driven(self, what: str, call: Callable[[GpuDriver], T]) -> T:
        """Calls the driver; `what` could not be done when it raises DeviceFailedError."""
        try:
            return call(self._driver)
        except GpuDriverError as error:
            raise self._failed(what, error) from None

    def _make_exported(self, nbytes: int) -> GpuSlabMemory:
        driver = self._driver
        address, fd = driver.create(nbytes)
        mapping = GpuMapping(address, nbytes, lambda: driver.unmap(address, nbytes))
        try:
            os.set_inheritable(fd, False)
            driver.clear(address, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return GpuSlabMemory(self, mapping, fd, b"")

    def _make_legacy(self, nbytes: int) -> GpuSlabMemory:
        driver = self._driver
        address = driver.malloc(nbytes)
        mapping = GpuMapping(address, nbytes, lambda: driver.free(address))
        driver.clear(address, nbytes)
        return GpuSlabMemory(self, mapping, -1, driver.ipc_handle(address))

    def _shortage(self, nbytes: int, error: GpuDriverError) -> str:
        try:
            free = f"{self._driver.memory_info()[0]} bytes are free there"
        except GpuDriverError as second:
            free = f"how much is free can't be told ({second})"
        return (
            f"a slab of {nbytes} bytes can't be had on {self.name} ({error}): {free}. Expected the budget to be free: "
            f"lower --budget, or end other programs on {self._info.text}"
        )

    def _failed(self, what: str, error: GpuDriverError) -> DeviceFailedError:
        return DeviceFailedError(
            f"memory of {self.name} can't be {what} ({error}). Expected the driver to do it: look for other "
            f"failures on {self._info.text} with nvidia-smi, and restart the service if it goes on"
        )


def choose_gpu(driver: GpuDriver, wanted: str) -> GpuInfo:
    """The device that "cuda", "cuda:N" or "GPU-..." (or an unambiguous beginning of it) names. ConfigurationError."""
    devices = driver.devices()
    if wanted.startswith(UUID_PREFIX):
        found = [info for info in devices if info.text.lower().startswith(wanted.lower())]
    else:
        ordinal = int(wanted.partition(":")[2] or 0)
        found = [info for info in devices if info.ordinal == ordinal]
    if len(found) == 1:
        return found[0]
    seen = ", ".join(f"cuda:{info.ordinal} = {info.text} ({info.name})" for info in devices) or "none"
    raise ConfigurationError(
        f"--device {shorten(wanted)} names {len(found) or 'no'} device{'s' if len(found) != 1 else ''}. Expected one "
        f"that this process sees ({seen}): correct it, or check CUDA_VISIBLE_DEVICES"
    )


def _free_quietly(free: Callable[[], None]) -> None:
    try:
        free()
    except GpuDriverError as error:
        # Nobody can do anything about it here; the memory goes with the process.
        _logger.warning("GPU memory could not be freed: %s", error)
