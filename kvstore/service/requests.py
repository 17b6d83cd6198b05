"""Checks of what clients send, before anything is done with it."""

from collections.abc import Sequence
from typing import Any

import grpc

from kvstore.errors import InvalidRequestError, UnknownSessionError

DIGEST_BYTES = 32
MAX_WAIT_MS = 60_000
MAX_BLOCKS = 16_384
MAX_NAME = 200
# A codec for each layer: "int8:2,int4:28,int8:2".
MAX_CODEC = 4096
MAX_TEXT = 1_000


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str | None:
    """The last value of a metadata key; None when the call has none."""
    found = None
    for name, value in context.invocation_metadata() or ():
        if name == key:
            found = value
    return found if isinstance(found, str) or found is None else None


def session_id_of(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """The session id that the call shows."""
    text = metadata_value(context, "kvstore-session")
    if text is None:
        raise UnknownSessionError("no kvstore-session metadata. Expected the session id of Welcome as 32 hex digits")
    try:
        session_id = bytes.fromhex(text)
    except ValueError:
        session_id = b""
    if len(session_id) != 16:
        raise InvalidRequestError(f"kvstore-session {text[:64]!r}. Expected the session id of Welcome as 32 hex digits")
    return session_id


def check_length(field: str, value: bytes, expected: int) -> None:
    """A bytes field of fixed length."""
    if len(value) != expected:
        raise InvalidRequestError(f"{field} has {len(value)} bytes. Expected {expected}")


def check_digests(field: str, value: bytes) -> int:
    """A field of whole digests; returns how many."""
    if len(value) % DIGEST_BYTES:
        raise InvalidRequestError(
            f"{field} has {len(value)} bytes. Expected a multiple of {DIGEST_BYTES}, the length of one digest"
        )
    return check_count(field, len(value) // DIGEST_BYTES)


def check_count(field: str, count: int) -> int:
    """A number of blocks in one call."""
    if count > MAX_BLOCKS:
        raise InvalidRequestError(f"{field} names {count} blocks. Expected at most {MAX_BLOCKS} in one call: split it")
    return count


def check_parallel(**fields: Sequence[Any]) -> int:
    """Fields that describe one block an index; returns how many blocks."""
    lengths = {name: len(values) for name, values in fields.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InvalidRequestError(f"parallel fields of different lengths ({said}). Expected one entry a block in each")
    return check_count("the call", next(iter(lengths.values())))


def check_text(field: str, value: str, limit: int) -> None:
    """A text for people."""
    if len(value) > limit:
        raise InvalidRequestError(f"{field} has {len(value)} characters. Expected at most {limit}")
    if any(not character.isprintable() for character in value):
        raise InvalidRequestError(f"{field} {value[:40]!r} has control characters. Expected printable text on one line")


def check_range(field: str, value: int, low: int, high: int) -> None:
    """A number with limits, both included."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{field} is {value}. Expected a value from {low} to {high}")
