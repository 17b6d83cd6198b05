"""Living sessions as the gRPC side sees them: their stream, their client, their grace period."""

import asyncio
from dataclasses import dataclass, field

from kvstore.service.clients import Client


class Outbox:
    """What waits to be said on a session stream.

    Bounded: holds sets of slab ids, not messages; a slab that is asked for twice is said once.
    """

    def __init__(self) -> None:
        self._unmap: dict[int, None] = {}
        self._downgrade: dict[int, None] = {}
        self._goodbye: str | None = None
        self._changed = asyncio.Event()

    def unmap(self, slab_ids: tuple[int, ...]) -> None:
        self._unmap.update(dict.fromkeys(slab_ids))
        self._changed.set()

    def downgrade(self, slab_ids: tuple[int, ...]) -> None:
        self._downgrade.update(dict.fromkeys(slab_ids))
        self._changed.set()

    def goodbye(self, reason: str) -> None:
        """The last thing that is said."""
        self._goodbye = reason
        self._changed.set()

    async def take(self) -> tuple[list[int], list[int], str | None]:
        """Waits for something to say: slabs to unmap, slabs to downgrade, and the reason if it is the end."""
        await self._changed.wait()
        self._changed.clear()
        said = list(self._unmap), list(self._downgrade), self._goodbye
        self._unmap.clear()
        self._downgrade.clear()
        return said


@dataclass(slots=True)
class LiveSession:
    """One session. `client` is None for a worker that is known by its connection only (TCP)."""

    session_id: bytes
    instance_id: bytes
    name: str
    client: Client | None
    outbox: Outbox = field(default_factory=Outbox)
    grace: asyncio.TimerHandle | None = None

    @property
    def token(self) -> str:
        return "" if self.client is None else self.client.token


class SessionTable:
    """Living sessions by id and by instance. An instance has at most one."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, LiveSession] = {}
        self._by_instance: dict[bytes, LiveSession] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: LiveSession) -> None:
        self._by_id[session.session_id] = session
        self._by_instance[session.instance_id] = session

    def get(self, session_id: bytes) -> LiveSession | None:
        return self._by_id.get(session_id)

    def of_instance(self, instance_id: bytes) -> LiveSession | None:
        return self._by_instance.get(instance_id)

    def remove(self, session_id: bytes) -> LiveSession | None:
        """Takes a session out and stops its grace period."""
        session = self._by_id.pop(session_id, None)
        if session is None:
            return None
        if self._by_instance.get(session.instance_id) is session:
            del self._by_instance[session.instance_id]
        if session.grace is not None:
            session.grace.cancel()
        return session

    def all(self) -> list[LiveSession]:
        return list(self._by_id.values())
