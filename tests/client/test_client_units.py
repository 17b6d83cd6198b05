"""Parts of the client that need no service: addresses, settings, breaker, notices, local slots, errors, exports."""

import logging
import os
import re
import subprocess
import sys
from typing import Any

import grpc
import kvstore_client
import pytest
from kvstore_client import (
    AddressError,
    ClientConfig,
    ConflictError,
    LocalBudgetExceeded,
    NotHeldError,
    ServiceFaultError,
    ServiceUnavailableError,
    SettingError,
    connect,
)
from kvstore_client.address import parse_address
from kvstore_client.breaker import CircuitBreaker
from kvstore_client.errors import from_code, from_rpc
from kvstore_client.local import LocalSlabs, available_memory
from kvstore_client.notices import REMINDER_S, Notices
from kvstore_client.testing import LAYOUT
from kvstore_kernels.layout import BlockLayout


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:/run/kv.sock", "unix:/run/kv.sock"),
        ("/run/kv.sock", "unix:/run/kv.sock"),
        ("localhost:7400", "localhost:7400"),
        ("kv-service_1.example:1", "kv-service_1.example:1"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_addresses(text: str, target: str) -> None:
    assert parse_address(text).grpc_target == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kv.sock",
        "unix:kv.sock",
        "unix:",
        "host",
        "host:",
        "host:0",
        "host:65536",
        ":7400",
        "http://h:1",
        "::1:5",
        "a b:1",
    ],
)
def test_malformed_addresses_name_the_accepted_forms(text: str) -> None:
    with pytest.raises(AddressError, match="host:port"):
        parse_address(text)


def test_a_path_too_long_for_a_socket() -> None:
    assert parse_address("/" + "x" * 100).path is not None
    with pytest.raises(AddressError, match="shorter folder"):
        parse_address("/" + "x" * 101)


def test_environment_fills_defaults_only() -> None:
    environment = {"KVSTORE_CLIENT_LOOKUP_TIMEOUT_S": "0.25", "KVSTORE_CLIENT_LOCAL_BUDGET": "4096", "OTHER": "x"}
    config = ClientConfig(reserve_timeout_s=3.0).with_environment(environment)
    assert (config.lookup_timeout_s, config.local_budget, config.reserve_timeout_s) == (0.25, 4096, 3.0)
    assert ClientConfig(lookup_timeout_s=2.0).with_environment(environment).lookup_timeout_s == 2.0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVSTORE_CLIENT_LOOKUP_TIMEOUT_S", "soon"),
        ("KVSTORE_CLIENT_LOOKUP_TIMEOUT_S", "-1"),
        ("KVSTORE_CLIENT_LOOKUP_TIMEOUT_S", "inf"),
        ("KVSTORE_CLIENT_QUEUE_LIMIT", "1.5"),
        ("KVSTORE_CLIENT_LOCAL_BUDGET", "4GiB"),
        ("KVSTORE_CLIENT_VERIFY", "sometimes"),
        ("KVSTORE_CLIENT_NO_SUCH", "1"),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=variable):
        ClientConfig().with_environment({variable: value})


def test_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker(2, 1.0, clock)
    assert not breaker.failure()
    assert breaker.allow()
    assert breaker.failure(), "the second failure opens it"
    assert breaker.open
    assert not breaker.allow()
    clock.now += 1.0
    assert breaker.allow()
    assert not breaker.allow(), "one probe at a time"
    assert not breaker.failure(), "it was open already"
    assert not breaker.allow()
    clock.now += 1.0
    assert breaker.allow()
    breaker.success()
    assert not breaker.open
    assert breaker.allow()
    assert breaker.allow()


def test_one_decisive_failure_opens_the_breaker() -> None:
    breaker = CircuitBreaker(3, 1.0, Clock())
    assert breaker.failure(decisive=True)
    assert breaker.open
    assert not breaker.failure(decisive=True), "it was open already"
    breaker.success()
    assert not breaker.open


@pytest.mark.parametrize("address", [None, 5, b"/tmp/kv.sock"])
def test_an_address_that_is_no_text_is_an_error_that_names_it(address: Any) -> None:
    with pytest.raises(AddressError, match=re.escape(repr(address))):
        connect(address)


@pytest.mark.parametrize(
    "options", [{"local_budget": "1GiB"}, {"local_budget": True}, {"queue_limit": 1.5}, {"lookup_timeout_s": "1"}]
)
def test_a_setting_of_a_wrong_type_is_an_error_that_names_it(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(SettingError, match=f"{name}={value!r}.*expected"):
        ClientConfig(**options)
    if name == "local_budget":
        with pytest.raises(SettingError, match=f"{name}={value!r}.*expected"):
            connect("/tmp/kv.sock", local_budget=value)


def test_breaker_counts_consecutive_failures_only() -> None:
    breaker = CircuitBreaker(2, 1.0, Clock())
    for _ in range(5):
        breaker.failure()
        breaker.success()
    assert not breaker.open


def test_a_probe_that_never_reports_does_not_block_for_ever() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 1.0, clock)
    breaker.failure()
    clock.now += 1.0
    assert breaker.allow()
    clock.now += 1.0
    assert breaker.allow()


def test_one_line_per_kind_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    # b217
    clock = Clock()
    notices = Notices(10.0, clock)
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        for _ in range(1000):
            notices.warn("a", "text")
        notices.warn("b", "other")
        clock.now += 10.0
        notices.warn("a", "text")
    assert [r.getMessage() for r in caplog.records] == ["text", "other", "text (999 like it left out)"]
    assert notices.counts() == {"a": 1001, "b": 1}


def test_a_condition_is_said_once_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    notices = Notices(10.0, clock)
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        for _ in range(50):
            notices.warn_condition("down", "down")
            clock.now += 5.0
        assert len(caplog.records) == 1
        notices.over("down")
        notices.warn_condition("down", "down")
        assert len(caplog.records) == 2
        clock.now += REMINDER_S
        notices.warn_condition("down", "down")
        assert len(caplog.records) == 3


def test_a_flapping_condition_is_limited_too(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(10.0, Clock())
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        for _ in range(50):
            notices.warn_condition("down", "down")
            notices.over("down")
    assert len(caplog.records) == 1


SMALL = BlockLayout.create("int8", layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="float32")


def test_local_slots_are_distinct_and_come_back() -> None:
    local = LocalSlabs(10 * LAYOUT.block_bytes, 3 * LAYOUT.block_bytes)
    blocks = [local.take(LAYOUT) for _ in range(10)]
    assert len({b.address for b in blocks}) == 10
    assert local.allocated_bytes == 10 * LAYOUT.block_bytes
    with pytest.raises(LocalBudgetExceeded, match="raise local_budget"):
        local.take(LAYOUT)
    for block in blocks:
        local.free(block)
    assert local.taken_blocks == 0
    assert local.allocated_bytes <= 3 * LAYOUT.block_bytes, "one unused slab is kept"


def test_an_unused_slab_makes_room_for_another_layout() -> None:
    local = LocalSlabs(4 * LAYOUT.block_bytes, 4 * LAYOUT.block_bytes)
    local.free(local.take(LAYOUT))
    assert local.allocated_bytes == 4 * LAYOUT.block_bytes
    held = [local.take(SMALL) for _ in range(5)]
    assert local.allocated_bytes <= local.budget_bytes
    assert len({b.address for b in held}) == 5


def test_budget_zero_and_default_budget() -> None:
    with pytest.raises(LocalBudgetExceeded):
        LocalSlabs(0, 1 << 20).take(SMALL)
    local = LocalSlabs(None, 1 << 20, available=lambda device: 1001)
    assert local.budget_bytes == 500
    assert available_memory() > 0


class Failure(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode | None) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return "details"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServiceUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ServiceUnavailableError),
        (grpc.StatusCode.CANCELLED, ServiceUnavailableError),
        (grpc.StatusCode.FAILED_PRECONDITION, ConflictError),
        (grpc.StatusCode.NOT_FOUND, NotHeldError),
        (grpc.StatusCode.UNKNOWN, ServiceFaultError),
        (None, ServiceFaultError),
    ],
)
def test_every_status_has_a_type(code: grpc.StatusCode | None, kind: type[Exception]) -> None:
    error = from_rpc(Failure(code), "Commit")
    assert type(error) is kind
    assert "Commit" in str(error)
    if code is not None:
        assert type(from_code(code.value[0], "x")) is kind


def test_exported_names() -> None:
    assert sorted(kvstore_client.__all__) == kvstore_client.__all__
    assert {"connect", "Store", "ClientConfig", "KVStoreError"} <= set(kvstore_client.__all__)
    for name in kvstore_client.__all__:
        assert hasattr(kvstore_client, name)


def test_import_needs_neither_torch_nor_transformers() -> None:
    script = "import sys, kvstore_client; sys.exit(bool({'torch', 'transformers', 'kvstore'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False).returncode == 0
