"""The command: options, all its code paths on a CPU with a tiny model, files made one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench import cli, report
from kvstore.bench.results import make_results
from kvstore.bench.sections.fidelity import divergence
from kvstore.bench.shapes import SHAPES, parse_runs


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "tpu"], "--device tpu: expected cuda, cuda:N or cpu"),
        (["--device", "cpu"], "--device cpu: the seed's model is for a GPU; add --tiny"),
        (["--tiny", "--runs", "1x2"], "--runs 1x2: expected BATCHxTOKENS_INxTOKENS_OUT"),
        (["--tiny", "--runs", "1x0x3"], "--runs 1x0x3: expected"),
        (["--tiny", "--arms", "int8,int3"], "--arms int3: expected of dynamic"),
        (["--tiny", "--only", "all"], "--only all: expected of runs"),
        (["--tiny", "--repeats", "0"], "--repeats 0: expected 1 to 100"),
        (["--tiny", "--bound", "0"], "--bound 0: expected 1 to 600"),
        (["--tiny", "--within", "0"], "--within 0: expected 1 to"),
        (["--tiny", "--smollm2", "/nowhere"], "--smollm2 /nowhere: expected a folder"),
        (["--json", "out.txt"], "--json out.txt: expected a file name that ends with .json"),
        (["--merge", "missing.json"], "--merge missing.json: expected a file that `kvstore bench seed --json` wrote"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["seed", *arguments]) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert "Traceback" not in printed


def test_the_seed_runs_are_those_of_the_report() -> None:
    names = [run.name for run in parse_runs(",".join(SHAPES["seed"].runs))]
    assert names == ["1x1x2048", "1x10000x1", "1x20000x1", "1x60000x1", "1x10000x2048", "8x10000x32"]
    # bf16 K and V of 2048 tokens: the report's model holds 192 KiB a token.
    assert SHAPES["seed"].kv_bytes(2048) == 2048 * 192 * 1024


def bench(folder: Path, arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    # One thread a process: the tiny model's sums are too short to share.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvstore", "bench", "seed", "--tiny", "--device", "cpu", *arguments.split()]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.timeout(300)
def test_all_sections_run_without_a_gpu(tmp_path: Path) -> None:
    done = bench(tmp_path, "--repeats 1 --arms dynamic,int8,no-cache,int8-embedded --json out.json", 280)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"name", "shape", "device", "versions", "commit", "created", "command", "rows", "claims"}
    claims = {claim["name"]: claim for claim in results["claims"]}
    missed = {name for name, claim in claims.items() if not claim["holds"]}
    # A model this small says nothing about speed and relative size; everything else must hold.
    assert {name for name in missed if claims[name]["unit"] not in ("x", "ms")} == set(), missed
    rows = results["rows"]
    assert {row["arm"] for row in rows if row["measure"] == "run"} == {"dynamic", "int8", "no-cache", "int8-embedded"}
    warm = [row for row in rows if row["measure"] in ("second-worker", "placement-first-token")]
    assert all(row["cold_reused"] == 0 and row["warm_reused"] == row["tokens"] // 64 * 64 for row in warm)
    assert [row["outcome"] for row in rows if row["measure"] == "read-only"] == ["faulted: signal 11"]
    assert not [row for row in rows if "failed" in row["measure"]]


@pytest.mark.timeout(120)
def test_an_arm_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:

    done = bench(tmp_path, "--only peers --arms static,hqq8 --runs 1x8x2 --json out.json", 110)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["arm"] for row in rows if row["measure"] == "run"][:1] == ["static"]
    skipped = [row for row in rows if row["measure"] == "skipped"]
    if importlib.util.find_spec("hqq") is None:
        assert [row["reason"] for row in skipped] == ["the package hqq is not installed"]
        assert done.returncode == 0, done.stdout + done.stderr


def part(folder: Path, name: str, arm: str, **fields: str) -> Path:
    row = {
        "measure": "run", "arm": arm, "run": "1x200x1", "cut_short": False, "ms": 1.0, "ms_per_token": 1.0,
        "kv_bytes": 10, "kv_peak_bytes": 10, "peak": None, "torch_held": None, "tokens_out": 1,
    }  # fmt: skip
    results = make_results([row], device="cpu", shape="tiny", command=f"kvstore bench seed --arms {arm}", commit="abc")
    path = folder / name
    path.write_text(json.dumps({**results, **fields}))
    return path


def test_files_are_made_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [part(tmp_path, "a.json", "dynamic"), part(tmp_path, "b.json", "int8")]
    target = tmp_path / "seed.json"
    assert cli.main(["seed", "--merge", str(paths[0]), "--merge", str(paths[1]), "--json", str(target)]) == 0
    merged = json.loads(target.read_text())
    assert [(row["arm"], row["part"]) for row in merged["rows"]] == [("dynamic", 0), ("int8", 1)]
    # Rows of different calls are never compared.
    assert merged["claims"] == []
    assert "1x200x1" in capsys.readouterr().out


def test_files_of_different_devices_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [part(tmp_path, "a.json", "dynamic"), part(tmp_path, "b.json", "int8", device="another")]
    assert cli.main(["seed", "--merge", str(paths[0]), "--merge", str(paths[1])]) == 2
    assert "device differ from" in capsys.readouterr().err


def test_divergence_of_logits(tmp_path: Path) -> None:
    logits = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], dtype=np.float32))
    other = np.log(np.array([[0.5, 0.5], [0.1, 0.9]], dtype=np.float32)) + 3
    for name, values in (("a", logits), ("b", other)):
        np.save(tmp_path / f"{name}.npy", values)
    mean, largest, top = divergence(str(tmp_path / "a.npy"), str(tmp_path / "b.npy"))
    assert largest == pytest.approx(0.8 * np.log(9), rel=1e-5)
    assert mean == pytest.approx(largest / 2, rel=1e-5)
    assert top == 0.5


def test_context_bytes_are_what_torch_and_slabs_do_not_explain() -> None:
    mib = 2**20
    rows = [
        {"measure": "driver", "when": "now", "process": "worker main", "driver": 900 * mib, "reserved": 360 * mib},
        {"measure": "driver", "when": "now", "process": "service gpu", "driver": 700 * mib, "slabs": 160 * mib},
        {"measure": "driver", "when": "now", "process": "all on the device", "listed": 2},
        {"measure": "driver", "when": "then", "error": "the driver can't be asked: no such file"},
    ]
    assert [line[-1] for line in report.driver_lines(rows)] == ["540", "540", ""]
