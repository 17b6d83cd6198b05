"""Claims, tables and the picture are computed from rows and nothing else: hand-made rows, on the bar and beside it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvstore.demo.claims import Claim
from kvstore.fidelity import report
from kvstore.fidelity.claims import BARS, claims_from, not_measured
from kvstore.fidelity.plot import draw, worst_of_each
from kvstore.fidelity.results import make_results

ROOT = Path(__file__).resolve().parents[2]


def codec(name: str = "int8", variant: str = "plain", **fields: Any) -> dict[str, Any]:
    row = {
        "measure": "codec", "name": name, "variant": variant, "how": "steps", "bits": 8.25, "kl_mean": 1e-4,
        "kl_p99": 1e-3, "kl_max": 0.1, "top1": 0.995, "perplexity_change": 0.0001,
    }  # fmt: skip
    return {**row, **fields}


def only(rows: list[dict[str, Any]], part: str) -> Claim:
    found = [claim for claim in claims_from(rows) if part in claim.name]
    assert len(found) == 1, [claim.name for claim in claims_from(rows)]
    return found[0]


def test_no_rows_no_claims() -> None:
    assert claims_from([]) == []
    assert claims_from([codec("some-other")]) == []
    assert not_measured([codec("int8")]) == ["passthrough", "k8v4", "int4", "k4v3", "k4v2"]


def test_a_codec_has_four_claims() -> None:
    claims = claims_from([codec()])
    assert [(claim.unit, claim.direction, claim.bar, claim.holds) for claim in claims] == [
        ("bits", "<=", 8.3, True),
        ("%", "<=", 0.5, True),
        ("nats", "<=", 0.0002, True),
        ("%", ">=", 99.0, True),
    ]
    assert set(claims[0].to_json()) == {"name", "value", "unit", "direction", "bar", "holds"}


@pytest.mark.parametrize(
    ("part", "field", "on", "beside"),
    [
        ("bits", "bits", 8.3, 8.31),
        ("change of perplexity", "perplexity_change", 0.005, 0.00501),
        ("change of perplexity", "perplexity_change", -0.005, -0.00501),
        ("mean KL", "kl_mean", 0.0002, 0.00021),
        ("top-1", "top1", 0.99, 0.9899),
    ],
)
def test_the_worst_variant_counts(part: str, field: str, on: float, beside: float) -> None:
    for value, holds in ((on, True), (beside, False), (math.nan, False)):
        for order in (1, -1):
            rows = [codec(), codec(variant="scaled", **{field: value})][::order]
            claim = only(rows, part)
            assert claim.holds is holds, (value, claim)
            if not math.isnan(value) and field != "bits":
                assert "plain" in claim.name
                assert "scaled" in claim.name


def test_a_prompt_and_steps_are_claims_of_their_own() -> None:
    rows = [codec(how="prompt", kl_mean=1e-4), codec(kl_mean=3e-4), codec(variant="bias", how="prompt", kl_mean=1.5e-4)]
    prompt, steps = (
        only(rows, part) for part in ("64, worst of plain, bias: mean", "step by step, worst of plain: mean")
    )
    assert (prompt.value, prompt.holds, steps.value, steps.holds) == (1.5e-4, True, 3e-4, False)
    assert len(claims_from(rows)) == 7


def test_rows_of_others_are_no_claim_of_ours() -> None:
    assert only([codec(), codec(measure="peer", kl_mean=1.0)], "mean KL").holds


def test_passthrough_must_be_exact() -> None:
    fields = {"bits": 32.0, "kl_mean": 1e-12, "perplexity_change": 1e-9, "top1": 1.0}
    assert all(claim.holds for claim in claims_from([codec("passthrough", **fields)]))
    inexact = claims_from([codec("passthrough", **{**fields, "kl_mean": 2e-9})])
    assert [claim.name for claim in inexact if claim.wrong and not claim.holds] == [
        "passthrough, step by step, worst of plain: mean KL"
    ]
    assert not any(claim.wrong for claim in claims_from([codec()]))


def test_every_bar_is_lower_the_more_bits_there_are() -> None:
    bars = list(BARS.values())
    assert bars == sorted(bars, key=lambda each: -each.bits)
    assert [each.kl for each in bars] == sorted(each.kl for each in bars)


def test_tables_put_ours_first_and_variants_together() -> None:
    rows = [
        codec("int8", "plain"), codec("int8", "bias"), codec("x", "plain", measure="peer", bits=16.0),
        codec("k8v4", "plain", bits=6.38), codec("x", "bias", measure="peer", bits=16.0),
        {"measure": "layers", "name": "int8", "variant": "bias", "errors": [0.01, 0.2, 0.03, 0.04]},
        {"measure": "skipped", "what": "all", "variant": "scaled", "reason": "no k_proj\nat all"},
    ]  # fmt: skip
    lines = report.cache_lines(rows)
    assert [(line[0], line[1]) for line in lines] == [
        ("ours, int8", "plain"), ("ours, int8", "bias"), ("ours, k8v4", "plain"), ("x", "plain"), ("x", "bias"),
    ]  # fmt: skip
    assert lines[1][-1] == "1: 20.0 %, 3: 4.0 %, 2: 3.0 %"
    assert all(len(line) == len(report.CACHES_HEAD) for line in lines)
    assert report.left_out_lines(rows) == [["all", "scaled", "no k_proj"]]
    assert [title for title, _, _ in report.tables(rows)] == ["Beside the same model unquantized", "Left out"]


def test_numbers_found_are_counted_by_cache() -> None:
    rows = [
        {"measure": "needle", "name": "int8", "variant": "plain", "depth": depth, "found": found}
        for depth, found in ((0.1, True), (0.5, False), (0.9, True))
    ]
    assert report.needle_lines(rows) == [["int8", "plain", "2 of 3", "0.1 yes, 0.5 no, 0.9 yes"]]


def test_the_picture(tmp_path: Path) -> None:
    rows = [codec(), codec(variant="scaled", kl_mean=0.0), codec("x", "bias", measure="peer", kl_mean=0.3)]
    assert worst_of_each(rows)["int8"]["variant"] == "plain"
    assert draw(rows, tmp_path / "out.png", "a title")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not draw([codec(bits=32.0)], tmp_path / "none.png", "fp32 only")
    assert not (tmp_path / "none.png").exists()


def test_a_results_file_has_the_keys_of_the_others() -> None:
    results = make_results([codec()], device="cpu", command="kvstore fidelity", commit="abc")
    assert set(results) == {"name", "device", "versions", "commit", "created", "command", "rows", "claims"}
    assert results["claims"] == [claim.to_json() for claim in claims_from([codec()])]
    json.dumps(results)


def test_claims_of_the_results_file_follow_from_its_rows() -> None:
    path = ROOT / "benchmarks" / "results" / "fidelity.json"
    if not path.exists():
        pytest.skip("no results file yet: kvstore fidelity --json benchmarks/results/fidelity.json")
    results = json.loads(path.read_text())
    assert results["claims"] == [claim.to_json() for claim in claims_from(results["rows"])]
