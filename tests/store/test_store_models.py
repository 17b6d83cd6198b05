"""Sessions and model registration."""

from __future__ import annotations

import pytest

from kvstore import errors
from kvstore.errors import (
    AccessDeniedError,
    BudgetTooSmallError,
    InvalidRequestError,
    KvstoreError,
    LayoutConflictError,
    LimitReachedError,
    NotHeldError,
    UnknownSessionError,
)
from kvstore.store import Quota, QuotaRule
from kvstore.store.events import Granted, SessionEnded, WriterChanged
from kvstore.testing import FakeWorker, StoreHarness, digest_chain, model_spec

GRPC_CODES = {
    "INTERNAL",
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
}


def test_every_error_has_a_grpc_code_and_a_row_in_the_table() -> None:
    table = errors.__doc__ or ""
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, KvstoreError)
        assert kind.code in GRPC_CODES
        (row,) = [line for line in table.splitlines() if f" {name} " in f" {line} "]
        assert f" {kind.code} " in row


def plan_of(harness: StoreHarness, worker: FakeWorker) -> bytes | None:
    return harness.store.codec_plan(worker.session_id, model_spec().fingerprint, "passthrough")


def test_b137_a_namespace_outlives_one_of_its_workers() -> None:
    harness = StoreHarness()
    first, second = harness.worker("a"), harness.worker("b")
    assert first.namespace_id == second.namespace_id
    chain = digest_chain(3)
    assert first.write(chain) == [True] * 3
    first.die()
    assert second.held(chain) == 3
    assert second.lease(chain).writers == [("a", 3)]
    assert all(second.write(digest_chain(2, "other")))
    harness.assert_clean()


def test_registering_again_changes_nothing() -> None:
    harness = StoreHarness()
    worker = harness.worker()
    again = harness.store.register_model(worker.session_id, model_spec(harness.block_bytes))
    assert again.namespace_id == worker.namespace_id
    assert harness.store.take_events() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_bytes": 128 << 10}, ["block_bytes", str(128 << 10), str(256 << 10)]),
        ({"layout_digest": b"\x07" * 32}, ["layout_digest", "07" * 32]),
        ({"block_tokens": 128}, ["block_tokens", "128", "64"]),
        ({"layers": 3}, ["layers is 3", "2"]),
    ],
    ids=["block_bytes", "layout_digest", "block_tokens", "layers"],
)
def test_b220_another_layout_of_the_same_model_is_refused_with_both_values(
    changes: dict[str, object], words: list[str]
) -> None:
    harness = StoreHarness()
    harness.worker("a")
    with pytest.raises(LayoutConflictError) as caught:
        harness.worker("b", spec=model_spec(**changes))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert harness.worker("c").namespace_id == 1
    harness.assert_clean()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": -1},
        {"layers": 1 << 31},
        {"kv_heads": 3},
        {"first_kv_head": -1},
        {"first_kv_head": 1},
        {"k_dim": 0},
        {"block_tokens": 0},
        {"block_bytes": 0},
        {"block_bytes": -8},
        {"block_bytes": 12},
        {"fingerprint": b"short"},
        {"layout_digest": bytes(33)},
        {"dtype": "int4"},
        {"codec": ""},
        {"model_name": "x" * 1000},
    ],
    ids=str,
)
def test_b161_absurd_values_of_a_model_are_refused(changes: dict[str, object]) -> None:
    harness = StoreHarness()
    harness.worker("a")
    with pytest.raises(InvalidRequestError, match="expected"):
        harness.worker("b", spec=model_spec(**changes))  # type: ignore[arg-type]
    assert len(harness.store.namespaces()) == 1


def test_b016_shards_of_unequal_layers_are_namespaces_with_counts_of_their_own() -> None:
    harness = StoreHarness(slabs=4, ledgers=2)
    first = harness.worker("rank0", spec=model_spec(layer_group="full:0-1"))
    second = harness.worker("rank1", spec=model_spec(128 << 10, layer_group="full:2-2", layers=1))
    assert first.namespace_id != second.namespace_id
    reservation = second.reserve([], anonymous=3)
    assert len(reservation.slots) == 3
    with pytest.raises(NotHeldError, match=f"namespace {second.namespace_id}"):
        harness.store.lookup(first.session_id, [(second.namespace_id, b"")])
    with pytest.raises(NotHeldError):
        harness.store.mapped(first.session_id, reservation.slab_ids[0])


def test_budget_below_one_slot_names_the_remedy() -> None:
    harness = StoreHarness(slabs=1)
    with pytest.raises(BudgetTooSmallError, match=r"budget of \d+ bytes is below one slot.*--budget"):
        harness.worker(spec=model_spec(64 << 20))


def test_the_first_codec_plan_is_kept_until_its_last_namespace_goes() -> None:
    harness = StoreHarness(slabs=2, ledgers=2, max_namespaces=1)
    first = harness.worker("a", spec=model_spec(codec_plan=b"first"))
    other = harness.worker("b", spec=model_spec(codec_plan=b"second"))
    registration = harness.store.register_model(other.session_id, model_spec(codec_plan=b"second"))
    assert (registration.codec_plan, registration.codec_plan_kept) == (b"first", False)
    assert other.namespace_id == first.namespace_id
    assert plan_of(harness, other) == b"first"
    assert harness.store.codec_plan(other.session_id, bytes(32), "passthrough") is None
    first.die()
    other.die()
    third = harness.worker("c", spec=model_spec(model="another"))
    assert plan_of(harness, third) is None
    harness.assert_clean()


def test_a_plan_is_the_tenants_own() -> None:
    harness = StoreHarness(ledgers=2)
    harness.worker("a", tenant="A", spec=model_spec(codec_plan=b"A's"))
    other = harness.worker("b", tenant="B", spec=model_spec(codec_plan=b"B's"))
    assert plan_of(harness, other) == b"B's"


@pytest.mark.parametrize("limits", [{"max_plan_bytes": 99}, {"max_plan_bytes_total": 99}], ids=["each", "all"])
def test_oversize_plans_are_refused(limits: dict[str, int]) -> None:
    harness = StoreHarness(**limits)  # type: ignore[arg-type]
    with pytest.raises(LimitReachedError, match="100 bytes"):
        harness.worker(spec=model_spec(codec_plan=bytes(100)))


def test_too_many_sessions_and_namespaces() -> None:
    harness = StoreHarness(ledgers=2, max_sessions=2, max_namespaces=1)
    first = harness.worker("a")
    with pytest.raises(LimitReachedError, match="namespaces are in use"):
        harness.worker("b", tenant="other")
    with pytest.raises(LimitReachedError, match=r"2 sessions .* --max-sessions"):
        harness.worker("c")
    first.write(digest_chain(2))
    first.die()
    # Nobody uses the old namespace: it makes room, with its slabs and its ledger.
    replacement = harness.worker("d", tenant="other")
    assert [stats.namespace_id for stats in harness.store.namespaces()] == [replacement.namespace_id]
    assert harness.store.stats().devices[0].used_bytes == 0
    harness.assert_clean()


@pytest.mark.parametrize(
    "changes", [{"session_id": b"x"}, {"instance_id": b""}, {"transport": "carrier"}, {"name": "n" * 300}], ids=str
)
def test_open_session_refuses_what_cannot_be(changes: dict[str, object]) -> None:
    harness = StoreHarness()
    values: dict[str, object] = {
        "session_id": harness.new_id(),
        "instance_id": harness.new_id(),
        "tenant": "t",
        "name": "",
        "transport": "fd",
        "transport_reason": "",
        "watched": True,
        "client_version": "1",
    }
    with pytest.raises(InvalidRequestError):
        harness.store.open_session(**{**values, **changes})  # type: ignore[arg-type]
    name = harness.store.open_session(**values)  # type: ignore[arg-type]
    assert name.startswith("worker-")
    with pytest.raises(InvalidRequestError, match="open already"):
        harness.store.open_session(**values)  # type: ignore[arg-type]


def test_a_second_connection_of_an_instance_takes_everything_over() -> None:
    harness = StoreHarness()
    worker = harness.worker("a")
    chain = digest_chain(3)
    worker.write(chain)
    lease = worker.lease(chain)
    private = worker.reserve([], anonymous=2)
    harness.events.clear()
    again = harness.worker("a2", instance_id=worker.instance_id)
    assert SessionEnded(worker.session_id, harness.events[0].reason) == harness.events[0]  # type: ignore[union-attr]
    assert Granted(again.session_id, again.namespace_id) in harness.events
    assert WriterChanged(private.slab_ids[0], again.session_id) in harness.events
    with pytest.raises(UnknownSessionError):
        worker.held(chain)
    assert len(again.read(lease)) == 3
    assert again.release(lease) == 1
    assert again.give_back(private) == 2
    assert len(harness.store.sessions()) == 1
    harness.assert_clean()
    with pytest.raises(AccessDeniedError):
        harness.worker("thief", tenant="other", instance_id=worker.instance_id)


def test_an_idle_session_ends_with_its_stream_a_busy_one_does_not() -> None:
    harness = StoreHarness()
    idle, busy = harness.worker("idle"), harness.worker("busy")
    busy.reserve([], anonymous=1)
    assert harness.store.stream_ended(idle.session_id)
    assert not harness.store.stream_ended(busy.session_id)
    # A watched session ends by the death of its process only.
    harness.store.end_lease_grace(busy.session_id, "too early")
    assert [stats.name for stats in harness.store.sessions()] == ["busy"]
    busy.die()
    assert harness.store.sessions() == []
    assert harness.store.stats().devices[0].slots_private == 0


def test_session_statistics() -> None:
    harness = StoreHarness()
    worker = harness.worker("a")
    worker.write(digest_chain(2))
    worker.reserve([], anonymous=3)
    harness.clock.advance(5)
    worker.lease(digest_chain(2))
    harness.clock.advance(2)
    (stats,) = harness.store.sessions()
    assert (stats.leases, stats.private_slots, stats.age_s, stats.oldest_lease_s) == (1, 3, 7.0, 2.0)


def test_guarantees_that_cannot_be_kept_are_refused() -> None:
    rule = QuotaRule(model="big", quota=Quota(guaranteed=1 << 40))
    harness = StoreHarness(quotas=(rule,))
    with pytest.raises(BudgetTooSmallError, match="guarantee"):
        harness.worker(spec=model_spec(model="big"))
    assert harness.store.namespaces() == []


def test_a_plan_name_stands_for_whatever_codec_it_has() -> None:
    harness = StoreHarness()
    first, second = harness.worker("a"), harness.worker("b")
    store, name = harness.store, "max_error=0.05"
    plain = model_spec(codec="int8")
    chosen = model_spec(codec="int8", codec_plan=b"chosen", plan_name=name)
    assert store.codec_plan(first.session_id, plain.fingerprint, name) is None
    ids = [store.register_model(first.session_id, spec).namespace_id for spec in (plain, chosen)]
    # The same codec, but with a plan of its own: another namespace, and neither adopts the other's plan.
    assert ids[0] != ids[1]
    assert store.codec_plan(second.session_id, plain.fingerprint, name) == b"chosen"
    assert store.codec_plan(second.session_id, plain.fingerprint, "int8") == plain.codec_plan
    late = store.register_model(second.session_id, model_spec(codec="int8", codec_plan=b"late", plan_name=name))
    assert (late.namespace_id, late.codec_plan, late.codec_plan_kept) == (ids[1], b"chosen", False)
    assert [(n.codec, n.plan_name) for n in store.namespaces() if n.codec == "int8"] == [("int8", ""), ("int8", name)]
    with pytest.raises(LayoutConflictError):
        store.register_model(second.session_id, model_spec(layout_digest=b"x" * 32, plan_name=name))
