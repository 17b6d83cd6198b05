"""Configuration of the service: one frozen dataclass, from command line, environment, defaults, in that order."""

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENV_PREFIX = "KVSTORE_"
SOCKET_NAME = "kvstore.sock"
# sun_path holds 108 bytes with the closing zero; the longest name beside the socket is ".admin".
MAX_ADDRESS_BYTES = 107 - len(".admin")
MAX_SESSIONS = 4096
SLAB_KINDS = ("auto", "vmm", "legacy")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?|GPU-[0-9a-fA-F-]{1,36}")
_MOST_DIGITS = 20
_LONGEST_SHOWN = 120
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class StartError(Exception):
    """The service can't start, for a reason that the operator can mend; the text says how."""

    exit_code = 1


class ConfigurationError(StartError):
    """A setting is wrong. The text names the option or variable, the value and what was expected."""

    exit_code = 2


class AddressInUseError(StartError):
    """Another process serves the address, or something that is no socket lies there."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """How to serve.

    Sizes are in bytes, times in seconds. `device` is "cpu", "cuda", "cuda:N" or "GPU-<uuid>"; `slab_kind` says how GPU
    memory travels: "vmm" by descriptor, "legacy" by IPC handle, "auto" = vmm. `listen` is "host:port" or empty for no
    TCP. `metrics` is the same for metrics over HTTP, which `metrics_public` lets leave loopback.
    `namespace_max_bytes` = 0 leaves the whole budget to every namespace. `grace_s` is what calls get to finish at
    the stop, `session_grace_s` is how long a session that no process descriptor watches outlives its stream.
    """

    address: Path
    listen: str = ""
    insecure: bool = False
    metrics: str = ""
    metrics_public: bool = False
    device: str = "cpu"
    slab_kind: str = "auto"
    budget_bytes: int = 4 * 2**30
    namespace_max_bytes: int = 0
    max_sessions: int = 64
    grace_s: float = 10.0
    session_grace_s: float = 10.0
    json_logs: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_address(self.address)
        if self.listen:
            host, _ = split_host_port(self.listen)
            if not self.insecure and not _is_loopback(host):
                raise ConfigurationError(
                    f"--listen {self.listen}: anybody who reaches that address could read and write the cache. "
                    "Expected a loopback address such as 127.0.0.1:7400: add --insecure if the network is trusted"
                )
        if self.metrics:
            host, _ = split_host_port(self.metrics, "--metrics")
            if not self.insecure and not self.metrics_public and not _is_loopback(host):
                raise ConfigurationError(
                    f"--metrics {self.metrics}: anybody who reaches that address could read names of models and how "
                    "the service is used. Expected a loopback address such as 127.0.0.1:7401: add --metrics-public if "
                    "they may"
                )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigurationError(
                f"--device {shorten(self.device)!r}. Expected cpu, cuda, cuda:N, or a GPU's UUID as nvidia-smi -L "
                "shows it (GPU-...): correct it or leave it out"
            )
        if self.slab_kind not in SLAB_KINDS:
            raise ConfigurationError(
                f"--slab-kind {shorten(self.slab_kind)!r}. Expected {', '.join(SLAB_KINDS)}: correct it or leave it out"
            )
        if self.slab_kind != "auto" and self.device == "cpu":
            raise ConfigurationError(
                f"--slab-kind {self.slab_kind} with --device cpu, whose slabs are memfds. Expected a GPU: give "
                "--device cuda, or leave --slab-kind out"
            )
        self._check_range("--budget", self.budget_bytes, 2**21, 2**50)
        self._check_range("--namespace-budget", self.namespace_max_bytes, 0, 2**50)
        self._check_range("--max-sessions", self.max_sessions, 1, MAX_SESSIONS)
        self._check_range("--grace", self.grace_s, 0, 3600)
        self._check_range("--session-grace", self.session_grace_s, 0, 3600)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigurationError(f"--log-level {self.log_level!r}. Expected debug, info, warning or error")

    @staticmethod
    def _check_range(option: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ConfigurationError(
                f"{option} {shorten(str(value))}. Expected a value from {low} to {high}: correct it or leave it out"
            )

    @property
    def descriptor_address(self) -> Path:
        """Where the supervisor passes descriptors."""
        return self.address.with_name(self.address.name + ".fd")

    @property
    def admin_address(self) -> Path:
        """Where the AdminService is."""
        return self.address.with_name(self.address.name + ".admin")

    def to_json(self) -> str:
        """The form in which the supervisor passes it to the server."""
        return json.dumps({**asdict(self), "address": str(self.address)})

    @classmethod
    def from_json(cls, text: str) -> "ServiceConfig":
        """The reverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "address": Path(fields["address"])})


def load_config(options: Mapping[str, Any], env: Mapping[str, str]) -> ServiceConfig:
    """Makes the configuration: `options` given on the command line (None = not given), then `env`, then defaults."""
    fields: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        value = options.get(name)
        if value is not None:
            fields[name] = value if not isinstance(value, str) else _parse(parse, value, f"--{name.replace('_', '-')}")
            continue
        variable = ENV_PREFIX + name.upper()
        if env.get(variable):
            fields[name] = _parse(parse, env[variable], variable)
    renamed = {_FIELDS.get(name, name): value for name, value in fields.items()}
    if "address" not in renamed:
        renamed["address"] = default_address(env)
    return ServiceConfig(**renamed)


def default_address(env: Mapping[str, str]) -> Path:
    """KVSTORE_ADDRESS, else below XDG_RUNTIME_DIR, else below /run where this user may write there."""
    if env.get(ENV_PREFIX + "ADDRESS"):
        return given_address(env[ENV_PREFIX + "ADDRESS"], ENV_PREFIX + "ADDRESS")
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kvstore" / SOCKET_NAME
    folder = Path("/run/kvstore")
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return folder / SOCKET_NAME
    raise ConfigurationError(
        "no default address: XDG_RUNTIME_DIR is not set and /run/kvstore is not writable. "
        f"Expected a path for the socket: give --address PATH.sock or set {ENV_PREFIX}ADDRESS"
    )


def given_address(text: str, source: str) -> Path:
    """The path of a socket that somebody gave as `source`. ConfigurationError when it can't be one."""
    path: Path = _parse(_parse_address, text, source)
    check_address(path)
    return path


def check_address(path: Path) -> None:
    """Raises ConfigurationError for a path that is too long for a socket."""
    length = len(os.fsencode(path))
    if length > MAX_ADDRESS_BYTES:
        raise ConfigurationError(
            f"address of {length} bytes: {shorten(str(path))}. Expected at most {MAX_ADDRESS_BYTES} bytes, the limit "
            "for Unix sockets: choose a shorter path with --address"
        )


def check_memory(budget_bytes: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    """Raises ConfigurationError for a budget that this machine, or the control group of this process, never has.

    What is free right now is no matter here: the budget is touched little by little, and watched on the way.
    """
    from kvstore.device.headroom import memory_total

    total = memory_total(proc, cgroups)
    if budget_bytes > total.nbytes:
        raise ConfigurationError(
            f"--budget {budget_bytes}: expected at most the {total.nbytes} bytes ({total.nbytes / 2**30:.1f} GiB) that "
            f"are {total.limit}: give a smaller --budget, or more memory"
        )


def shorten(text: str) -> str:
    """A value fit for one line of an error."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def split_host_port(text: str, option: str = "--listen") -> tuple[str, int]:
    """Host and port of "host:port". ConfigurationError when it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigurationError(
            f"{option} {shorten(text)!r}. Expected host:port, for example 127.0.0.1:7400 (port 0 = any free one)"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A name: where it leads is for the resolver to say, and may change.
        return False


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "512 MiB", "4096". ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected a size such as 4GiB or 512MiB")
    if len(match[1]) > _MOST_DIGITS:
        # More than any machine has, and than a float holds.
        raise ValueError(f"expected a size of at most {_MOST_DIGITS} digits, such as 4GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parse(parse: Any, text: str, source: str) -> Any:
    try:
        return parse(text)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(
            f"{source}={shorten(text)!r}: {error}. Correct the value or leave {source} out"
        ) from None


def _parse_address(text: str) -> Path:
    text = text.removeprefix("unix:")
    if not text or "\0" in text:
        raise ValueError("expected the path of a socket, for example /run/kvstore/kvstore.sock")
    # Without this a socket of that name appears in the working folder, and nobody listens where the user meant.
    if (":" in text and not text.startswith("/")) or ("/" not in text and not text.endswith(".sock")):
        raise ValueError(
            "expected the path of a socket, for example /run/kvstore/kvstore.sock or ./kvstore.sock. "
            "For TCP give HOST:PORT with --listen of `kvstore serve`"
        )
    return Path(text).absolute()


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _parse_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number of seconds") from None


_PARSERS: dict[str, Any] = {
    "address": _parse_address,
    "listen": str,
    "insecure": _parse_bool,
    "metrics": str,
    "metrics_public": _parse_bool,
    "device": str,
    "slab_kind": str.lower,
    "budget": parse_size,
    "namespace_budget": parse_size,
    "max_sessions": _parse_int,
    "grace": _parse_seconds,
    "session_grace": _parse_seconds,
    "json_logs": _parse_bool,
    "log_level": str.lower,
}
_FIELDS = {
    "budget": "budget_bytes",
    "namespace_budget": "namespace_max_bytes",
    "grace": "grace_s",
    "session_grace": "session_grace_s",
}
