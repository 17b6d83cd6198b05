"""The metrics of a real service, scraped over a real socket."""

import shutil
import socket
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kvstore_proto.v1 import admin_pb2
from prometheus_client.parser import text_string_to_metric_families

from kvstore.config import ConfigurationError, load_config
from kvstore.launch import ServiceProcess
from kvstore.metrics.catalog import rows
from kvstore.testing_client import RawClient, admin_channel, admin_stub, chain


@pytest.fixture(scope="module")
def service():
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    with ServiceProcess.start(folder / "kv.sock", options=("--budget", "64MiB", "--metrics", "127.0.0.1:0")) as one:
        yield one
    shutil.rmtree(folder)


def scrape(service):
    with urllib.request.urlopen(service.metrics, timeout=10) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def say(service, data):
    where = urlsplit(service.metrics)
    with socket.create_connection((where.hostname, where.port), timeout=10) as peer:
        peer.sendall(data)
        return peer.makefile("rb").readline().decode()


def test_the_numbers_are_those_of_the_store_and_add_up(service):
    with RawClient(service.address) as client, admin_channel(service.address) as channel:
        namespace = client.register().namespace_id
        client.publish(namespace, chain("a", 3), [bytes(4096)] * 3)
        client.lookup_and_lease(namespace, chain("a", 3))
        client.lookup_and_lease(namespace, chain("a", 5))
        client.lookup_and_lease(namespace, chain("b", 2))
        stats = admin_stub(channel).GetStats(admin_pb2.GetStatsRequest())
        families = scrape(service)
    values = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
    for found in ("all", "part", "none"):
        assert values["kvstore_lookups_total", (found,)] == 1
    assert stats.lookups == 3
    assert values["kvstore_lookup_misses_total", ("not_found",)] == 2
    assert values["kvstore_hit_tokens_total", ()] == stats.hit_tokens
    assert values["kvstore_lookup_tokens_total", ()] == stats.lookup_tokens
    assert values["kvstore_blocks_committed_total", ()] == stats.commits == 3
    assert values["kvstore_leases", ()] == stats.leases == 2
    calls = {
        s.labels["method"]: s.value for f in families for s in f.samples if s.name.endswith("duration_seconds_count")
    }
    assert calls["LookupAndLease"] == 3


def test_every_metric_is_documented_and_every_documented_one_exists(service):
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in scrape(service)}
    assert names == {row[0] for row in rows()}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", "200"),
        (b"GET /readyz HTTP/1.1\r\n\r\n", "200"),
        (b"GET /other HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"\x00\xff garbage\r\n\r\n", "400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n", "431"),
    ],
)
def test_a_request_gets_its_status(service, data, status):
    assert status in say(service, data).split()[1]


def test_an_address_that_leaves_loopback_needs_a_flag():
    with pytest.raises(ConfigurationError, match=r"--metrics 0\.0\.0\.0:1.*--metrics-public"):
        load_config({"address": "/tmp/kv.sock", "metrics": "0.0.0.0:1"}, {})
    assert load_config({"address": "/tmp/kv.sock", "metrics": "0.0.0.0:1", "metrics_public": "1"}, {}).metrics_public


def test_too_many_connections_hear_so_and_later_ones_are_served(service):
    where = urlsplit(service.metrics)
    peers = [socket.create_connection((where.hostname, where.port), timeout=10) for _ in range(32)]
    assert "503" in say(service, b"")
    for peer in peers:
        peer.close()
    assert scrape(service)
