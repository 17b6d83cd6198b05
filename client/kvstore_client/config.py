"""Settings of the client: defaults, environment, values given in code, in rising order of precedence."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvstore_client.errors import SettingError

ENV_PREFIX = "KVSTORE_CLIENT_"
VERIFY_MODES = ("first", "always", "off")
_OPTIONAL_NUMBERS = ("local_budget",)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Deadlines and bounds. Seconds and bytes throughout; every field can be set as KVSTORE_CLIENT_<FIELD>.

    Raises SettingError, naming the field, on a value out of range.
    """

    connect_timeout_s: float = 5.0
    """For one attempt to attach: hello, probe, welcome."""
    lookup_timeout_s: float = 0.5
    """For LookupAndLease, beyond the time it was asked to wait for a writer."""
    reserve_timeout_s: float = 0.5
    """For Reserve, and for mapping a slab."""
    control_timeout_s: float = 5.0
    """For everything else that carries no payload."""
    payload_bytes_per_s: float = 32 * 2**20
    """Slowest acceptable rate of the `bytes` transport: what a transfer's deadline is made from."""
    retry_interval_s: float = 0.2
    """Pause between attempts to attach."""
    breaker_failures: int = 3
    """Consecutive failed calls after which the service is left alone; one that somebody waits for until its deadline is
    enough."""
    breaker_cooldown_s: float = 1.0
    """How long it is left alone before one call probes it."""
    verify: str = "first"
    """Checksums of leased blocks: "first" time this process sees a block, "always", "off"."""
    queue_limit: int = 256
    """Commits that may wait for the background thread; more are dropped."""
    local_budget: int | None = None
    """Bytes of worker-local slots on each device that computes; None = half of what is free there when the first model
    is attached."""
    local_slab_bytes: int = 32 * 2**20
    """Worker-local slots are allocated this many bytes at a time."""
    notice_interval_s: float = 10.0
    """At most one log line per kind of event in this time."""
    token: str = ""
    """Credential for a TCP address."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s", "lookup_timeout_s", "reserve_timeout_s", "control_timeout_s", "retry_interval_s",
            "breaker_cooldown_s", "payload_bytes_per_s", "notice_interval_s",
        ):  # fmt: skip
            value = getattr(self, name)
            _check_number(name, value, int, float)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(f"{name}={value}: expected a positive number")
        for name in ("breaker_failures", "queue_limit", "local_slab_bytes"):
            _check_number(name, getattr(self, name), int)
            if getattr(self, name) < 1:
                raise SettingError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.local_budget is not None:
            _check_number("local_budget", self.local_budget, int)
            if self.local_budget < 0:
                raise SettingError(f"local_budget={self.local_budget}: expected 0 or more bytes")
        if self.verify not in VERIFY_MODES:
            raise SettingError(f"verify={self.verify!r}: expected one of {', '.join(VERIFY_MODES)}")

    def with_local_budget(self, nbytes: int) -> ClientConfig:
        """A copy with another local budget."""
        return replace(self, local_budget=nbytes)

    def with_environment(self, environ: Mapping[str, str] | None = None) -> ClientConfig:
        """A copy with KVSTORE_CLIENT_* filled in wherever the code left the default.

        Raises SettingError naming the variable.
        """
        environ = os.environ if environ is None else environ
        known = {ENV_PREFIX + f.name.upper(): f for f in fields(self)}
        given: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            field = known.get(variable)
            if field is None:
                raise SettingError(f"{variable} is no setting; expected one of {', '.join(sorted(known))}")
            value = _parse(variable, field.name, text, field.default)
            try:
                replace(self, **{field.name: value})
            except SettingError as error:
                raise SettingError(f"{variable}: {error}") from None
            if getattr(self, field.name) == field.default:
                given[field.name] = value
        return replace(self, **given)


def _check_number(name: str, value: object, *kinds: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        expected = "a whole number, such as 2**30 for a GiB" if kinds == (int,) else "a number"
        raise SettingError(f"{name}={value!r} is of type {type(value).__name__}: expected {expected}")


def _parse(variable: str, name: str, text: str, default: object) -> Any:
    kind: type[Any] = int if name in _OPTIONAL_NUMBERS else type(default)
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise SettingError(f"{variable}={text!r}: expected {expected}") from None
