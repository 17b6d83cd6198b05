"""The command: bad options, a whole run on a tiny model, and what happens when time is over or a codec fails."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from kvstore.demo import models
from kvstore.demo.claims import Row
from kvstore.demo.errors import OptionError
from kvstore.fidelity import cli, play
from kvstore.fidelity.models import cut_windows
from kvstore.fidelity.settings import Settings, registered_codecs
from kvstore.fidelity.stage import Stage

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer = models.load("tiny", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["/nowhere"], "MODEL /nowhere: there is no config.json; expected a transformers folder"),
        (["--codecs", "int8,int3"], "--codecs int3: expected of passthrough, int8"),
        (["--variants", "odd"], "--variants odd: expected of plain, bias, scaled"),
        (["--device", "tpu"], "--device tpu: expected cpu, cuda or cuda:N"),
        (["--tokens", "4095"], "--tokens 4095: expected at least two windows, so 4096 to"),
        (["--window", "63"], "--window 63: expected 64 to"),
        (["--greedy", "-1"], "--greedy -1: expected 0 (not) to"),
        (["--max-minutes", "0"], "--max-minutes 0: expected more than 0"),
        (["--text", "/nowhere.txt"], "--text /nowhere.txt: that is no file"),
        (["--json", "out.txt"], "--json out.txt: expected a file name that ends with .json"),
        (["--plot", "out.jpg"], "--plot out.jpg: expected a file name that ends with .png"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert "Traceback" not in printed


def test_what_only_the_model_or_the_text_shows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("Too short.")
    binary.write_bytes(b"\xff\xfe\xff")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    sizes = ["--tokens", "256", "--window", "128"]
    for arguments, text in (
        ([str(folder), *sizes, "--text", str(short)], "--tokens 256: the text has 10 tokens; expected 256 or more"),
        ([str(folder), *sizes, "--text", str(binary)], "it can't be read as UTF-8"),
        ([str(broken), *sizes], "it can't be loaded"),
        ([str(folder), "--window", "9000", "--tokens", "18000"], "--window 9000: the model has 8192 positions"),
        ([str(folder), *sizes, "--device", "cuda:99"], "--device cuda:99: torch"),
    ):
        assert cli.main(arguments) == 2
        assert text in capsys.readouterr().err


def measured(folder: Path, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "out.json"
    sizes = ("--tokens", "160", "--window", "80")
    code = cli.main([str(folder), *sizes, "--json", str(target), *options])
    return code, json.loads(target.read_text())


@pytest.mark.timeout(60)
def test_a_whole_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the product: an embedded service, attached models, blocks."""
    picture = tmp_path / "out.png"
    code, results = measured(
        folder, tmp_path, "--codecs", "passthrough,int8", "--variants", "plain,scaled", "--greedy", "4", "--plot",
        str(picture),
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert picture.exists()
    assert results["command"] == (
        "kvstore fidelity tiny --codecs passthrough,int8 --tokens 160 --window 80 --variants plain,scaled --greedy 4"
    )
    rows = results["rows"]
    codecs = {(row["name"], row["variant"]): row for row in rows if row["measure"] == "codec" and row["how"] == "steps"}
    prompts = {
        (row["name"], row["variant"]): row for row in rows if row["measure"] == "codec" and row["how"] == "prompt"
    }
    assert set(prompts) == {("int8", "plain"), ("int8", "scaled")}
    for key, row in prompts.items():
        assert row["positions"] == 158
        # The newest tokens of a pass are exact to each other.
        assert row["kl_mean"] < codecs[key]["kl_mean"]
    assert set(codecs) == {(name, variant) for name in ("passthrough", "int8") for variant in ("plain", "scaled")}
    for (name, _), row in codecs.items():
        # Two windows, without the first position of each.
        assert row["positions"] == 158
        if name == "passthrough":
            assert row["kl_mean"] <= 1e-9
            assert row["top1"] == 1
            assert row["bits"] == 32
        else:
            assert 1e-5 < row["kl_mean"] < 0.01
            assert row["bits"] == 8.25
            assert row["note"].startswith("text ")
    peers = {row["name"] for row in rows if row["measure"] == "peer"}
    assert {"bf16", "fp8 e4m3", "KIVI 2 bit, groups of 32", "rotated Lloyd-Max 3 bit"} <= peers
    layers = {row["name"]: row["errors"] for row in rows if row["measure"] == "layers" and row["variant"] == "plain"}
    assert set(layers) >= {"passthrough", "int8", "bf16"}
    assert max(layers["passthrough"]) == 0
    assert all(0 < error < 0.05 for error in layers["int8"])
    # A scale a channel takes the factors out again: what a scale a token can't.
    bad = {row["variant"]: row["kl_mean"] for row in rows if row.get("name") == "int4 a token and head"
           and row["measure"] == "peer"}  # fmt: skip
    assert bad["scaled"] > 3 * bad["plain"]
    assert codecs["int8", "scaled"]["kl_mean"] < 2 * codecs["int8", "plain"]["kl_mean"]
    greedy = [row for row in rows if row["measure"] == "greedy" and row["name"] == "passthrough"]
    assert [row["equal_until"] for row in greedy] == [4, 4]
    assert not [row for row in rows if row["measure"] == "failed"]
    assert all(claim["holds"] for claim in results["claims"] if claim["name"].startswith("passthrough"))
    assert "ours, int8" in printed


@pytest.mark.timeout(60)
def test_a_codec_that_fails_is_a_row_and_the_others_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.fidelity.measures import Cut
    from kvstore.fidelity.ours import Ours

    logits = Ours.logits

    def broken(self: Ours, ids: torch.Tensor, cut: Cut) -> Any:
        if self.codec == "int8":
            raise RuntimeError("no room")
        yield from logits(self, ids, cut)

    monkeypatch.setattr(Ours, "logits", broken)
    code, results = measured(folder, tmp_path, "--variants", "plain", "--no-peers", "--greedy", "0", "--codecs",
                             "int8,passthrough")  # fmt: skip
    assert code == 1
    failed = [row for row in results["rows"] if row["measure"] == "failed"]
    assert [(row["what"], row["error"]) for row in failed] == [("int8, steps", "RuntimeError: no room")]
    assert [row["name"] for row in results["rows"] if row["measure"] == "codec"] == ["passthrough"]


def settings(**fields: Any) -> Settings:
    return Settings(**{
        "folder": Path(), "text_file": None, "codecs": ("int8",), "variants": ("plain", "bias"), "tokens": 256,
        "window": 128, "device": "cpu", "peers": False, "greedy": 0, "needle": False, "max_minutes": 10.0, **fields,
    })  # fmt: skip


def test_variants_share_the_time_that_is_left() -> None:
    now = 0.0
    with Progress(disable=True) as progress:
        stage = Stage(settings(), progress, peers=0, caches=0, clock=lambda: now)
        stage.begin_variant("plain")
        now = 299.0
        assert not stage.out_of_time()
        now = 300.0
        assert stage.out_of_time()
        stage.begin_variant("bias")
        now = 599.0
        assert not stage.out_of_time()
        now = 600.0
        assert stage.out_of_time()
        assert stage.over


def test_codecs_are_those_that_are_registered() -> None:
    assert {"passthrough", "int8"} <= set(registered_codecs())
    assert cli.check_options(
        model=None, codecs="", tokens=8192, window=2048, text=None, variants="", device="cuda", peers=True, greedy=0,
        needle=False, max_minutes=1.0,
    ).codecs == registered_codecs()  # fmt: skip


def test_windows_follow_one_another() -> None:
    _, tokenizer = models.load("tiny", None)
    body = "".join(chr(97 + index % 26) for index in range(300))
    windows = cut_windows(tokenizer, body, 3, 100)
    assert [tuple(window.shape) for window in windows] == [(1, 100)] * 3
    assert tokenizer.decode(torch.cat(windows, dim=1)[0]) == body
    with pytest.raises(OptionError, match="the text has 300 tokens; expected 400"):
        cut_windows(tokenizer, body, 4, 100)


def test_windows_begin_as_the_tokenizer_begins_every_text() -> None:
    class Beginning:
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            ids = [10 + index for index in range(len(text))]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    windows = cut_windows(Beginning(), "x" * 30, 2, 10)
    assert [window[0].tolist() for window in windows] == [[1, *range(10, 19)], [1, *range(19, 28)]]


def test_rows_so_far_are_kept_after_each_variant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that is over before a variant leaves a row that says so."""
    from rich.console import Console

    kept: list[int] = []

    def keep(rows: list[Row]) -> None:
        kept.append(len(rows))

    monkeypatch.setattr(play, "_ALIKE_TOKENS", 16)
    rows = play.play(settings(folder=folder, codecs=(), max_minutes=1e-9), Console(quiet=True), keep)
    assert kept == [len(rows) - 1]
    skipped = [(row["what"], row["variant"], row["reason"]) for row in rows if row["measure"] == "skipped"]
    assert skipped == [
        ("further windows", "plain", "out of time after 1 (--max-minutes)"),
        ("all", "bias", "out of time (--max-minutes)"),
    ]
