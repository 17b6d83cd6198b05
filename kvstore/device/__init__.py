"""Devices that hold slabs."""

from kvstore.device.base import Device, SlabMemory
from kvstore.device.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "SlabMemory"]
