"""Models of the benchmark: random weights made on the device, the same in every process; or a converted SmolLM2."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from kvstore.bench.shapes import SHAPES

_SEED = 20261201


def make(shape_name: str, device: torch.device) -> Any:
    """A Qwen2 of that shape, eval, without an end-of-text token: answers are as long as asked for."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = SHAPES[shape_name]
    make_config: Any = Qwen2Config
    config = make_config(**shape.config())
    default = torch.get_default_dtype()
    torch.manual_seed(_SEED)
    with torch.device(device):
        torch.set_default_dtype(getattr(torch, shape.dtype))
        try:
            build: Any = AutoModelForCausalLM
            model: Any = build.from_config(config)
        finally:
            torch.set_default_dtype(default)
    model = model.to(device).eval()
    model.config.name_or_path = f"bench-{shape_name}"
    for name in ("eos_token_id", "bos_token_id"):
        setattr(model.generation_config, name, None)
    model.generation_config.pad_token_id = 0
    return model


def load(name: str, folder: Path | None, device: torch.device) -> tuple[Any, Any]:
    """Model in fp32 on `device` and tokenizer, by a name of the demo's models; no TF32 anywhere."""
    from kvstore.demo import models

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model, tokenizer = models.load(name, folder, str(device))
    model.config.name_or_path = name
    return model, tokenizer


def prompt(vocabulary: int, batch: int, tokens: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random ids, int64 [batch, tokens]: the same for a seed in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(vocabulary, 30000), (batch, tokens), generator=generator).to(device)


def twin(model: Any) -> Any:
    """A copy that shares all weights: attaching one leaves the other as it is."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
