"""Requests against a service in this process, over the bytes transport."""

import gc
import logging
import threading
import time
from typing import Any

import grpc
import pytest
from kvstore_client import (
    ClosedError,
    LimitReachedError,
    LocalBudgetExceeded,
    NotHeldError,
    ServiceUnavailableError,
    UsageError,
)
from kvstore_client.blocks import NO_PARENT, Origin
from kvstore_client.testing import FAST, chain_of, content, digest, fill, identity, payload, plan, wait_for, write_chain


def test_written_blocks_come_back_byte_for_byte(fake, namespace, opened):
    store, ns = namespace
    digests = chain_of("a", 3)
    with store.open_request(ns) as request:
        assert request.match([b"".join(digests)])[0].reason == "not-found"
        assert request.reserve([b"".join(digests)]) == ["write"] * 3
        write_chain(request, digests)
        assert store.flush()
        assert request.report().blocks_committed == 3
        assert request.report().local_blocks == 0
    other = opened(fake.address)
    ns2 = other.namespace_for(identity(), plan)
    with other.open_request(ns2) as request:
        match = request.match([b"".join(digests) + digest("more")])[0]
        assert [content(b) for b in match.blocks] == [payload(d) for d in digests]
        assert (match.writers, match.reason) == ([("somebody", 3)], "not-found")
        assert {b.origin for b in match.blocks} == {Origin.LOCAL}
        assert other.flush()
        assert not fake.leases, "the bytes transport releases a lease as soon as it has the bytes"
    assert store.flush()
    assert not fake.held
    assert other.stats()["local_blocks"] == 0


def test_one_lookup_serves_all_rows(fake, namespace):
    store, ns = namespace
    digests = chain_of("rows", 4)
    with store.open_request(ns) as request:
        write_chain(request, digests)
        assert store.flush()
        fake.calls.clear()
        matches = request.match([b"".join(digests[:2]), b"", b"".join(digests[:1]) + digest("x")])
        assert [len(m.blocks) for m in matches] == [2, 0, 1]
        assert fake.calls.count("LookupAndLease") == 1


def test_lookups_leave_no_lease(fake, namespace):
    # b060
    store, ns = namespace
    digests = chain_of("pins", 1)
    with store.open_request(ns) as request:
        write_chain(request, digests)
        assert store.flush()
    for _ in range(50):
        with store.open_request(ns) as request:
            request.match([digests[0]] * 5)
    assert store.flush(20)
    assert not fake.leases
    assert store.stats()["open_requests"] == 0
    assert store.stats()["local_blocks"] == 0


@pytest.mark.parametrize("method", ["LookupAndLease", "Reserve"])
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
def test_an_error_of_the_service_is_a_miss(fake, namespace, method, code):
    store, ns = namespace
    fake.fail(method, code)
    digests = chain_of("e", 2)
    with store.open_request(ns) as request:
        match = request.match([b"".join(digests)])[0]
        assert match.blocks == []
        assert match.reason
        assert request.reserve([b"".join(digests)], 1) == ["write", "write"]
        assert request.take(digests[0]).writable


def test_a_failed_commit_stays_invisible(fake, namespace):
    # b105
    store, ns = namespace
    fake.fail("WriteBlocks", grpc.StatusCode.INTERNAL)
    digests = chain_of("f", 2)
    with store.open_request(ns) as request:
        write_chain(request, digests)
        assert store.flush()
        assert request.report().commits_dropped == 2
    assert not fake.committed
    assert store.flush()
    assert not fake.held, "slots of a failed upload go back"


def test_a_silent_service_costs_a_deadline_at_most_and_then_nothing(fake, impatient):
    # b113
    store, ns = impatient
    fake.hang("LookupAndLease", "Reserve", "Commit", "Release", "Abort", "WriteBlocks")
    with store.open_request(ns) as request:
        started = time.monotonic()
        assert request.match([digest("s")])[0].reason == "service-silent"
        assert time.monotonic() - started < 0.4 + 0.3
        assert store.stats()["breaker_open"]
        worst = 0.0
        for _ in range(50):
            started = time.monotonic()
            assert request.match([digest("s")])[0].reason == "service-silent"
            block = request.take()
            request.ensure_ahead(2)
            request.commit([(block, digest("s", time.monotonic()), NO_PARENT)])
            worst = max(worst, time.monotonic() - started)
        assert worst < 0.1
    fake.faults.clear()
    fake.ended.set()
    assert wait_for(lambda: not store.stats()["breaker_open"]), "the background finds out that it answers again"
    with store.open_request(ns) as request:
        assert request.match([digest("s")])[0].reason == "not-found"


def test_a_silent_service_fills_one_log_line(fake, impatient, caplog):
    # b217
    store, ns = impatient
    fake.hang("LookupAndLease")
    with caplog.at_level(logging.WARNING, "kvstore_client"), store.open_request(ns) as request:
        for _ in range(300):
            request.match([digest("s")])
            request.take()
    lines = [r for r in caplog.records if r.name == "kvstore_client"]
    assert len(lines) == 1, [r.getMessage() for r in lines]


def test_full_queue_drops_commits_but_returns_everything(fake, opened):
    store = opened(fake.address, config=FAST.__class__(**{**_fields(FAST), "queue_limit": 4}))
    ns = store.namespace_for(identity(), plan)
    gate = threading.Event()
    fake.faults["Commit"] = lambda context: gate.wait(0.5) and None
    request = store.open_request(ns)
    digests = chain_of("q", 30)
    request.reserve([b"".join(digests)])
    for i in range(30):
        block = request.take(digests[i])
        fill(block, payload(digests[i]))
        request.commit([(block, digests[i], NO_PARENT)])
    request.close()
    gate.set()
    assert store.flush()
    report = request.report()
    assert report.commits_dropped > 0
    assert report.commits_dropped + report.blocks_committed == 30
    assert "queue-full" in report.short_reasons
    assert not fake.held
    assert store.stats()["local_blocks"] == 0


def test_a_second_commit_of_a_digest_is_no_failure(fake, namespace, opened, caplog):
    # b147
    store, ns = namespace
    other = opened(fake.address)
    ns2 = other.namespace_for(identity(), plan)
    digests = chain_of("race", 4)
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        with store.open_request(ns) as one, other.open_request(ns2) as two:
            one.reserve([b"".join(digests)])
            two.reserve([b"".join(digests)])
            write_chain(one, digests)
            write_chain(two, digests)
            assert store.flush()
            assert other.flush()
            a, b = one.report(), two.report()
        assert a.blocks_committed + b.blocks_committed == 4
        assert a.commits_lost + b.commits_lost == 4
    assert not caplog.records
    assert store.flush()
    assert other.flush()
    assert not fake.held
    assert len(fake.committed) == 4


def test_repeated_digests_in_one_reservation(fake, namespace):
    store, ns = namespace
    a, b = chain_of("rep", 2)
    with store.open_request(ns) as request:
        assert request.reserve([a + b, a]) == ["write", "write", "in_flight"]


def test_give_back_and_close_are_idempotent_from_two_threads(fake, namespace):
    # b118
    store, ns = namespace
    request = store.open_request(ns)
    digests = chain_of("twice", 6)
    request.reserve([b"".join(digests)])
    blocks = write_chain(request, digests)
    threads = [threading.Thread(target=lambda: [request.give_back(b) for b in blocks]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    closers = [threading.Thread(target=request.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    request.close()
    assert store.flush()
    assert store.stats()["local_blocks"] == 0
    assert not fake.held
    assert len(fake.committed) == 6, "a block given back right after commit() is still committed"
    with pytest.raises(ClosedError):
        request.take()


def test_a_forgotten_request_is_given_back(fake, namespace):
    # b064, b068
    store, ns = namespace
    for i in range(20):
        request = store.open_request(ns)
        request.reserve([digest("leak", i)])
        write_chain(request, [digest("leak", i)])
        request.match([digest("leak", i)])
    del request
    gc.collect()
    assert store.flush()
    assert wait_for(lambda: store.stats()["open_requests"] == 0)
    assert store.flush()
    assert not fake.held
    assert not fake.leases
    assert store.stats()["local_blocks"] == 0


def test_damaged_payload_cuts_the_prefix_and_is_reported(fake, namespace, caplog):
    # b107, b140
    store, ns = namespace
    digests = chain_of("damage", 5)
    with store.open_request(ns) as request:
        write_chain(request, digests)
        assert store.flush()
    fake.payloads[fake.committed[digests[2]]][77] ^= 4
    with caplog.at_level(logging.WARNING, "kvstore_client"), store.open_request(ns) as request:
        match = request.match([b"".join(digests)])[0]
        assert [content(b) for b in match.blocks] == [payload(d) for d in digests[:2]]
        assert match.reason == "damaged"
        assert match.writers == [("somebody", 2)]
        assert request.report().damaged_blocks == 1
    assert fake.damage == [digests[2]]
    assert "checksum" in caplog.text


def test_short_download_is_a_miss(fake, namespace):
    # b107
    store, ns = namespace
    digests = chain_of("short", 3)
    with store.open_request(ns) as request:
        write_chain(request, digests)
        assert store.flush()
        del fake.payloads[fake.committed[digests[1]]][-10:]
        match = request.match([b"".join(digests)])[0]
        assert (match.blocks, match.reason) == ([], "unmapped")
    assert store.flush()
    assert store.stats()["local_blocks"] == 0
    assert not fake.leases


def test_pin(fake, namespace):
    store, ns = namespace
    with pytest.raises(NotHeldError):
        store.pin(ns, digest("p"))
    with store.open_request(ns) as request:
        write_chain(request, [digest("p")])
        assert store.flush()
    assert store.pin(ns, digest("p")) == 1


def test_malformed_arguments(namespace):
    store, ns = namespace
    with store.open_request(ns) as request:
        with pytest.raises(UsageError, match="multiple of 32"):
            request.match([b"x" * 33])
        with pytest.raises(UsageError, match="32 bytes"):
            request.commit([(request.take(), b"short", NO_PARENT)])


def test_local_budget_is_a_typed_error_with_a_remedy(fake, opened):
    store = opened(fake.address, local_budget=3 * 64 * (24 + 40) * 4 * 2 * 3)
    ns = store.namespace_for(identity(), plan)
    with store.open_request(ns) as request:
        kept = [request.take() for _ in range(3)]
        with pytest.raises(LocalBudgetExceeded, match="KVSTORE_CLIENT_LOCAL_BUDGET"):
            request.take()
        request.give_back(kept[1])
        assert request.take().slot == kept[1].slot


def test_required_turns_misses_into_errors(fake, opened):
    store = opened(fake.address, required=True, config=FAST)
    ns = store.namespace_for(identity(), plan)
    fake.room = 0
    fake.hang("LookupAndLease")
    with store.open_request(ns) as request, pytest.raises(ServiceUnavailableError):
        request.match([digest("r")])


def test_a_whole_request_without_any_service(opened, caplog):
    # b120
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        store = opened("127.0.0.1:9")
        ns = store.namespace_for(identity(), plan)
        with store.open_request(ns) as request:
            assert request.match([digest("n")])[0].reason == "service-away"
            assert request.reserve([digest("n")], 2) == ["write"]
            blocks = write_chain(request, [digest("n")])
            request.ensure_ahead(4)
            assert content(blocks[0]) == payload(digest("n"))
        assert store.flush()
    assert len(caplog.records) == 1
    assert request.report().commits_dropped == 1
    assert not ns.shares
    assert ns.reason == "service-away"


def test_limit_reached_is_exported():
    assert issubclass(LimitReachedError, Exception)


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


def test_taking_many_is_all_or_nothing(fake, opened):
    store = opened(fake.address, local_budget=3 * 64 * (24 + 40) * 4 * 2 * 3)
    ns = store.namespace_for(identity(), plan)
    digests = chain_of("m", 2)
    with store.open_request(ns) as request:
        request.reserve([b"".join(digests)])
        with pytest.raises(LocalBudgetExceeded):
            request.take_all([*digests, None, None, None, None])
        assert store.stats()["local_blocks"] == 0
        assert len({(block.slab_id, block.slot) for block in request.take_all([None] * 3)}) == 3
