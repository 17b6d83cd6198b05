"""Claims are computed from rows and nothing else: hand-made rows, on the bar and beside it."""

import json
import math
from pathlib import Path

import pytest

from kvstore.bench.claims import MIB, claims_from, not_measured
from kvstore.bench.shapes import SHAPES
from kvstore.demo.claims import Claim

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "measure": "run",
    "cut_short": False,
    "ms": 100.0,
    "ms_per_token": 10.0,
    "kv_bytes": 1000,
    "kv_peak_bytes": 1000,
    "peak": 2000,
}


def run(arm: str, name: str, **fields: object) -> dict:
    return {**RUN, "arm": arm, "run": name, **fields}


def only(rows: list[dict], part: str) -> Claim:
    found = [claim for claim in claims_from(rows) if part in claim.name]
    assert len(found) == 1, [claim.name for claim in found]
    return found[0]


def test_no_rows_no_claims() -> None:
    assert claims_from([]) == []
    assert len(not_measured([])) == len(set(not_measured([]))) == 16


def test_a_claim_has_the_keys_of_the_results_file() -> None:
    rows = [run("dynamic", "1x10000x1"), run("int8", "1x10000x1")]
    assert {"name", "value", "unit", "bar", "holds"} <= set(claims_from(rows)[0].to_json())


@pytest.mark.parametrize(("bytes_", "holds"), [(515, True), (516, False)])
def test_kv_bytes_count_at_their_worst(bytes_: int, holds: bool) -> None:
    rows = [run("dynamic", "1x1x2048"), run("int8", "1x1x2048", kv_bytes=400), run("int8", "1x1x2048", kv_bytes=bytes_)]
    claim = only(rows, "1x1x2048, int8: KV bytes")
    assert claim.value == bytes_ / 1000
    assert claim.holds is holds


def test_a_time_is_against_the_faster_of_the_two_dynamic_caches() -> None:
    slow, quick = run("dynamic", "1x10000x1", ms=400.0), run("dynamic-flash", "1x10000x1", ms=100.0)
    for rows in ([slow, quick], [quick, slow]):
        claim = only([*rows, run("int8", "1x10000x1", ms=120.0)], "1x10000x1, int8: time")
        assert claim.value == 1.2
        assert not claim.holds


def test_the_peak_is_against_what_dynamic_cache_holds() -> None:
    rows = [run("dynamic", "1x1x2048", kv_peak_bytes=9000), run("int8", "1x1x2048", kv_peak_bytes=561)]
    claim = only(rows, "reserve-ahead")
    assert claim.value == 0.561
    assert not claim.holds


@pytest.mark.parametrize(("ms", "holds"), [(10.0, True), (10.01, False)])
def test_ms_a_token_is_what_both_took_in_turns(ms: float, holds: bool) -> None:
    rows = [
        {"measure": "turns", "arm": arm, "run": "1x1x2048", "ms_per_token": value}
        for arm, value in (("dynamic-flash", 10.0), ("int8", ms))
    ]
    # Those that ran one after the other say nothing about it.
    rows += [run("dynamic", "1x1x2048"), run("int8", "1x1x2048", ms_per_token=1.0)]
    assert only(rows, "both eager").holds is holds
    assert all("eager" not in claim.name for claim in claims_from(rows[1:]))


def test_a_run_that_was_cut_short_counts_for_nothing() -> None:
    rows = [run("dynamic", "1x1x2048"), run("int8", "1x1x2048", cut_short=True, ms_per_token=0.1)]
    assert claims_from(rows) == []


@pytest.mark.parametrize(("peak", "holds"), [(1614.0, True), (1614.1, False)])
def test_a_prompts_peak_has_a_bar_made_of_measurements(peak: float, holds: bool) -> None:
    rows = [
        run("no-cache", "1x10000x1", peak=1000 * MIB),
        run("dynamic", "1x10000x1", kv_bytes=1000 * MIB),
        run("int8", "1x10000x1", peak=peak * MIB),
    ]
    claim = only(rows, "peak above weights")
    assert claim.bar == pytest.approx(1614.0)
    assert claim.holds is holds


@pytest.mark.parametrize(("last", "holds"), [(6000, True), (7000, False)])
def test_the_peak_grows_linearly(last: int, holds: bool) -> None:
    peaks = {"1x10000x1": 1000, "1x20000x1": 2000, "1x60000x1": last}
    assert only([run("int8", name, peak=peak) for name, peak in peaks.items()], "growth").holds is holds


def test_long_prompts_that_failed_are_counted() -> None:
    rows = [run("int8", "1x20000x1"), {"measure": "run-failed", "arm": "int8", "run": "1x60000x1", "error": "no"}]
    claim = only(rows, "runs that failed")
    assert (claim.value, claim.holds) == (1.0, False)


def second(tokens: int, cold: float, warm: float, first: bool = False, added: int = 0) -> dict:
    return {
        "measure": "second-worker",
        "tokens": tokens,
        "first": first,
        "cold_ms": cold,
        "warm_ms": warm,
        "shared_bytes_added": added,
    }


@pytest.mark.parametrize(("step", "bar", "holds"), [(20.0, 0.35, False), (31.0, 0.36, True), (None, 0.35, False)])
def test_a_second_worker_may_take_a_share_or_a_step(step: float | None, bar: float, holds: bool) -> None:
    rows = [second(10000, 100, 36), second(10000, 100, 90, first=True)]
    rows.append({"measure": "eager-step", "tokens": 10000, "step_ms": step})
    claim = only(rows, "second worker, 10000")
    assert claim.value == pytest.approx(0.36)
    assert claim.bar == pytest.approx(bar)
    assert claim.holds is holds


def test_one_byte_added_is_one_too_many() -> None:
    assert not only([second(10000, 1, 1), second(60000, 1, 1, added=1)], "shared bytes").holds


@pytest.mark.parametrize(("local", "rate", "bar"), [(10.0, 1e6, 13.0), (1.0, 1e5, 13.0)])
def test_a_fetched_step_is_bound_by_the_bus_or_by_the_step(local: float, rate: float, bar: float) -> None:
    row = {"measure": "placement-step", "step_ms": 13.0, "local_step_ms": local, "history_bytes": 1000}
    rows = [{**row, "first": False, "pinned_bytes_per_s": rate}]
    claim = only(rows, "ms/token")
    assert claim.bar == pytest.approx(bar)
    assert claim.holds


@pytest.mark.parametrize(("kl", "holds"), [(1e-5, True), (1.1e-5, False), (math.nan, False)])
def test_divergence(kl: float, holds: bool) -> None:
    rows = [
        {"measure": "fidelity", "how": "given", "kl_mean": kl},
        {"measure": "fidelity", "how": "free", "kl_mean": 1},
    ]
    assert only(rows, "mean KL").holds is holds


@pytest.mark.parametrize(
    ("equal", "transport", "holds"), [(True, "fd", True), (False, "fd", False), (True, "bytes", False)]
)
def test_mappings_are_mappings(equal: bool, transport: str, holds: bool) -> None:
    assert only([{"measure": "mapping", "equal": equal, "transport": transport}], "slabs whose").holds is holds


@pytest.mark.parametrize(
    ("faulted", "others", "holds"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_only_the_writer_may_fault(faulted: bool, others: bool, holds: bool) -> None:
    rows = [{"measure": "read-only", "faulted": faulted, "others_unharmed": others}]
    assert only(rows, "read-only mapping").holds is holds


def test_merged_parts_are_never_mixed_and_the_worst_counts() -> None:
    good = [run("dynamic", "1x10000x1", part=0), run("int8", "1x10000x1", part=0, ms=90.0)]
    bad = [run("dynamic", "1x10000x1", part=1, ms=50.0), run("int8", "1x10000x1", part=1)]
    assert only([*good, *bad], "time against").value == 2.0
    assert claims_from([good[0], bad[1]]) == []


def test_claims_of_the_results_file_follow_from_its_rows() -> None:
    path = ROOT / "benchmarks" / "results" / "seed.json"
    if not path.exists():
        pytest.skip("no results file yet: it takes a GPU")
    results = json.loads(path.read_text())
    computed = [claim.to_json() for claim in claims_from(results["rows"], SHAPES[results["shape"]])]
    assert results["claims"] == computed
