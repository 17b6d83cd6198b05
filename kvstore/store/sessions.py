"""Sessions: one worker's living connection and everything it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.store.lease import Lease

if TYPE_CHECKING:
    from kvstore.store.namespace import Namespace

TRANSPORTS = ("fd", "cuda-ipc", "bytes")


class Session:
    """What a worker holds. `session_id` changes when the same instance connects again; everything else stays with it.

    Invariants: `slots` maps (slab id, slot) to the generation at which the session holds it: private, or committed by
    it and not given back yet; `leases` are in the order they were taken; `mapped` are the slabs that its process may
    have mapped. `alive` turns false once and for all.
    """

    __slots__ = (
        "alive",
        "client_version",
        "instance_id",
        "leases",
        "mapped",
        "name",
        "namespaces",
        "opened",
        "session_id",
        "slots",
        "tenant",
        "transport",
        "transport_reason",
        "watched",
    )

    def __init__(
        self,
        *,
        session_id: bytes,
        instance_id: bytes,
        tenant: str,
        name: str,
        transport: str,
        transport_reason: str,
        watched: bool,
        client_version: str,
        opened: float,
    ) -> None:
        self.session_id = session_id
        self.instance_id = instance_id
        self.tenant = tenant
        self.name = name
        self.transport = transport
        self.transport_reason = transport_reason
        self.watched = watched
        self.client_version = client_version
        self.opened = opened
        self.alive = True
        self.namespaces: dict[int, Namespace] = {}
        self.leases: dict[int, Lease] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.mapped: set[int] = set()

    @property
    def maps(self) -> bool:
        """Whether a slab counts as mapped from the first reply that names it.

        Descriptors come from the supervisor, unseen by the store; handles are asked for with `Store.open_slab`.
        """
        return self.transport == "fd"

    @property
    def holds_nothing(self) -> bool:
        """Whether its end would change nothing."""
        return not (self.leases or self.slots or self.mapped)

    def uses(self, slab_id: int) -> bool:
        """Whether it holds a slot of the slab or a lease that names it."""
        return any(held == slab_id for held, _ in self.slots) or any(
            slab_id in lease.slab_ids for lease in self.leases.values()
        )
