"""Stores against a service in this process: attaching, registering, codec plans, replies that must not be believed."""

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import kvstore_client
import pytest
import torch
from kvstore_client import (
    AddressError,
    ClosedError,
    ConflictError,
    ProtocolMismatchError,
    ServiceUnavailableError,
    SettingError,
    Store,
    TransportUnavailableError,
    UsageError,
    connect,
)
from kvstore_client.blocks import NO_PARENT
from kvstore_client.namespace import Namespace
from kvstore_client.testing import FAST, FakeService, digest, identity, plan, wait_for, write_chain
from kvstore_kernels.codecs.plan import CodecPlan
from kvstore_kernels.layout import BlockLayout
from kvstore_proto.v1 import blocks_pb2, session_pb2

Open = Callable[..., Store]
INT8 = BlockLayout.create("int8", layers=2, kv_heads=1, k_dim=8, v_dim=8, dtype="float32")


def int8_plan(scale: float, layers: int = 2) -> CodecPlan:
    shape = (layers, 1, 8)
    return CodecPlan("int8", {"k_shift": torch.zeros(shape), "k_scale": torch.full(shape, scale)}, f"test {scale}")


def never() -> CodecPlan:
    raise AssertionError("calibrated although a plan was there")


def test_absent_service_and_required() -> None:
    with pytest.raises(ServiceUnavailableError, match="required"):
        connect("127.0.0.1:9", required=True, config=FAST)
    with pytest.raises(ServiceUnavailableError, match=r"kvstore serve --address /nonexistent/kv\.sock"):
        connect("/nonexistent/kv.sock", required=True, config=FAST)


def test_the_callers_mistakes_are_errors_at_once() -> None:
    with pytest.raises(AddressError):
        connect("not an address")
    with pytest.raises(SettingError, match="carrier-pigeon"):
        connect("127.0.0.1:9", require_transport="carrier-pigeon")


def test_transport_that_is_not_there(fake: FakeService) -> None:
    before = threading.active_count()
    with pytest.raises(TransportUnavailableError, match="Unix socket"):
        connect(fake.address, require_transport="fd", config=FAST)
    assert wait_for(lambda: threading.active_count() <= before), "a failed connect leaves no thread behind"


def test_other_version_of_the_protocol(fake: FakeService) -> None:
    fake.protocol_version = 2
    with pytest.raises(ProtocolMismatchError, match="install the same version"):
        connect(fake.address, config=FAST)
    fake.protocol_version = 1
    fake.fail("Session", grpc.StatusCode.FAILED_PRECONDITION)
    with pytest.raises(ProtocolMismatchError, match="injected"):
        connect(fake.address, config=FAST)


def test_a_service_that_never_says_welcome(fake: FakeService, opened: Open) -> None:
    fake.hang("Session")
    started = time.monotonic()
    store = opened(fake.address, config=replace(FAST, connect_timeout_s=0.3))
    assert time.monotonic() - started < 1.5
    assert not store.attached


def test_another_server_process_is_noticed_by_its_boot_id(
    fake: FakeService, namespace: tuple[Store, Namespace]
) -> None:
    store, ns = namespace
    first = store.stats()["boot_id"]
    fake.boot_id = b"C" * 16
    with store.open_request(ns) as request:
        assert request.match([digest("x")])[0].blocks == []
        assert wait_for(lambda: store.stats()["boot_id"] not in ("", first))
        assert wait_for(lambda: ns.shares)
        assert request.match([digest("x")])[0].reason == "not-found"


def test_a_session_that_the_service_forgot_is_opened_again(
    fake: FakeService, namespace: tuple[Store, Namespace]
) -> None:
    store, ns = namespace
    fake.fail("LookupAndLease", grpc.StatusCode.UNAUTHENTICATED)
    with store.open_request(ns) as request:
        assert request.match([digest("x")])[0].blocks == []
        fake.faults.clear()
        assert wait_for(lambda: fake.calls.count("Session") == 2 and ns.shares)
        assert request.match([digest("x")])[0].reason == "not-found"


def test_lost_registration_is_made_up_for(fake: FakeService, opened: Open) -> None:
    store = opened(fake.address, config=FAST)
    fake.hang("RegisterModel")
    ns = store.namespace_for(identity(), plan)
    assert not ns.shares
    assert ns.namespace_id is None
    fake.faults.clear()
    assert wait_for(lambda: ns.shares, 8)


def test_one_namespace_an_identity(namespace: tuple[Store, Namespace]) -> None:
    store, ns = namespace
    assert store.namespace_for(identity(), never) is ns
    assert store.namespace_for(identity("another"), plan) is not ns


def test_malformed_identity() -> None:
    with pytest.raises(UsageError, match="32"):
        replace(identity(), fingerprint=b"short")
    with pytest.raises(UsageError, match="int8"):
        replace(identity(), codec="int8")


def test_refused_registration_keeps_blocks_local(
    fake: FakeService, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    fake.register_error = "block_tokens 64, expected 128"
    store = opened(fake.address)
    with caplog.at_level(logging.WARNING, "kvstore_client"):
        ns = store.namespace_for(identity(), plan)
        with store.open_request(ns) as request:
            assert request.match([digest("x")])[0].reason == "refused"
            request.take()
    assert [("expected 128" in r.getMessage()) for r in caplog.records] == [True]
    strict = opened(fake.address, required=True)
    with pytest.raises(ConflictError, match="expected 128"):
        strict.namespace_for(identity(), plan)


def test_the_services_plan_is_adopted_and_kept_for_later(fake: FakeService, opened: Open) -> None:
    fake.codec_plan = int8_plan(0.5).to_bytes()
    model = identity("m", INT8)
    store = opened(fake.address)
    ns = store.namespace_for(model, never)
    assert ns.plan == int8_plan(0.5)
    assert ns.shares
    alone = opened("127.0.0.1:9")
    assert alone.namespace_for(model, never).plan == int8_plan(0.5), "from the cache folder"


def test_a_plan_that_another_worker_registered_in_between(fake: FakeService, opened: Open) -> None:
    store = opened(fake.address)

    def calibrate() -> CodecPlan:
        fake.codec_plan = int8_plan(0.25).to_bytes()
        return int8_plan(0.5)

    ns = store.namespace_for(identity("m", INT8), calibrate)
    assert ns.plan == int8_plan(0.25)
    assert ns.shares


def test_service_that_appears_with_another_plan(
    fake: FakeService, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    port = fake.port
    fake.stop()
    store = opened(f"127.0.0.1:{port}")
    ns = store.namespace_for(identity("m", INT8), lambda: int8_plan(0.5))
    caplog.set_level(logging.WARNING, "kvstore_client")
    later = FakeService(port=port, codec_plan=int8_plan(0.25).to_bytes()).start()
    try:
        assert store.wait_attached(10)
        assert wait_for(lambda: ns.reason == "plan-differs")
        with store.open_request(ns) as request:
            assert request.match([digest("x")])[0].reason == "plan-differs"
            request.take()
        assert ns.plan == int8_plan(0.5), "blocks that are encoded stay readable"
        assert len([r for r in caplog.records if "another codec plan" in r.getMessage()]) == 1
    finally:
        store.close()
        later.stop()


@pytest.mark.parametrize("kept", [b"garbage", int8_plan(0.5, layers=3).to_bytes()], ids=["garbage", "other-shape"])
def test_a_plan_that_does_not_fit_is_not_used(fake: FakeService, opened: Open, kept: bytes) -> None:
    fake.codec_plan = kept
    ns = opened(fake.address).namespace_for(identity("m", INT8), lambda: int8_plan(0.5))
    assert ns.plan == int8_plan(0.5)
    assert (ns.shares, ns.reason) == (False, "plan-differs")


def test_damaged_plan_file_is_calibrated_again(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = identity("m", INT8)
    opened("127.0.0.1:9").namespace_for(model, lambda: int8_plan(0.5))
    (file,) = (tmp_path / "cache" / "gpu-kvstore" / "plans").iterdir()
    assert file.name == f"{model.fingerprint.hex()}-int8.plan"
    file.write_bytes(file.read_bytes()[:-1])
    assert opened("127.0.0.1:9").namespace_for(model, lambda: int8_plan(0.75)).plan == int8_plan(0.75)
    assert "calibrating again" in caplog.text
    assert CodecPlan.from_bytes(file.read_bytes()) == int8_plan(0.75)
    assert len(list(file.parent.iterdir())) == 1


def _lease(**fields: Any) -> blocks_pb2.Lease:
    whole = {"lease_id": 5, "slab_ids": [1], "slots": [1], "generations": [1], "checksums": [1], **fields}
    return blocks_pb2.Lease(**whole)


@pytest.mark.parametrize(
    "leases",
    [
        [],
        [_lease(), _lease()],
        [_lease(slots=[1, 2])],
        [_lease(checksums=[])],
        [_lease(slab_ids=[1] * 3, slots=[1] * 3, generations=[1] * 3, checksums=[1] * 3)],
        [_lease(lease_id=0)],
        [_lease(slab_ids=[], slots=[], generations=[], checksums=[])],
    ],
    ids=["none", "two", "more-slots", "no-checksums", "longer-than-asked", "no-id", "no-blocks"],
)
def test_leases_that_can_not_be(
    fake: FakeService, namespace: tuple[Store, Namespace], monkeypatch: pytest.MonkeyPatch, leases: list[Any]
) -> None:
    # b161
    store, ns = namespace
    reply = blocks_pb2.LookupAndLeaseResponse(leases=leases, boot_id=fake.boot_id)
    link = store._core.connection.link
    assert link is not None
    monkeypatch.setattr(link.blocks, "LookupAndLease", lambda request, **_: reply)
    with store.open_request(ns) as request:
        assert request.match([digest("x")]) == [request.match([digest("x")])[0]]
        assert request.match([digest("x")])[0].reason == "error"
    assert store.flush()
    if leases and leases[0].lease_id:
        assert "Release" in fake.calls, "whatever is wrong with it, a lease is given back"


def test_reservations_that_can_not_be(
    fake: FakeService, namespace: tuple[Store, Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    # b161
    store, ns = namespace
    link = store._core.connection.link
    assert link is not None
    for reply in (
        blocks_pb2.ReserveResponse(slab_ids=[1], slots=[1], generations=[1]),
        blocks_pb2.ReserveResponse(slab_ids=[1], slots=[1, 2], generations=[1], statuses=[0]),
        blocks_pb2.ReserveResponse(slab_ids=[1] * 9, slots=[1] * 9, generations=[1] * 9, statuses=[0]),
    ):
        monkeypatch.setattr(link.blocks, "Reserve", lambda request, reply=reply, **_: reply)
        with store.open_request(ns) as request:
            assert request.reserve([digest("x")]) == ["write"]
            assert request.take(digest("x")).writable


def test_one_answer_missing_from_a_commit_is_no_success(
    fake: FakeService, namespace: tuple[Store, Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    # b105
    store, ns = namespace
    link = store._core.connection.link
    assert link is not None
    monkeypatch.setattr(link.blocks, "Commit", lambda request, **_: blocks_pb2.CommitResponse(committed=[True]))
    with store.open_request(ns) as request:
        write_chain(request, [digest("c", 0), digest("c", 1)])
        assert store.flush()
        assert request.report().blocks_committed == 0
        assert request.report().commits_dropped == 2


def test_cancelled_at_every_stage(fake: FakeService, namespace: tuple[Store, Namespace]) -> None:
    # b064: requests that end after 0, 1, 2, ... steps, in any way, leave nothing.
    store, ns = namespace
    chain = digest("cancel", 0) + digest("cancel", 1)
    steps: list[Callable[[Any], object]] = [
        lambda r: r.match([chain]),
        lambda r: r.reserve([chain], 2),
        lambda r: write_chain(r, [digest("cancel", 0), digest("cancel", 1)]),
        lambda r: r.ensure_ahead(3),
        lambda r: r.match([chain, chain]),
    ]
    for round_ in range(60):
        request: Any = store.open_request(ns)
        for step in steps[: round_ % 6]:
            step(request)
        if round_ % 3 == 0:
            request.close()
        elif round_ % 3 == 1:
            request = None
    request = None
    gc.collect()
    assert store.flush()
    assert wait_for(lambda: store.stats()["open_requests"] == 0)
    assert store.flush()
    assert (fake.held, fake.leases) == (set(), {})
    assert store.stats()["local_blocks"] == 0
    assert store.stats()["queued_jobs"] == 0


def test_open_requests_are_listed_with_their_age(namespace: tuple[Store, Namespace]) -> None:
    # b068
    store, ns = namespace
    requests = [store.open_request(ns) for _ in range(3)]
    time.sleep(0.02)
    assert store.stats()["open_requests"] == 3
    assert store.stats()["oldest_request_s"] >= 0.02
    for request in requests:
        request.close()
    assert store.stats()["open_requests"] == 0


def test_close_commits_what_is_queued_and_ends_the_threads(fake: FakeService) -> None:
    before = threading.active_count()
    store = connect(fake.address, config=FAST)
    ns = store.namespace_for(identity(), plan)
    with store.open_request(ns) as request:
        write_chain(request, [digest("last")])
    store.close()
    assert digest("last") in fake.committed
    assert not fake.held
    for call in (lambda: store.open_request(ns), lambda: store.flush(), lambda: request.take()):
        with pytest.raises(ClosedError):
            call()
    store.close()
    request.close()
    # The service's own pool keeps its threads.
    assert wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("kvstore-")])
    assert threading.active_count() >= before


def test_close_of_a_store_whose_service_hangs_is_bounded(fake: FakeService) -> None:
    store = connect(fake.address, config=FAST)
    ns = store.namespace_for(identity(), plan)
    fake.hang("Commit", "WriteBlocks", "Reserve", "Release", "Abort")
    request = store.open_request(ns)
    for i in range(50):
        request.commit([(request.take(), digest("h", i), NO_PARENT)])
    started = time.monotonic()
    request.close()
    assert time.monotonic() - started < 0.1
    store.close(0.5)
    assert time.monotonic() - started < 3


def test_unmap_requests_are_answered_without_mappings(opened: Open) -> None:
    heard: list[session_pb2.SessionRequest] = []

    def session(requests: Any, context: grpc.ServicerContext) -> Any:
        next(requests)
        yield session_pb2.SessionResponse(
            welcome=session_pb2.Welcome(session_id=b"S" * 16, boot_id=b"B" * 16, protocol_version=1)
        )
        yield session_pb2.SessionResponse(unmap=session_pb2.Unmap(slab_ids=[3, 4]))
        yield session_pb2.SessionResponse(downgrade=session_pb2.Downgrade(slab_ids=[5]))
        heard.extend(requests)

    again = FakeService()
    again.Session = session  # type: ignore[method-assign]
    again.start()
    try:
        store = opened(again.address)
        assert wait_for(lambda: len(heard) == 2)
        store.close()
        assert [m.WhichOneof("message") for m in heard] == ["slabs_unmapped", "slabs_downgraded"]
        assert list(heard[0].slabs_unmapped.slab_ids) == [3, 4]
    finally:
        again.stop()


def test_models_must_be_attached_first(namespace: tuple[Store, Namespace]) -> None:
    store, _ = namespace
    with pytest.raises(UsageError, match="attach"):
        store.cache(None)
    with pytest.raises(UsageError, match="attach"):
        store.prewarm("text")
    store.weights_changed()
    store.detach(object())


def test_delegation_to_the_hook(namespace: tuple[Store, Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = namespace
    calls: list[tuple[object, ...]] = []

    class Attached:
        def __init__(self, model: object) -> None:
            self.model = model

        def cache(self, ids: object, mask: object) -> str:
            return f"cache of {self.model}"

        def prewarm(self, text: object, *, pin: bool) -> str:
            return f"warm {pin}"

        def weights_changed(self) -> None:
            calls.append(("changed", self.model))

        def detach(self) -> None:
            calls.append(("detach", self.model))

    stub = SimpleNamespace(attach=lambda store, model, tokenizer, **options: Attached(model))
    monkeypatch.setitem(sys.modules, "kvstore_client.hook", stub)
    monkeypatch.setattr(kvstore_client, "hook", stub, raising=False)
    one, two = "one", "two"
    store.attach(one)
    assert store.cache(None) == "cache of one"
    store.attach(two, codec="passthrough")
    with pytest.raises(UsageError, match="2 models"):
        store.prewarm("text")
    assert store.prewarm("text", pin=True, model=two) == "warm True"
    store.weights_changed()
    store.detach(one)
    assert store.cache(None) == "cache of two"
    store.close()
    assert calls == [("changed", one), ("changed", two), ("detach", one), ("detach", two)]
