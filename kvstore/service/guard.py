"""The one place where exceptions become gRPC status codes."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import DeadlinePassedError, InvalidRequestError, KvstoreError
from kvstore.log import LimitedLog

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and text for an error; an unexpected one gets an id, under which it is logged."""
    if isinstance(error, KvstoreError) and error.code != "INTERNAL":
        return grpc.StatusCode[error.code], str(error)
    error_id = secrets.token_hex(4)
    kind = f"{type(error).__name__} in a call, error id {error_id}: {error}"
    _log.log(logging.ERROR, type(error).__name__, kind, exc_info=error)
    return grpc.StatusCode.INTERNAL, (
        f"the service failed in this call (error id {error_id}). Expected no such error: look for the id in the "
        "service's log and report it"
    )


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a request whose bytes are no message of its type."""

    reason: str


def tolerant(handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The handlers, with bytes that don't parse arriving as `Malformed` instead of failing inside gRPC as UNKNOWN."""

    def tolerant_one(handler: Any) -> Any:
        parse = handler.request_deserializer

        def deserialize(data: bytes) -> object:
            try:
                return parse(data)
            except DecodeError as error:
                return Malformed(str(error))

        return handler._replace(request_deserializer=deserialize)

    return {name: tolerant_one(handler) for name, handler in handlers.items()}


def parsed(request: T) -> T:
    """The request itself. InvalidRequestError when it did not parse."""
    if isinstance(request, Malformed):
        raise InvalidRequestError(
            f"the request's bytes are no message of its type ({request.reason}). Expected protobuf as in kvstore/v1"
        )
    return request


def _check_deadline(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Nobody would hear what a late call leased or reserved."""
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
        raise DeadlinePassedError("the deadline passed before the call began. Expected it to be in the future")


def _code_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """What a handler aborted its call with."""
    code: Any = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "ABORTED"


def guarded(method: Method) -> Method:
    """Wraps an RPC handler: errors become status codes, a late call is not begun, and how long it took is counted."""

    @functools.wraps(method)
    async def call(self: Any, request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        began, code = time.perf_counter(), "CANCELLED"
        try:
            _check_deadline(context)
            response = await method(self, parsed(request), context)
            code = "OK"
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        # The boundary of the process: whatever a handler raises, the server goes on and the client hears of it.
        except Exception as error:  # noqa: BLE001
            status, text = status_of(error)
            code = status.name
            await context.abort(status, text)
        else:
            return response
        finally:
            self._core.calls.observe(method.__name__, code, time.perf_counter() - began)

    return call  # type: ignore[return-value]
