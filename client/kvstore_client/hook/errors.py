"""Errors of the transformers hook. All are KVStoreErrors; the tree's root lies in kvstore_client.errors.

UsageError
├── UnsupportedVersionError   a transformers version outside the range this hook was tested with
├── UnsupportedModelError     a model whose attention this version can't serve exactly; names the reason
├── UnsupportedInputError     an argument that would make the cached attention wrong
├── AttachError               an argument of attach() is wrong or contradicts an attachment that exists
└── CacheStateError           a cache used in a way its state doesn't allow
SelfCheckError                the attached model's logits differ from the native cache's
"""

from __future__ import annotations

from kvstore_client.errors import KVStoreError, UsageError


class UnsupportedVersionError(UsageError):
    """A transformers version outside the range this hook was tested with."""


class UnsupportedModelError(UsageError):
    """A model whose attention this version can't serve exactly."""


class UnsupportedInputError(UsageError):
    """An argument that would make the cached attention wrong."""


class AttachError(UsageError):
    """An argument of attach() is wrong, or contradicts an attachment that exists."""


class CacheStateError(UsageError):
    """A cache used in a way its state doesn't allow."""


class SelfCheckError(KVStoreError):
    """The attached model's logits differ from those with the native cache."""
