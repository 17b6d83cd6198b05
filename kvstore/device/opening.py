"""From the configuration's name of a device to the device."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.config import ServiceConfig
from kvstore.device.base import CUDA_LEGACY, CUDA_VMM, Device
from kvstore.device.cpu import CpuDevice
from kvstore.device.gpu import GpuDevice, GpuDriver, choose_gpu


def _cuda_driver() -> GpuDriver:
    # Only here, so that a service on the CPU runs without the driver's packages.
    from kvstore.device.cuda import CudaDriver

    return CudaDriver()


def open_device(config: ServiceConfig, load_driver: Callable[[], GpuDriver] = _cuda_driver) -> Device:
    """The device of a configuration, checked against its budget. ConfigurationError names what is wrong."""
    if config.device == "cpu":
        return CpuDevice()
    driver = load_driver()
    kind = CUDA_LEGACY if config.slab_kind == "legacy" else CUDA_VMM
    device = GpuDevice(driver, choose_gpu(driver, config.device), kind)
    device.check_budget(config.budget_bytes)
    return device
