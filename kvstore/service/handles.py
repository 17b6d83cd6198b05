"""The `cuda-ipc` transport: handles by which a process on the same host opens slabs."""

import os

from kvstore_proto.v1 import blocks_pb2

from kvstore.device.base import CUDA_LEGACY, SlabMemory
from kvstore.errors import ConflictError
from kvstore.service.core import Core


def cuda_handle(
    core: Core, memory: SlabMemory, *, slab_id: int, slots: int, slot_bytes: int
) -> blocks_pb2.CudaIpcHandle:
    """All that a client checks before it opens the memory. ConflictError for memory that has no handle."""
    return blocks_pb2.CudaIpcHandle(
        handle=memory.ipc_handle(),
        device_uuid=memory.device_uuid,
        slab_id=slab_id,
        bytes=memory.nbytes,
        slot_bytes=slot_bytes,
        slots=slots,
        boot_id=core.boot_id,
        exporter_pid=os.getpid(),
        allocation_id=memory.allocation_id,
    )


def probe_handle(core: Core) -> blocks_pb2.ProbeHandleResponse:
    """The handle of memory that begins with the nonce. ConflictError where slabs have no handles."""
    if core.probe is None:
        raise ConflictError(
            f"the service's slabs are {core.device.kind}, which has no handles. Expected {CUDA_LEGACY}: use the fd "
            "transport, or start the service with --device cuda --slab-kind legacy"
        )
    handle = cuda_handle(core, core.probe, slab_id=0, slots=1, slot_bytes=core.probe.nbytes)
    return blocks_pb2.ProbeHandleResponse(handle=handle, nonce=core.nonce)
