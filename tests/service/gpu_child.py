"""Another process on the GPU: does what the JSON lines on its stdin say, and answers one line each. No test itself."""

import json
import sys
from typing import Any

from cuda.bindings import driver


def call(name: str, *arguments: Any) -> Any:
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def map_fd(fd: int, nbytes: int, writable: bool) -> int:
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = call("cuMemImportFromShareableHandle", fd, kind)
    address = call("cuMemAddressReserve", nbytes, 0, 0, 0)
    call("cuMemMap", address, nbytes, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    flags = driver.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    call("cuMemSetAccess", address, nbytes, [access], 1)
    return int(address)


def open_handle(handle: str) -> int:
    named = driver.CUipcMemHandle()
    named.reserved = bytes.fromhex(handle)
    return int(call("cuIpcOpenMemHandle", named, int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))


def close_handle(address: int) -> None:
    call("cuIpcCloseMemHandle", address)


def read(address: int, nbytes: int) -> str:
    data = bytearray(nbytes)
    call("cuMemcpyDtoH", data, address, nbytes)
    return data.hex()


def write(address: int, data: str) -> None:
    raw = bytes.fromhex(data)
    call("cuMemcpyHtoD", address, raw, len(raw))
    call("cuCtxSynchronize")


def fill_by_kernel(address: int, nbytes: int) -> str:
    """Writes with a kernel of torch; the error's text, or nothing."""
    import torch

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    try:
        torch.as_tensor(Memory(), device="cuda:0").fill_(7)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""


def session(address: str, blocks: int, writable: bool) -> list[int]:
    """Opens a session that reserves slots, and keeps it until the process ends."""
    from pathlib import Path

    from kvstore.testing_client import SLAB, RawClient

    client = RawClient(Path(address))
    kept.append(client)
    namespace = client.register().namespace_id
    reserved = client.reserve(namespace, [], anonymous=blocks)
    addresses = []
    for slab_id in dict.fromkeys(reserved.slab_ids):
        segment, fd = client.descriptors.open_segment(SLAB, slab_id, writable=writable)
        addresses.append(map_fd(fd, segment.bytes, writable))
    return addresses


kept: list[object] = []


def main() -> None:
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0))
    call("cuCtxSetCurrent", context)
    functions = {
        function.__name__: function
        for function in (map_fd, open_handle, close_handle, read, write, fill_by_kernel, session)
    }
    print(json.dumps({"result": "ready"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": functions[request.pop("do")](**request)}
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
