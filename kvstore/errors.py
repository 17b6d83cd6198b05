"""Every error the service raises on purpose, each with the gRPC status code it becomes.

    KvstoreError                        INTERNAL             a bug of ours; please report it
    ├── InvalidRequestError             INVALID_ARGUMENT     the caller sent a value that can't be right
    ├── UnknownSessionError             UNAUTHENTICATED      no such session: open one
    ├── AccessDeniedError               PERMISSION_DENIED    the session may not do this
    ├── NotHeldError                    NOT_FOUND            namespace, chain, slab or lease is not there
    ├── ConflictError                   FAILED_PRECONDITION  right values, wrong moment or wrong partner
    │   ├── LayoutConflictError         FAILED_PRECONDITION  same model, another block layout
    │   ├── ProtocolMismatchError       FAILED_PRECONDITION  client and service speak different versions
    │   ├── SlotNotOwnedError           FAILED_PRECONDITION  the slot is not the caller's (any more)
    │   └── BudgetTooSmallError         FAILED_PRECONDITION  the budget can't hold one slab of the model
    ├── LimitReachedError               RESOURCE_EXHAUSTED   a configured limit is used up
    │   └── OutOfMemoryError            RESOURCE_EXHAUSTED   the device can't give the memory
    ├── ServiceUnavailableError         UNAVAILABLE          starting, stopping, or a part is gone: try again
    │   └── DeviceFailedError           UNAVAILABLE          the driver of the device reports an error
    ├── DeadlinePassedError             DEADLINE_EXCEEDED    did not finish in time
    └── IllegalTransitionError          INTERNAL             a slot or slab was asked to do what its state forbids

The text of each names the value, what was expected and what to do. `code` is the *name* of the gRPC status, so that
this module and the store need no grpc; the server has one interceptor that translates.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDeniedError",
    "BudgetTooSmallError",
    "ConflictError",
    "DeadlinePassedError",
    "DeviceFailedError",
    "IllegalTransitionError",
    "InvalidRequestError",
    "KvstoreError",
    "LayoutConflictError",
    "LimitReachedError",
    "NotHeldError",
    "OutOfMemoryError",
    "ProtocolMismatchError",
    "ServiceUnavailableError",
    "SlotNotOwnedError",
    "UnknownSessionError",
]


class KvstoreError(Exception):
    """Root of the tree. `code` names the gRPC status that the error becomes."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequestError(KvstoreError):
    """The caller sent a value that can't be right."""

    code = "INVALID_ARGUMENT"


class UnknownSessionError(KvstoreError):
    """No living session has this id."""

    code = "UNAUTHENTICATED"


class AccessDeniedError(KvstoreError):
    """The session is known but may not do this."""

    code = "PERMISSION_DENIED"


class NotHeldError(KvstoreError):
    """The named namespace, chain, slab or lease is not there (or not for this session)."""

    code = "NOT_FOUND"


class ConflictError(KvstoreError):
    """The request is well formed but does not fit the state of the service."""

    code = "FAILED_PRECONDITION"


class LayoutConflictError(ConflictError):
    """Same model, codec plan and shard as a namespace that is there, but another layout."""


class ProtocolMismatchError(ConflictError):
    """Client and service speak different major versions of the protocol."""


class SlotNotOwnedError(ConflictError):
    """The slot is not private to the caller, or its generation has passed."""


class BudgetTooSmallError(ConflictError):
    """The byte budget can't hold a single slab of this model."""


class LimitReachedError(KvstoreError):
    """A configured limit (sessions, leases, digests, namespaces, plan bytes) is used up."""

    code = "RESOURCE_EXHAUSTED"


class OutOfMemoryError(LimitReachedError):
    """The device can't give the memory that the budget would allow."""


class ServiceUnavailableError(KvstoreError):
    """The service starts, stops, or has lost a part; a later call may succeed."""

    code = "UNAVAILABLE"


class DeviceFailedError(ServiceUnavailableError):
    """The driver of the device that holds the blocks reports an error; the text has its name."""


class DeadlinePassedError(KvstoreError):
    """Something did not finish in the time it was given."""

    code = "DEADLINE_EXCEEDED"


class IllegalTransitionError(KvstoreError):
    """A slot or slab was asked to do what its state forbids: a bug of the service.

    Attributes name the `event`, the `state` it met and the `subject` ("slot 3 of slab 7").
    """

    def __init__(self, event: str, state: str, subject: str) -> None:
        super().__init__(f"{subject} is {state}: {event} is not allowed there")
        self.event = event
        self.state = state
        self.subject = subject
