"""Where a service is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore_client.errors import AddressError

EMBEDDED = "embedded"
# sun_path holds 108 bytes with its final zero; the longest socket beside the address ends in ".admin".
_LONGEST_PATH = 107 - len(".admin")
_FORMS = (
    "expected 'embedded', 'unix:/path/kvstore.sock', '/path/kvstore.sock' or 'host:port' (an IPv6 host in brackets)"
)


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: `path` of a Unix socket, or `target` "host:port", or neither for "embedded"."""

    text: str
    path: Path | None = None
    target: str = ""

    @property
    def grpc_target(self) -> str:
        """What gRPC calls it."""
        return self.target if self.path is None else f"unix:{self.path}"

    @property
    def descriptor_path(self) -> str | None:
        """The descriptor socket beside a Unix address."""
        return None if self.path is None else f"{self.path}.fd"

    def __str__(self) -> str:
        return self.text


def parse_address(text: str) -> Address:
    """Reads an address; nothing is opened. Raises AddressError with the accepted forms."""
    if not isinstance(text, str):
        raise AddressError(f"address {text!r} is of type {type(text).__name__}: {_FORMS}, as a str")
    if text == EMBEDDED:
        return Address(text)
    if text.startswith(("unix:", "/")):
        path = Path(text.removeprefix("unix:"))
        if not path.is_absolute() or "\0" in text:
            raise AddressError(f"address {text!r}: the socket's path must be absolute; {_FORMS}")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise AddressError(
                f"address {text!r}: the path has {len(os.fsencode(path))} bytes, a Unix socket's may have "
                f"{_LONGEST_PATH}; use a shorter folder"
            )
        return Address(text, path=path)
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)):(\d{1,5})", text)
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise AddressError(f"address {text!r}: {_FORMS}")
    return Address(text, target=text)
