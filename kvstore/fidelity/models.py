"""The model in fp32, and a text as windows of token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.demo import texts
from kvstore.demo.errors import OptionError


def load_model(folder: Path, device: str) -> tuple[Any, Any]:
    """Model (fp32, eval, on `device`, no TF32 anywhere) and tokenizer of a transformers folder. OptionError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if device != "cpu" and torch.device(device).index not in range(torch.cuda.device_count()):
        raise OptionError(
            f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here; expected one of "
            "those: give --device cpu, or run it where `nvidia-smi` shows the GPU, with a CUDA build of torch"
        )
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # Its bar would stand in the middle of ours.
    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        model: Any = load(folder, dtype=torch.float32, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(
            f"MODEL {folder}: it can't be loaded ({why}); expected a transformers folder with config.json, weights and "
            "tokenizer: save one there with save_pretrained()"
        ) from error
    return model.to(device).eval(), tokenizer


def check_window(model: Any, window: int) -> None:
    """OptionError when the model has fewer positions than a window."""
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    if limit and window > limit:
        raise OptionError(f"--window {window}: the model has {limit} positions; give --window {limit} or less")


def read_text(path: Path | None) -> texts.Text:
    """The demo's text, or a file's. OptionError for a file that is no text; DemoError without the demo's."""
    if path is None:
        return texts.find_text()
    try:
        body = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--text {path}: it can't be read as UTF-8 ({error}); expected a file with prose") from error
    return texts.Text(body, path.name, "")


def cut_windows(tokenizer: Any, body: str, count: int, size: int) -> list[torch.Tensor]:
    """`count` windows of the text in a row, int64 [1, size] each. OptionError for a text that is too short.

    Where the tokenizer begins every text with a token of its own, each window begins with it, too.
    """
    prefix = _beginning(tokenizer)
    ids = [int(token) for token in tokenizer(body, add_special_tokens=False, verbose=False)["input_ids"]]
    step = size - len(prefix)
    if len(ids) < count * step:
        raise OptionError(
            f"--tokens {count * size}: the text has {len(ids)} tokens; expected {count * step} or more: give fewer "
            "--tokens, or a longer --text"
        )
    return [torch.tensor([[*prefix, *ids[at : at + step]]]) for at in range(0, count * step, step)]


def _beginning(tokenizer: Any) -> Sequence[int]:
    found: list[int] = list(tokenizer("")["input_ids"])
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in found else []
