"""The command: its figures are what a service really grants, its losses what a fidelity file says; bad input."""

import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.bench import cli
from kvstore.bench.capacity.cli import choose_codecs, service_sizes
from kvstore.bench.capacity.loss import Losses, read_losses, worst
from kvstore.bench.capacity.models import KVShape, named_shapes, read_shape
from kvstore.bench.capacity.report import NOT_MEASURED, capacity_lines, left_out_lines, make_results, remarks
from kvstore.bench.capacity.rows import ServiceSizes, capacity_row, claims_from
from kvstore.errors import BudgetTooSmallError
from kvstore.fidelity.measures import Divergence
from kvstore.fidelity.results import make_results as fidelity_results
from kvstore.fidelity.settings import registered_codecs
from kvstore.launch import ServiceProcess
from kvstore.store.sizing import GRANULE
from kvstore.store.store import Store
from kvstore.store.types import StoreConfig
from kvstore.testing import StoreHarness, model_spec
from kvstore.testing_client import ModelShape, RawClient

ODD = KVShape("odd", layers=5, kv_heads=3, k_dim=72, v_dim=80, dtype="float16")
CONFIG = {
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 384,
    "dtype": "float16",
}  # fmt: skip


def model_folder(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json; a change to None takes the field away."""
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- the figure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "codec", "mib"),
    [
        pytest.param(ODD, "int8", 48, id="odd sizes"),
        pytest.param(replace(ODD, layers=31), "passthrough", 37, id="a budget that is no multiple of a slab"),
        pytest.param(named_shapes()["smollm2-135m"], "int8", 64, id="a named shape"),
    ],
)
def test_a_service_grants_exactly_so_many_blocks(shape: KVShape, codec: str, mib: int) -> None:
    row = capacity_row(shape, codec, service_sizes(mib / 1024, "cpu", None))
    # Short: the path of a Unix socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        address = Path(folder) / "kv.sock"
        options = ("--budget", f"{mib}MiB", "--log-level", "error")
        with ServiceProcess.start(address, options=options), RawClient(address) as worker:
            namespace = worker.register(ModelShape(block_bytes=row["block_bytes"], codec=codec)).namespace_id
            granted = worker.reserve(namespace, [], row["blocks"])
            assert (len(granted.slots), granted.short_reason) == (row["blocks"], "")
            one_more = worker.reserve(namespace, [], 1)
            assert len(one_more.slots) == 0
            assert "budget" in one_more.short_reason
    assert row["tokens"] == 64 * row["blocks"] > 0


@pytest.mark.parametrize("codec", ["passthrough", "int8"])
@pytest.mark.parametrize("shape", [*named_shapes().values(), ODD], ids=lambda shape: shape.name)
@pytest.mark.parametrize(("slabs", "sessions", "fixed"), [(1, 64, 0), (16, 3, 0), (23, 64, GRANULE)])
def test_a_store_grants_exactly_so_many_blocks(
    shape: KVShape, codec: str, slabs: int, sessions: int, fixed: int
) -> None:
    sizes = ServiceSizes(slabs * GRANULE + 12345, fixed, sessions)
    row = capacity_row(shape, codec, sizes)
    harness = StoreHarness(block_bytes=row["block_bytes"])
    config = StoreConfig(budget_bytes=sizes.budget_bytes, fixed_bytes=fixed, max_sessions=sessions)
    harness.store = Store(config, create_ledger=harness.device.create_slab, clock=harness.clock)
    if "too_small" in row:
        assert (row["blocks"], row["tokens"]) == (0, 0)
        with pytest.raises(BudgetTooSmallError, match=re.escape(row["too_small"])):
            harness.worker(spec=model_spec(row["block_bytes"]))
        return
    worker = harness.worker(spec=model_spec(row["block_bytes"]))
    reservation = worker.reserve([], row["blocks"] + 1)
    assert len(reservation.slots) == row["blocks"]
    assert "budget" in reservation.short_reason
    used = harness.store.stats().devices[0].used_bytes
    assert used == fixed + row["slabs"] * row["slab_bytes"] + row["ledger_bytes"] <= sizes.budget_bytes


def test_a_row_by_hand() -> None:
    shape = KVShape("by hand", layers=2, kv_heads=1, k_dim=64, v_dim=64)
    row = capacity_row(shape, "int8", ServiceSizes(64 << 20, 0, 16))
    # A head of a block: twice 64 x 64 codes and 64 scales of 2 bytes.
    assert row["block_bytes"] == 2 * 2 * (64 * 64 + 128)
    assert row["bits"] == 8.25
    # A token of the native cache: 2 layers, K and V, 64 numbers, 2 bytes.
    assert row["native_tokens"] == (64 << 20) // 512
    assert row["ratio"] == row["tokens"] / row["native_tokens"]
    assert 1.8 < row["ratio"] < 16 / 8.25


def test_a_gpu_holds_what_the_service_takes_itself_too() -> None:
    cpu, gpu = (service_sizes(1, device, None) for device in ("cpu", "cuda"))
    assert (cpu.fixed_bytes, gpu.fixed_bytes) == (0, 2 << 20)
    assert cpu.budget_bytes == gpu.budget_bytes == 2**30


def test_a_codec_that_does_not_serve_a_shape_is_left_out() -> None:
    row = capacity_row(ODD, "int8", service_sizes(1, "cpu", None), block_tokens=65)
    assert row["measure"] == "skipped"
    assert left_out_lines([row]) == [["odd", "int8", row["reason"]]]
    assert capacity_lines([row], Losses()) == []


def test_bits_are_claimed_for_the_named_shapes() -> None:
    sizes = service_sizes(10, "cpu", None)
    tiny = KVShape("tiny", 1, 1, 8, 8)
    rows = [capacity_row(shape, "int8", sizes) for shape in (*named_shapes().values(), tiny)]
    (claim,) = claims_from(rows)
    assert (claim.value, claim.bar, claim.holds) == (8.25, 8.3, True)
    assert claims_from([capacity_row(tiny, "int8", sizes)]) == []


# -- models -------------------------------------------------------------------------------------------------------


def test_named_shapes_are_those_of_the_models() -> None:
    found = {name: (shape.layers, shape.kv_heads, shape.k_dim, shape.v_dim) for name, shape in named_shapes().items()}
    assert found == {
        "seed": (24, 16, 128, 128),
        "llama-3-8b": (32, 8, 128, 128),
        "qwen2.5-0.5b": (24, 2, 64, 64),
        "smollm2-135m": (30, 3, 64, 64),
        "gemma-3-270m": (18, 1, 256, 256),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kv_heads": 2, "k_dim": 64, "dtype": "float16"}),
        ({"num_key_value_heads": None}, {"kv_heads": 6}),
        ({"head_dim": 80}, {"k_dim": 80, "v_dim": 80}),
        ({"dtype": None, "torch_dtype": "float32"}, {"dtype": "float32"}),
        ({"dtype": None}, {"dtype": "bfloat16", "note": "config.json names no dtype: bfloat16 is assumed"}),
        ({"sliding_window": 32, "use_sliding_window": False}, {"windowed": 0}),
        ({"sliding_window": 32}, {"windowed": 4, "window": 32}),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", *["full_attention"] * 3]}, {"windowed": 1}),
        (
            {"num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None, "hidden_size": None,
             "n_layer": 3, "n_head": 5, "n_embd": 200},
            {"layers": 3, "kv_heads": 5, "k_dim": 40},
        ),
    ],
)  # fmt: skip
def test_a_shape_from_a_config(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    shape = read_shape(model_folder(tmp_path, **changes))
    assert {name: getattr(shape, name) for name in expected} == expected


def test_window_layers_are_counted_in_full_and_the_reader_is_told() -> None:
    shape = KVShape("w", layers=4, kv_heads=1, k_dim=64, v_dim=64, windowed=3, window=101)
    row = capacity_row(shape, "int8", ServiceSizes(4 << 20, 0, 16))
    # A layer's token is 256 bytes; three layers keep 100 tokens, the fourth all others.
    assert row["native_tokens"] == (4 << 20) // 1024
    assert f"up to {((4 << 20) - 3 * 100 * 256) // 256} tokens" in row["note"]
    assert any(remark.startswith("w: 3 of 4 layers look back 101 tokens") for remark in remarks([row], Losses()))


# -- losses -------------------------------------------------------------------------------------------------------


def figures(shift: float) -> dict[str, Any]:
    """What fidelity measures where logits differ by so much."""
    reference = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5]])
    found = Divergence()
    found.add(reference, reference + shift * torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0]))
    return found.summary()


def fidelity_file(folder: Path, **changes: Any) -> Path:
    rows = [
        {"measure": "model", "model": "little", "text": "Hamlet", "windows": 2, "window": 64, "layers": 2},
        {"measure": "codec", "name": "int8", "variant": "plain", "how": "steps", "bits": 8.25, **figures(0.1)},
        {"measure": "codec", "name": "int8", "variant": "bias", "how": "steps", "bits": 8.25, **figures(2.0)},
        {"measure": "codec", "name": "int8", "variant": "bias", "how": "prompt", "bits": 8.25, **figures(0.2)},
        {"measure": "codec", "name": "passthrough", "variant": "plain", "how": "steps", "bits": 16.0, **figures(0.0)},
        {"measure": "failed", "what": "passthrough", "variant": "bias", "error": "no"},
        {"measure": "peer", "name": "fp8", "variant": "plain", "bits": 8.0, **figures(0.5)},
    ]
    results = fidelity_results(rows, device="cpu", command="kvstore fidelity --window 64", commit="a" * 40)
    path = folder / "fidelity.json"
    path.write_text(json.dumps({**results, **changes}))
    return path


def test_the_worst_variant_stands_beside_the_tokens(tmp_path: Path) -> None:
    losses = read_losses(fidelity_file(tmp_path), registered_codecs())
    bias = figures(2.0)
    row = losses.of("int8")
    assert row is not None
    assert row["variants"] == ["plain", "bias"]
    assert {name: row[name] for name in ("kl_mean", "top1", "perplexity_change")} == {
        name: bias[name] for name in ("kl_mean", "top1", "perplexity_change")
    }
    assert row["top1"] < 1
    rows = [capacity_row(ODD, codec, service_sizes(1, "cpu", None)) for codec in ("int8", "passthrough")]
    int8, exact = capacity_lines(rows, losses)
    assert int8[-3:] == [f"{bias['kl_mean']:.2g}", "50.00", f"{100 * bias['perplexity_change']:+.2f}"]
    # It failed on the other variant: that must not look like a result of both.
    assert exact[-3].endswith("(plain only)")
    where = remarks(rows, losses)[1]
    assert where.startswith("loss: the worst of plain, bias of little, not of each model above; measured by ")
    assert "`kvstore fidelity --window 64` (aaaaaaaaaaaa, " in where


def test_not_a_number_is_the_worst() -> None:
    rows = [
        {"variant": name, "kl_mean": value, "top1": value, "perplexity_change": value}
        for name, value in (("a", 0.5), ("b", math.nan), ("c", -0.7))
    ]
    assert all(math.isnan(worst("int8", rows)[name]) for name in ("kl_mean", "top1", "perplexity_change"))
    del rows[1]
    found = worst("int8", rows)
    assert (found["kl_mean"], found["top1"], found["perplexity_change"]) == (0.5, -0.7, -0.7)


def test_without_a_file_nothing_is_claimed_of_losses(tmp_path: Path) -> None:
    losses = read_losses(None, registered_codecs(), default=tmp_path / "none.json")
    row = capacity_row(ODD, "int8", service_sizes(1, "cpu", None))
    (line,) = capacity_lines([row], losses)
    assert line[-3:] == [NOT_MEASURED] * 3
    assert "--fidelity FILE" in remarks([row], losses)[1]
    assert make_results([row], losses, device="cpu", command="", commit="abc")["rows"] == [row]


def test_the_checkout_s_file_is_found_by_itself(tmp_path: Path) -> None:
    losses = read_losses(None, ["int8", "int3"], default=fidelity_file(tmp_path))
    assert losses.of("int8") is not None
    assert losses.of("int3") is None


# -- the command --------------------------------------------------------------------------------------------------


def test_the_file_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    folder = tmp_path / "my-model"
    folder.mkdir()
    arguments = [str(model_folder(folder)), "--gib", "0.5", "--codecs", "int8,int8,passthrough", "--commit", "abc"]
    arguments += ["--fidelity", str(fidelity_file(tmp_path)), "--json", str(target)]
    assert cli.main(["capacity", *arguments]) == 0
    results = json.loads(target.read_text())
    assert set(results) == {"name", "device", "versions", "commit", "created", "command", "rows", "claims"}
    assert (results["name"], results["commit"]) == ("capacity", "abc")
    assert results["command"] == "kvstore bench capacity my-model --gib 0.5 --codecs int8,int8,passthrough"
    rows = [row for row in results["rows"] if row["measure"] == "capacity"]
    assert [(row["model"], row["codec"]) for row in rows] == [("my-model", "int8"), ("my-model", "passthrough")]
    assert {row["measure"] for row in results["rows"]} == {"capacity", "loss", "loss-source"}
    printed = capsys.readouterr().out
    assert f"{rows[0]['tokens']:,}" in printed
    assert "4 x 2 x 64 float16" in printed


def test_all_named_shapes_and_codecs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from kvstore.bench import cli; code = cli.main(['capacity', '--json', 'out.json']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    found = {(row["model"], row["codec"]) for row in results["rows"] if row["measure"] == "capacity"}
    assert found == {(model, codec) for model in named_shapes() for codec in registered_codecs()}
    assert all(claim["holds"] for claim in results["claims"])


def test_a_budget_below_one_slot_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity", "llama-3-8b", "--gib", "0.002", "--codecs", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "Left out" in printed
    assert "below one slot" in printed


def test_codecs_are_those_of_the_kernels() -> None:
    assert choose_codecs("") == registered_codecs()
    assert {"passthrough", "int8"} <= set(registered_codecs())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt-17"], "MODEL gpt-17: that is neither a folder nor a named shape; expected a transformers folder"),
        (["--gib", "0"], "--gib 0: expected 0.00195 to 1048576 GiB"),
        (["--gib", "-3"], "--gib -3: expected"),
        (["--gib", "nan"], "--gib nan: expected"),
        (["--gib", "inf"], "--gib inf: expected"),
        (["--codecs", "int8,int3"], "--codecs int3: expected of passthrough, int8"),
        (["--device", "tpu"], "--device tpu: expected cpu or cuda"),
        (["--max-sessions", "0"], "--max-sessions 0. Expected a value from 1 to 4096"),
        (["--json", "out.txt"], "--json out.txt: expected a file name that ends with .json"),
        (["--fidelity", "/nowhere.json"], "--fidelity /nowhere.json: expected a file that `kvstore fidelity --json`"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity", *arguments]) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'; expected a whole number of at least 1"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"hidden_size": 5}, "a head has 0 channels; expected 1 to 1024"),
        ({"head_dim": 4096}, "a head has 4096 channels"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; expected one of float32, bfloat16, float16"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list of 4 kinds"),
        ({"layer_types": ["mamba", *["full_attention"] * 3]}, "it has layers of type 'mamba'"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is set: latent attention"),
        ({"text_config": {"hidden_size": 8}}, "text_config is set: a model of several parts"),
    ],
)
def test_configs_that_say_nothing_useful(
    changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["capacity", str(model_folder(tmp_path, **changes))]) == 2
    printed = capsys.readouterr().err
    assert f"MODEL {tmp_path}: " in printed
    assert text in printed
    assert "llama-3-8b" in printed


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, None])
def test_configs_that_can_not_be_read(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert cli.main(["capacity", str(tmp_path)]) == 2
    assert f"MODEL {tmp_path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"name": "seed"}, {"rows": None}, {"rows": [{"measure": "codec", "name": "int8", "variant": "plain"}]}],
)
def test_a_file_that_is_not_of_fidelity(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fidelity_file(tmp_path, **changes)
    assert cli.main(["capacity", "--fidelity", str(path)]) == 2
    assert f"--fidelity {path}: expected a file that `kvstore fidelity --json` wrote" in capsys.readouterr().err
