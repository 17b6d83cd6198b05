"""Errors of the client.

    KVStoreError
    ├── UsageError                        the caller's mistake  (INVALID_ARGUMENT)
    │   ├── AddressError                  an address that can't be one
    │   ├── SettingError                  a bad environment variable or configuration value
    │   ├── ClosedError                   the store, or the request, is closed
    │   └── ForkedProcessError            a store used in a forked child
    ├── LocalBudgetExceeded               no room for another worker-local block
    └── ServiceError                      the service said no, or nothing
        ├── ServiceUnavailableError       nobody answers, or not in time  (UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED)
        ├── SessionLostError              this session is not known (any more)  (UNAUTHENTICATED)
        ├── AccessDeniedError             credentials or file permissions  (PERMISSION_DENIED)
        ├── ConflictError                 something else is kept  (FAILED_PRECONDITION, ABORTED, ALREADY_EXISTS)
        │   └── ProtocolMismatchError     the service speaks another version of the protocol
        ├── LimitReachedError             a budget or limit is used up  (RESOURCE_EXHAUSTED)
        ├── TransportUnavailableError     the required transport doesn't work here
        ├── CudaError                     the CUDA driver, or a device, is missing or refuses
        ├── BadReplyError                 a reply that can't be right
        ├── NotHeldError                  a chain that is not in the cache  (NOT_FOUND)
        └── ServiceFaultError             an error inside the service  (everything else)

Each text names the value, what was expected and what to do. While `generate()` runs, a `ServiceError` is a miss or a
worker-local slot and never reaches the caller, unless the store was made with `required=True`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


class KVStoreError(Exception):
    """Root of the tree."""


class UsageError(KVStoreError):
    """The caller's mistake."""


class AddressError(UsageError):
    """An address that can't be one."""


class SettingError(UsageError):
    """A bad environment variable or configuration value."""


class ClosedError(UsageError):
    """The store or the request is closed."""


class ForkedProcessError(UsageError):
    """A store is used in a forked child: mappings, threads and the session belong to the parent."""


class LocalBudgetExceeded(KVStoreError):  # noqa: N818 - the name that users and the design know
    """No room for another worker-local block."""


class ServiceError(KVStoreError):
    """The service said no, or nothing."""


class ServiceUnavailableError(ServiceError):
    """Nobody answers, or not in time."""


class SessionLostError(ServiceError):
    """The service doesn't know this session (any more)."""


class AccessDeniedError(ServiceError):
    """Credentials or file permissions don't allow it."""


class ConflictError(ServiceError):
    """What is asked contradicts what the service keeps."""


class ProtocolMismatchError(ConflictError):
    """The service speaks another version of the protocol."""


class LimitReachedError(ServiceError):
    """A budget or limit of the service is used up."""


class TransportUnavailableError(ServiceError):
    """The required transport doesn't work here. `problem`: why not."""

    problem: str = ""


class CudaError(ServiceError):
    """The CUDA driver, or a device, is missing or refuses: memory of the service can't be used in place."""


class BadReplyError(ServiceError):
    """The service sent something that can't be right. Nothing of it was used."""


class NotHeldError(ServiceError):
    """A chain that is not in the cache."""


class ServiceFaultError(ServiceError):
    """An error inside the service."""


# By number, so that the table also serves DescriptorError.code, and importing this module needs no grpc.
_BY_CODE: dict[int, type[KVStoreError]] = {
    1: ServiceUnavailableError,
    3: UsageError,
    4: ServiceUnavailableError,
    5: NotHeldError,
    6: ConflictError,
    7: AccessDeniedError,
    8: LimitReachedError,
    9: ConflictError,
    10: ConflictError,
    14: ServiceUnavailableError,
    16: SessionLostError,
}


def from_code(code: int, message: str) -> KVStoreError:
    """The typed error for a gRPC status code number."""
    return _BY_CODE.get(code, ServiceFaultError)(message)


def from_rpc(error: grpc.RpcError, what: str) -> KVStoreError:
    """The typed error for a failed call; `what` names the call."""
    code = error.code() if hasattr(error, "code") else None
    detail = error.details() if hasattr(error, "details") else None
    if code is None:
        return ServiceFaultError(f"{what}: {error}")
    number, name = code.value
    if number == 4:
        return ServiceUnavailableError(f"{what}: no answer in time; the service may be stopped or overloaded")
    return from_code(int(number), f"{what}: {detail or name}")
