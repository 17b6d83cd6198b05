"""Claims are computed from rows and nothing else: hand-made rows, on the bar and beside it."""

import math

import pytest

from kvstore.demo.claims import Claim, claims_from, not_measured, percentile


def only(rows: list[dict], part: str) -> Claim:
    found = [claim for claim in claims_from(rows) if part in claim.name]
    assert len(found) == 1, [claim.name for claim in found]
    return found[0]


def first(case: str, seconds: float, arm: str = "int8") -> dict:
    return {"measure": "first-token", "arm": arm, "case": case, "first_token_s": seconds}


def test_no_rows_no_claims() -> None:
    assert claims_from([]) == []
    assert len(not_measured([])) > 15


def test_claim_names_are_unique() -> None:
    assert len(set(not_measured([]))) == len(not_measured([]))


@pytest.mark.parametrize(("warm", "holds"), [(0.5, True), (0.51, False)])
def test_warm_first_token_is_compared_by_medians(warm: float, holds: bool) -> None:
    rows = [first("cold", 5.0), first("cold", 4.0), first("cold", 60.0), first("cold", 5.0, "native")]
    rows += [first("warm", warm), first("warm", 9.0), first("warm", 0.1)]
    claim = only(rows, "warm worker")
    assert claim.value == pytest.approx(warm / 5.0)
    assert claim.holds is holds


def test_native_rows_are_not_ours() -> None:
    assert claims_from([first("cold", 5.0, "native"), first("warm", 0.1)]) == []


@pytest.mark.parametrize(
    ("head_dim", "stored", "holds"), [(64, 53, True), (64, 54, False), (128, 51, True), (128, 52, False)]
)
def test_stored_bytes_have_a_bar_per_head_dim(head_dim: int, stored: int, holds: bool) -> None:
    row = {"measure": "bytes", "codec": "int8", "head_dim": head_dim, "stored_bytes": stored, "native_bytes_16bit": 100}
    claim = only([row, {**row, "codec": "passthrough", "stored_bytes": 200}], f"head dim {head_dim}")
    assert claim.value == stored / 100
    assert claim.holds is holds


@pytest.mark.parametrize(("stored", "holds"), [(47, True), (48, False), (94, False), (46, False)])
def test_stored_once_is_exactly_once(stored: int, holds: bool) -> None:
    rows = [{"measure": "stored", "case": "at the same moment", "blocks_stored": stored, "blocks_distinct": 47}]
    assert only(rows, "same moment").holds is holds


def test_too_few_blocks_in_one_row_are_not_hidden_by_another() -> None:
    row = {"measure": "stored", "case": "batch", "blocks_distinct": 10}
    assert not only([{**row, "blocks_stored": 10}, {**row, "blocks_stored": 9}], "batch of equal").holds


@pytest.mark.parametrize(("value", "holds"), [(1.1, True), (1.099, False), (math.nan, False)])
def test_decode_speed_must_reach_its_bar(value: float, holds: bool) -> None:
    rows = [{"measure": "decode-pair", "ratio": value}]
    assert only(rows, "decode speed").holds is holds


@pytest.mark.parametrize(("value", "holds"), [(1.03, True), (1.031, False)])
def test_cold_overhead_is_a_median_of_ratios(value: float, holds: bool) -> None:
    rows = [{"measure": "cold-pair", "ratio": ratio} for ratio in (0.5, value, 7.0)]
    assert only(rows, "cold prompts").holds is holds


def test_one_wrong_text_is_a_fault() -> None:
    rows = [{"measure": "text", "codec": "passthrough", "equal": equal} for equal in (True, True, False)]
    claim = only(rows, "passthrough texts")
    assert (claim.value, claim.holds, claim.wrong) == (1, False, True)


def test_a_missed_speed_is_no_fault() -> None:
    assert not only([{"measure": "lookup", "p50_ms": 1.01}], "LookupAndLease").wrong


@pytest.mark.parametrize(("reused", "holds"), [([192, 1, 64, 80], True), ([192, 0, 64, 80], False)])
def test_every_row_of_a_batch_must_reuse(reused: list[int], holds: bool) -> None:
    assert only([{"measure": "batch", "reused": count} for count in reused], "fewest tokens").holds is holds


def test_stopped_server_compares_both_arms() -> None:
    row = {"measure": "stopped-server", "median_ms": 80.0, "p99_ms": 100.0}
    rows = [{**row, "arm": "undisturbed"}, {**row, "arm": "stopped", "p99_ms": 151.0}]
    assert only(rows, "median token gap").holds
    assert not only(rows, "p99 token gap").holds
    assert claims_from(rows[:1]) == []


def test_kill_needs_the_slowest_return() -> None:
    row = {"measure": "kill", "problems": 0}
    rows = [{**row, "case": "mid-write", "back_s": 0.2}, {**row, "case": "mid-write", "back_s": 1.2}]
    rows += [{**row, "case": "mid-read", "back_s": 1.0}]
    assert not only(rows, "mid-write").holds
    assert only(rows, "mid-read").holds
    assert only(rows, "broken invariants").holds
    assert not only([*rows, {**row, "case": "stopped", "back_s": 0.0, "problems": 1}], "broken invariants").holds


@pytest.mark.parametrize(("warnings", "holds"), [([1, 1, 1], True), ([1, 0, 1], False), ([1, 2, 1], False)])
def test_an_outage_makes_one_warning(warnings: list[int], holds: bool) -> None:
    rows = [{"measure": "fault", "equal": True, "warns": True, "warnings": count} for count in warnings]
    rows += [{"measure": "fault", "equal": True}]
    assert only(rows, "warnings").holds is holds
    assert only(rows, "texts changed").holds


def test_quota_counts_only_limited_namespaces() -> None:
    rows = [{"measure": "quota", "held_bytes": 10, "quota_bytes": limit} for limit in (10, 0, 9)]
    assert only(rows, "quota").value == 1


def test_foreign_hits_are_a_fault() -> None:
    claim = only([{"measure": "second-model", "foreign_hits": 64}], "other model")
    assert claim.wrong
    assert not claim.holds


def test_json_has_the_fields_of_the_results_file() -> None:
    claim = only([{"measure": "lookup", "p50_ms": 0.4}], "LookupAndLease").to_json()
    assert claim == {
        "name": "LookupAndLease of 512 blocks, p50",
        "value": 0.4,
        "unit": "ms",
        "direction": "<=",
        "bar": 1.0,
        "holds": True,
    }


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([5.0], 0.5, 5.0), ([1, 2, 3, 4], 0.5, 2), (list(range(1, 101)), 0.99, 99)]
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
