"""The transformers hook: lets a model's attention run on the store's blocks."""

from kvstore_client.hook.attaching import attach
from kvstore_client.hook.attachment import Attachment
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.errors import (
    AttachError,
    CacheStateError,
    SelfCheckError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from kvstore_client.hook.report import HitReport, RowReport

__all__ = [
    "AttachError",
    "Attachment",
    "CacheStateError",
    "HitReport",
    "KVStoreCache",
    "RowReport",
    "SelfCheckError",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "attach",
]
