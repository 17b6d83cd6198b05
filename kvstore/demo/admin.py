"""The demo's view into the service: its admin API."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import grpc
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

from kvstore.demo.errors import DemoError

_DEADLINE_S = 10.0
_Reply = TypeVar("_Reply")


class Admin:
    """A connection to a service's admin socket. Every call has a deadline."""

    def __init__(self, address: Path) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{address}.admin", options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def answers(self, timeout: float) -> bool:
        """Whether the service answers within `timeout` seconds."""
        try:
            self._stub.GetStats(admin_pb2.GetStatsRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
        return True

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Counters of the whole service."""
        return self._call(lambda: self._stub.GetStats(admin_pb2.GetStatsRequest(), timeout=_DEADLINE_S))

    def namespaces(self) -> list[admin_pb2.NamespaceStats]:
        """All namespaces."""
        request = admin_pb2.ListNamespacesRequest()
        return list(self._call(lambda: self._stub.ListNamespaces(request, timeout=_DEADLINE_S)).namespaces)

    def namespace(self, model: str, codec: str) -> admin_pb2.NamespaceStats:
        """The namespace of a model (the name its workers gave) and codec. DemoError when there isn't exactly one."""
        found = [space for space in self.namespaces() if space.model_name == model and space.codec == codec]
        if len(found) != 1:
            raise DemoError(f"the service has {len(found)} namespaces for {model} with {codec}, expected 1")
        return found[0]

    def sessions(self) -> list[admin_pb2.SessionStats]:
        """All living sessions."""
        request = admin_pb2.ListSessionsRequest()
        return list(self._call(lambda: self._stub.ListSessions(request, timeout=_DEADLINE_S)).sessions)

    def evict(self, namespace_id: int) -> None:
        """Takes all blocks of a namespace out of the cache."""
        request = admin_pb2.EvictRequest(namespace_id=namespace_id, include_pinned=True)
        self._call(lambda: self._stub.Evict(request, timeout=_DEADLINE_S))

    def problems(self) -> list[str]:
        """Broken invariants and damaged blocks, in words. Reads every committed block."""
        request = admin_pb2.CheckIntegrityRequest(payloads=True)
        reply = self._call(lambda: self._stub.CheckIntegrity(request, timeout=60.0))
        damaged = [f"{reply.damaged} damaged blocks"] if reply.damaged else []
        return [*reply.problems, *damaged]

    def wait_until(self, condition: Callable[[], bool], timeout: float, what: str, pause: float = 0.01) -> float:
        """Waits for a condition and returns how many seconds it took. DemoError after `timeout` seconds."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > timeout:
                raise DemoError(f"{what}: not within {timeout:.0f} s")
            time.sleep(pause)
        return time.monotonic() - start

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _call(call: Callable[[], _Reply]) -> _Reply:
        try:
            return call()
        except grpc.RpcError as error:
            detail = error.details() if isinstance(error, grpc.Call) else error
            raise DemoError(f"the service did not answer an admin call: {detail}") from error
