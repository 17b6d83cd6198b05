"""Clients that said hello on the descriptor socket, and the watch on their processes."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.control import ClientHello, ClientLeft
from kvstore.errors import AccessDeniedError, UnknownSessionError


@dataclass(slots=True)
class Client:
    """One hello. `pidfd` is None where the process can't be watched; `session_id` once the token was used."""

    token: str
    instance_id: bytes
    uid: int
    pid: int
    pidfd: int | None
    # Tells processes apart where pids can't: an inode of its own since Linux 6.9, the same for all before.
    process_inode: int = 0
    session_id: bytes | None = None

    @property
    def process(self) -> tuple[int, int, int]:
        """What is the same in two hellos of one process."""
        return self.uid, self.pid, self.process_inode

    @property
    def watched(self) -> bool:
        return self.pidfd is not None


class Clients:
    """Hellos by token.

    Invariants: a token opens one session; a client is here until its process dies, its session ends, or it leaves
    without having opened one; owns the pidfds. `on_death` is called once for a client whose process died.
    """

    def __init__(self, *, on_death: Callable[[Client], None], on_unused: Callable[[str], None]) -> None:
        self._clients: dict[str, Client] = {}
        self._on_death = on_death
        self._on_unused = on_unused

    def hello(self, message: ClientHello, pidfd: int | None) -> None:
        """Takes over `pidfd` and watches it from now on."""
        client = Client(message.token, bytes.fromhex(message.instance_id), message.uid, message.pid, pidfd)
        if pidfd is not None:
            client.process_inode = os.fstat(pidfd).st_ino
        self._clients[client.token] = client
        if pidfd is not None:
            asyncio.get_running_loop().add_reader(pidfd, self._died, client)

    def left(self, message: ClientLeft) -> None:
        """Its descriptor connection is closed: a token that was not used yet never will be."""
        client = self._clients.get(message.token)
        if client is not None and client.session_id is None:
            self.forget(client)
            self._on_unused(client.token)

    def use(self, token: str, instance_id: bytes) -> Client:
        """The client of a token that opens a session now. UnknownSessionError, AccessDeniedError."""
        client = self._clients.get(token)
        if client is None or client.session_id is not None:
            state = "was used before" if client is not None else "is unknown"
            raise UnknownSessionError(
                f"the kvstore-token of this call {state}. Expected the token of a hello whose connection is open: "
                "say hello on the descriptor socket again"
            )
        if client.instance_id != instance_id:
            raise AccessDeniedError(
                f"instance {instance_id.hex()} opens a session with the token of instance {client.instance_id.hex()}. "
                "Expected the instance_id of the hello"
            )
        return client

    def forget(self, client: Client) -> None:
        """Stops watching a client. Idempotent."""
        if self._clients.pop(client.token, None) is not None and client.pidfd is not None:
            asyncio.get_running_loop().remove_reader(client.pidfd)
            os.close(client.pidfd)

    def close(self) -> None:
        for client in list(self._clients.values()):
            self.forget(client)

    def _died(self, client: Client) -> None:
        self.forget(client)
        self._on_death(client)
