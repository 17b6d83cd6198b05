"""Client of the KV-cache service: connect(), attach a model, generate as before.

Imports neither torch nor transformers; those come with the first model.
"""

from kvstore_client.config import ClientConfig
from kvstore_client.errors import (
    AccessDeniedError,
    AddressError,
    BadReplyError,
    ClosedError,
    ConflictError,
    CudaError,
    ForkedProcessError,
    KVStoreError,
    LimitReachedError,
    LocalBudgetExceeded,
    NotHeldError,
    ProtocolMismatchError,
    ServiceError,
    ServiceFaultError,
    ServiceUnavailableError,
    SessionLostError,
    SettingError,
    TransportUnavailableError,
    UsageError,
)
from kvstore_client.store import Store, connect

__all__ = [
    "AccessDeniedError",
    "AddressError",
    "BadReplyError",
    "ClientConfig",
    "ClosedError",
    "ConflictError",
    "CudaError",
    "ForkedProcessError",
    "KVStoreError",
    "LimitReachedError",
    "LocalBudgetExceeded",
    "NotHeldError",
    "ProtocolMismatchError",
    "ServiceError",
    "ServiceFaultError",
    "ServiceUnavailableError",
    "SessionLostError",
    "SettingError",
    "Store",
    "TransportUnavailableError",
    "UsageError",
    "connect",
]
