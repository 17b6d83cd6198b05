"""What keeps one mapping: how it is made, how its rights change in place, how it ends.

Apart from the memory that tensors look through, so that it can be ended when that is gone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore_client import cuda
from kvstore_client.errors import BadReplyError, CudaError, ServiceUnavailableError
from kvstore_client.memory import buffer_at, map_shared, unmap
from kvstore_client.offers import LEGACY, MEMFD, Offer, ServiceMemory, pid_problem

if TYPE_CHECKING:
    from kvstore_kernels.slab import Slab

log = logging.getLogger("kvstore_client")


class Hold(ABC):
    """One mapping. `address` and `nbytes` never change; release() is called once, by nobody's finalizer if `waits`."""

    asks_to_change: ClassVar[bool] = False
    """Whether fewer rights take another offer of the service (more rights always do: it must agree)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def waits(self) -> bool:
        """Whether release() waits for a device."""
        return True

    @abstractmethod
    def slab(self, offer: Offer, *, writable: bool) -> tuple[Slab, object]:
        """A slab over the mapping, and the object whose end tells that nobody looks through it any more."""

    @abstractmethod
    def change(self, offer: Offer | None, *, writable: bool) -> None:
        """Gives the mapping other rights, in place. Raises CudaError or OSError; then they are as before."""

    @abstractmethod
    def release(self) -> None:
        """Ends it, after the device is done with it. Raises CudaError or OSError."""

    @property
    def pinned(self) -> bool:
        """Whether a CUDA device may read it asynchronously, host memory as it is."""
        return False

    def pin(self, ordinal: int, *, writable: bool) -> None:  # noqa: ARG002 - of host memory only
        """Pins host memory; nothing for other kinds."""
        return


class HostHold(Hold):
    """A memfd."""

    asks_to_change = True

    def __init__(self, offer: Offer, *, writable: bool) -> None:
        super().__init__(map_shared(offer.fd, offer.nbytes, writable=writable), offer.nbytes)
        self._pinned_for: int | None = None
        self._refused = False

    @property
    def waits(self) -> bool:
        """Only if a device may be reading."""
        return self._pinned_for is not None

    @property
    def pinned(self) -> bool:
        """See Hold."""
        return self._pinned_for is not None

    def slab(self, offer: Offer, *, writable: bool) -> tuple[Slab, object]:
        """See Hold."""
        from kvstore_kernels.slab import Slab

        memory = buffer_at(self.address, self.nbytes)
        slab = Slab.from_buffer(memory, offer.slot_bytes, slots=offer.slots)
        slab.writable = writable
        return slab, memory

    def pin(self, ordinal: int, *, writable: bool) -> None:
        """See Hold. A refusal is said, and leaves memory that can be copied to, but not read in place."""
        if self._pinned_for is not None or self._refused:
            return
        try:
            cuda.get().register_host(self.address, self.nbytes, ordinal, writable=writable)
        except CudaError as error:
            self._refused = True
            log.warning(
                "%d bytes of host memory can't be pinned, so no block in them is reused: %s", self.nbytes, error
            )
        else:
            self._pinned_for = ordinal

    def change(self, offer: Offer | None, *, writable: bool) -> None:
        """Maps over the same address, so that no second alias with other rights exists."""
        if offer is None:
            raise BadReplyError("a memfd changes its rights by another descriptor; expected one")
        ordinal = self._unpin()
        map_shared(offer.fd, self.nbytes, writable=writable, address=self.address)
        if ordinal is not None:
            self.pin(ordinal, writable=writable)

    def release(self) -> None:
        """See Hold."""
        self._unpin()
        unmap(self.address, self.nbytes)

    def _unpin(self) -> int | None:
        ordinal, self._pinned_for = self._pinned_for, None
        if ordinal is not None:
            cuda.get().unregister_host(self.address, ordinal)
        return ordinal


class DeviceHold(Hold):
    """Memory of a CUDA device."""

    def __init__(self, address: int, nbytes: int, ordinal: int) -> None:
        super().__init__(address, nbytes)
        self.ordinal = ordinal

    def change(self, offer: Offer | None, *, writable: bool) -> None:  # noqa: ARG002 - nothing to ask anybody for
        """See Hold. There is nothing to enforce it with: Slab.writable alone keeps codecs from writing."""
        return

    def slab(self, offer: Offer, *, writable: bool) -> tuple[Slab, object]:
        """See Hold."""
        from kvstore_kernels.slab import Slab

        memory = cuda.DeviceMemory(self.address, self.nbytes, self.ordinal)
        tensor: Any = cuda.get().tensor(memory)
        return Slab(tensor, offer.slot_bytes, slots=offer.slots, writable=writable), memory


class VmmHold(DeviceHold):
    """Imported virtual memory: rights change in place, and the device enforces them."""

    def __init__(self, offer: Offer, ordinal: int, *, writable: bool) -> None:
        address = cuda.get().map_descriptor(offer.fd, offer.nbytes, ordinal, writable=writable)
        super().__init__(address, offer.nbytes, ordinal)

    def change(self, offer: Offer | None, *, writable: bool) -> None:  # noqa: ARG002 - no new descriptor needed
        """See Hold."""
        cuda.get().set_access(self.address, self.nbytes, self.ordinal, writable=writable)

    def release(self) -> None:
        """See Hold."""
        cuda.get().unmap_descriptor(self.address, self.nbytes, self.ordinal)


class HandleHold(DeviceHold):
    """An opened legacy handle, which is always writable."""

    def __init__(self, offer: Offer, ordinal: int) -> None:
        self._key = (offer.boot_id, offer.slab_id)
        address = cuda.HANDLES.acquire(cuda.get(), *self._key, offer.handle, ordinal)
        super().__init__(address, offer.nbytes, ordinal)

    def release(self) -> None:
        """See Hold."""
        cuda.HANDLES.release(cuda.get(), *self._key, self.ordinal)


class DirectHold(DeviceHold):
    """Memory that this very process made: a service in the worker's process. Nothing is mapped; `owner` keeps it."""

    def __init__(self, address: int, nbytes: int, ordinal: int, owner: object) -> None:
        super().__init__(address, nbytes, ordinal)
        self._owner: object = owner

    def release(self) -> None:
        """See Hold."""
        cuda.get().synchronize(self.ordinal)
        self._owner = None


def take_hold(offer: Offer, home: ServiceMemory, *, writable: bool) -> Hold:
    """Maps what a checked offer names. Raises CudaError, OSError, BadReplyError or ServiceUnavailableError."""
    if offer.kind == MEMFD:
        return HostHold(offer, writable=writable)
    ordinal = home.ordinal
    direct = _find_direct(offer)
    if direct is not None:
        return DirectHold(direct.address, offer.nbytes, ordinal, direct)
    if offer.kind == LEGACY:
        problem = pid_problem(offer)
        if problem:
            raise ServiceUnavailableError(problem)
        return HandleHold(offer, ordinal)
    return VmmHold(offer, ordinal, writable=writable)


def _find_direct(offer: Offer) -> Any:
    """The memory, if this process made it."""
    from kvstore_kernels import direct

    found = direct.find(offer.allocation_id)
    if found is not None and found.nbytes < offer.nbytes:
        raise BadReplyError(f"an allocation of this process has {found.nbytes} bytes, the service says {offer.nbytes}")
    return found
