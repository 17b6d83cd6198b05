"""Sessions come and go."""

from __future__ import annotations

from kvstore.errors import AccessDeniedError, InvalidRequestError, LimitReachedError
from kvstore.store.events import DowngradeRequested, Granted, SessionEnded, UnmapRequested, WriterChanged
from kvstore.store.removal import Removal
from kvstore.store.sessions import TRANSPORTS, Session
from kvstore.store.slots import SlabState
from kvstore.store.state import StoreState
from kvstore.store.types import INSTANCE_BYTES, SESSION_BYTES

_MAX_NAME = 256
_MAX_REASON = 4096


class SessionTable:
    """Living sessions by id and by instance. Invariant: one living session an instance."""

    def __init__(self, state: StoreState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self._instances: dict[bytes, Session] = {}

    def open(
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
    ) -> str:
        """See Store.open_session."""
        for what, value, length in (
            ("session_id", session_id, SESSION_BYTES),
            ("instance_id", instance_id, INSTANCE_BYTES),
        ):
            if len(value) != length:
                raise InvalidRequestError(f"{what} of {len(value)} bytes: expected {length}")
        if transport not in TRANSPORTS:
            raise InvalidRequestError(f"transport {transport!r}: expected one of {', '.join(TRANSPORTS)}")
        if max(len(name), len(client_version)) > _MAX_NAME or len(transport_reason) > _MAX_REASON:
            raise InvalidRequestError(
                f"name of {len(name)}, client_version of {len(client_version)}, transport_reason of "
                f"{len(transport_reason)} characters: expected at most {_MAX_NAME}, {_MAX_NAME} and {_MAX_REASON}"
            )
        if session_id in self._state.sessions:
            raise InvalidRequestError(f"session {session_id.hex()} is open already: expected a fresh random id")
        session = Session(
            session_id=session_id,
            instance_id=instance_id,
            tenant=tenant,
            name=name or f"worker-{instance_id[:4].hex()}",
            transport=transport,
            transport_reason=transport_reason,
            watched=watched,
            client_version=client_version,
            opened=self._state.clock(),
        )
        former = self._instances.get(instance_id)
        if former is not None:
            return self._supersede(former, session)
        if len(self._state.sessions) >= self._state.config.max_sessions:
            raise LimitReachedError(
                f"{len(self._state.sessions)} sessions are open: at most {self._state.config.max_sessions} are "
                "allowed. End workers, or raise --max-sessions"
            )
        self._state.sessions[session_id] = session
        self._instances[instance_id] = session
        return session.name

    def close(self, session_id: bytes, reason: str, *, process_dead: bool) -> None:
        """Ends a session; without a dead process every slab it mapped drains. Idempotent."""
        session = self._state.sessions.pop(session_id, None)
        if session is None:
            return
        session.alive = False
        del self._instances[session.instance_id]
        for namespace in session.namespaces.values():
            namespace.sessions.discard(session)
            namespace.last_used = self._state.clock()
            if not namespace.sessions:
                namespace.claimed = 0
        self._removal.forget_session(session, () if process_dead else tuple(session.mapped))
        self._state.events.append(SessionEnded(session_id, reason))

    def stream_ended(self, session_id: bytes) -> bool:
        """See Store.stream_ended."""
        session = self._state.sessions.get(session_id)
        if session is not None and session.holds_nothing:
            self.close(session_id, "stream ended, nothing was held", process_dead=True)
            return True
        return session is None

    def _supersede(self, session: Session, successor: Session) -> str:
        """The same instance connects again: it keeps all it holds, under the new id."""
        if successor.tenant != session.tenant:
            raise AccessDeniedError(
                f"instance {session.instance_id.hex()} belongs to another tenant: expected a random id of your own"
            )
        events = self._state.events
        events.append(SessionEnded(session.session_id, "superseded by a new connection of the same instance"))
        del self._state.sessions[session.session_id]
        session.session_id = successor.session_id
        session.name = successor.name
        session.transport = successor.transport
        session.transport_reason = successor.transport_reason
        session.watched = successor.watched
        session.client_version = successor.client_version
        self._state.sessions[session.session_id] = session
        events.extend(Granted(session.session_id, namespace_id) for namespace_id in session.namespaces)
        for slab in self._state.slabs.values():
            if slab.writer is session:
                events.append(WriterChanged(slab.slab_id, session.session_id))
                if slab.promised is not None:
                    events.append(DowngradeRequested(session.session_id, (slab.slab_id,)))
            if slab.state is SlabState.DRAINING and slab.slab_id in session.mapped:
                events.append(UnmapRequested(session.session_id, (slab.slab_id,)))
        return session.name
