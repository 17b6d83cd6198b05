"""Tables, picture and results file, from hand-made rows."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.demo import report
from kvstore.demo.errors import OptionError
from kvstore.demo.plot import draw
from kvstore.demo.results import check_target, make_results, write_json
from kvstore.demo.stage import MIB, budget_for, tokens_per_second

FIRST = {
    "measure": "first-token",
    "worker": "worker-a",
    "arm": "int8",
    "case": "cold",
    "tokens": 3034,
    "reused": 0,
    "first_token_s": 5.0,
    "tokens_per_s": 12.0,
}
BYTES = {
    "measure": "bytes",
    "model": "m",
    "codec": "int8",
    "head_dim": 64,
    "tokens": 3008,
    "stored_bytes": 52 * MIB,
    "worker_bytes": 0,
    "native_bytes_16bit": 100 * MIB,
    "native_bytes_held": 200 * MIB,
    "native_tokens": 3008,
}
ROWS = [
    FIRST,
    {**FIRST, "first_token_s": 7.0},
    {**FIRST, "first_token_s": 6.0},
    {**FIRST, "arm": "native", "first_token_s": 4.9},
    {**FIRST, "worker": "worker-b", "case": "warm", "reused": 3008, "first_token_s": 0.25},
    BYTES,
]


def test_sharing_has_one_line_a_worker_and_cache_with_medians() -> None:
    assert report.sharing_lines(ROWS) == [
        ["worker-a", "kvstore int8", "cold", "3034", "0", "6.00", "12.0"],
        ["worker-a", "native", "cold", "3034", "0", "4.90", "12.0"],
        ["worker-b", "kvstore int8", "warm", "3034", "3008", "0.25", "12.0"],
    ]


def test_native_bytes_are_scaled_to_the_same_tokens() -> None:
    (line,) = report.bytes_lines([{**BYTES, "native_tokens": 6016}])
    assert line == ["m", "64", "3008", "52.00", "0.00", "100.00", "100.00", "0.520"]


def test_a_missed_claim_stands_out() -> None:
    claims = [{"name": "speed", "value": 1.0, "unit": "x", "direction": ">=", "bar": 1.1, "holds": False}]
    assert report.claim_lines(claims) == [["speed", "1 x", ">= 1.1", "MISSED"]]


def test_a_tie_is_called_one() -> None:
    row = {"measure": "text", "codec": "passthrough", "case": "warm", "prompt": 2, "equal": True, "first_difference": 4}
    assert report.text_lines([row]) == [["passthrough", "warm, prompt 2", "differs at token 4 (tie)"]]


def test_markdown_escapes_bars() -> None:
    assert report.to_markdown(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"


def test_rich_table_shows_every_cell() -> None:
    console = Console(width=120, record=True)
    console.print(report.to_rich("title", report.SHARING_HEAD, report.sharing_lines(ROWS)))
    text = console.export_text()
    assert all(cell in text for line in report.sharing_lines(ROWS) for cell in line)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    target = tmp_path / "demo.png"
    assert draw(ROWS, target, "title")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_rows(tmp_path: Path) -> None:
    assert not draw([FIRST], tmp_path / "demo.png", "title")
    assert not (tmp_path / "demo.png").exists()


def test_results_file_is_written_whole(tmp_path: Path) -> None:
    created = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
    results = make_results(ROWS, device="cpu", command="kvstore demo", created=created)
    target = tmp_path / "demo.json"
    write_json(results, target)
    read = json.loads(target.read_text())
    assert read == results
    assert read["created"] == "2026-11-30T12:00:00+00:00"
    assert read["versions"]["torch"]
    assert [claim["name"] for claim in read["claims"]] == [
        "warm worker's time to first token against cold",
        "int8 bytes stored against 2 bytes a number, head dim 64",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


def test_targets_are_checked_before_the_work(tmp_path: Path) -> None:
    check_target(tmp_path / "out.json", "--json", (".json",))
    (tmp_path / "folder.json").mkdir()
    for target, text in (("folder.json", "that is a folder"), ("no/out.json", "does not exist"), ("out", "ends with")):
        with pytest.raises(OptionError, match=text):
            check_target(tmp_path / target, "--json", (".json",))


@pytest.mark.parametrize(
    ("slots", "block_bytes", "slabs"),
    [(1, 700_000, 1), (2, 700_000, 1), (3, 700_000, 2), (17, 760_320, 9), (3, 3 * MIB, 6)],
)
def test_budget_holds_the_slots_and_little_more(slots: int, block_bytes: int, slabs: int) -> None:
    assert budget_for(slots, block_bytes) == slabs * 2 * MIB + MIB


def test_tokens_per_second_leaves_the_first_token_out() -> None:
    assert tokens_per_second({"times_s": [5.0, 5.1, 5.2, 5.3]}) == pytest.approx(10)
    assert tokens_per_second({"times_s": [5.0]}) == 0


def test_a_missed_figure_has_the_digits_that_show_it() -> None:
    missed = {"name": "a", "value": 1.0042, "unit": "ms", "direction": "<=", "bar": 1.0, "holds": False}
    assert report.claim_lines([missed])[0][1:] == ["1.004 ms", "<= 1", "MISSED"]
    assert report.claim_lines([missed | {"value": 0.9961, "holds": True}])[0][1] == "0.996 ms"
