"""The commands that operators type."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvstore.cli import main
from kvstore.testing_client import ModelShape, RawClient, chain


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def kvstore(capsys):
    """Runs the command line in this process."""

    def run(*arguments, address=None):
        where = [] if address is None else ["--address", str(address)]
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments), *where])
        return Result(caught.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def cached(shared_service):
    """A worker that holds two chains of three blocks."""
    with RawClient(shared_service.address, name="holder") as client:
        namespace = client.register(ModelShape("a model")).namespace_id
        for seed in ("one", "two"):
            client.publish(namespace, chain(seed, 3), [bytes(4096)] * 3)
            client.lookup_and_lease(namespace, chain(seed, 3))
        yield client, namespace


def test_the_numbers_are_shown_for_people_and_as_json(kvstore, shared_service, cached):
    address = shared_service.address
    _, namespace = cached
    stats = json.loads(kvstore("stats", "--json", address=address).stdout)
    assert (stats["commits"], stats["leases"], stats["sessions"]) == ("6", 2, 1)
    (entry,) = json.loads(kvstore("namespaces", "--json", address=address).stdout)["namespaces"]
    assert (entry["namespace_id"], entry["model_name"], entry["committed"]) == (str(namespace), "a model", "6")
    (session,) = json.loads(kvstore("sessions", "--json", address=address).stdout)["sessions"]
    assert (session["name"], session["leases"], session["process_watched"]) == ("holder", 2, True)
    for command, parts in {
        "stats": ["6 committed", "1, 2"],
        "namespaces": ["a model", "passthrough"],
        "sessions": ["holder", "fd", "yes"],
    }.items():
        result = kvstore(command, address=address)
        assert result.returncode == 0
        for part in parts:
            assert part in result.stdout


def test_a_pinned_chain_survives_an_eviction(kvstore, shared_service, cached):
    address = shared_service.address
    client, namespace = cached
    digest = chain("one", 3)[-1].hex()
    assert "chain of 3 blocks" in kvstore("pin", namespace, digest, address=address).stdout
    evicted = kvstore("evict", namespace, address=address)
    assert evicted.returncode == 0
    assert "pinned 3" in evicted.stdout
    assert len(client.lookup_and_lease(namespace, chain("one", 3)).slots) == 3
    assert len(client.lookup_and_lease(namespace, chain("two", 3)).slots) == 0
    assert "unpinned" in kvstore("pin", "--remove", namespace, digest, address=address).stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["evict", 999], ["999", "NOT_FOUND"]),
        (["pin", 999, "zz"], ["zz", "64 hex digits"]),
        (["pin", 999, "ab"], ["Expected 32", "INVALID_ARGUMENT"]),
        (["pin", 999, "ab" * 32], ["999", "NOT_FOUND"]),
    ],
)
def test_a_mistake_is_one_line_without_traceback(kvstore, shared_service, arguments, parts):
    result = kvstore(*arguments, address=shared_service.address)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    for part in parts:
        assert part in result.stderr


def test_check_fails_when_a_payload_is_damaged(kvstore, launch):
    service = launch()
    with RawClient(service.address) as client:
        namespace = client.register().namespace_id
        reserved = client.publish(namespace, chain("check", 3), [bytes(4096)] * 3)
        assert kvstore("check", "--payloads", address=service.address).returncode == 0
        segment, memory = client.map(reserved.slab_ids[1], writable=True)
        memory[reserved.slots[1] * segment.slot_bytes] = 7
        assert kvstore("check", address=service.address).returncode == 0
        result = kvstore("check", "--payloads", address=service.address)
        assert result.returncode == 1
        assert "1 damaged" in result.stdout
        assert "damaged" in launch.log


def test_no_service_is_said_with_a_remedy(kvstore, tmp_path):
    for command in (["stats"], ["namespaces"], ["sessions"], ["evict", "1"], ["check"]):
        result = kvstore(*command, address=tmp_path / "kv.sock")
        assert result.returncode == 1
        assert f"kvstore serve --address {tmp_path / 'kv.sock'}" in result.stderr
        assert "Traceback" not in result.stderr


def test_the_socket_of_a_dead_service_is_said_with_a_remedy(kvstore, launch):
    service = launch()
    service.kill()
    result = kvstore("stats", address=service.address)
    assert result.returncode == 1
    assert "start it with `kvstore serve" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_every_command_has_help_with_an_example(kvstore):
    overview = kvstore("--help").stdout
    for command in ("serve", "stats", "namespaces", "sessions", "evict", "pin", "check", "version"):
        assert command in overview
        assert f"Example: kvstore {command}" in kvstore(command, "--help").stdout


def test_the_version_is_that_of_the_distribution(kvstore):
    text = kvstore("version").stdout
    assert text.startswith("kvstore ")
    command = [sys.executable, "-m", "kvstore", "version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout == text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["serve", "--budget", "9" * 400], ["--budget", "999", "expected a size"]),
        (["serve", "--budget", "900TiB"], [str(900 * 2**40), "expected at most", "smaller --budget"]),
        (["serve", "--address", "127.0.0.1:7000"], ["127.0.0.1:7000", "--listen"]),
        (["serve", "--max-sessions", "abc"], ["abc", "whole number"]),
        (["serve", "--max-sessions", "9" * 400], ["--max-sessions", "from 1 to"]),
        (["serve", "--grace", "soon"], ["soon", "number of seconds"]),
        (["serve", "--ready-fd", "x"], ["--ready-fd x", "descriptor"]),
        (["serve", "--no-such"], ["--no-such", "see `kvstore serve --help`"]),
        (["evict", "x"], ["'x'", "expected an id", "kvstore namespaces"]),
        (["evict", "-1"], ["-1", "see `kvstore evict --help`"]),
        (["evict"], ["see `kvstore evict --help`"]),
        (["evict", str(2**70)], [str(2**70), "expected an id"]),
        (["pin", str(2**64), "ab"], [str(2**64), "expected an id"]),
        (["stats", "--address", "/tmp/" + "a" * 300], ["/tmp/aaa", "Expected at most", "shorter path"]),
        (["namespaces", "--address", "/tmp/" + "a" * 300], ["shorter path"]),
        (["sessions", "--address", "/tmp/" + "a" * 300], ["shorter path"]),
        (["check", "--address", "/tmp/" + "a" * 300], ["shorter path"]),
        (["no-such"], ["no-such", "serve", "see `kvstore --help`"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_a_remedy(kvstore, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.setenv("KVSTORE_ADDRESS", str(tmp_path / "kv.sock"))
    monkeypatch.chdir(tmp_path)
    result = kvstore(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 600
    for part in parts:
        assert part in result.stderr
    assert not list(tmp_path.iterdir())


def test_kvstore_alone_shows_its_help(kvstore):
    result = kvstore()
    assert result.returncode == 2
    assert "Usage" in result.stdout + result.stderr


def test_an_address_that_can_not_be_listened_on_is_one_line(tmp_path):
    command = [sys.executable, "-m", "kvstore", "serve", "--address", str(tmp_path / "kv.sock"), "--budget", "64MiB"]
    command += ["--listen", "nohost.invalid:7400", "--insecure"]
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: can't listen on nohost.invalid:7400")
