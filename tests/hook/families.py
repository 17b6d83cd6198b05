"""Families of models: tiny ones with random weights, and what each does on the cache. `docs/families.md` is made of it.

The window of sliding layers is shorter than the prompts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from kvstore_client.hook import UnsupportedModelError, attach
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

VOCABULARY = 128
WINDOW = 24
PROMPT, SHORTER, ANSWER = 150, 97, 24
# Largest difference of two logits over the spread of all, where both compute in fp32 on the same numbers.
SAME = 2e-3
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
_SLIDING = {"sliding_window": WINDOW}
_HALF = {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2}
_EVERY_SECOND = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
# Name in the table -> model type and its own settings. Those up to "falcon" and the two behind must be served.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _GROUPED),
    "Mistral, sliding": ("mistral", {**_GROUPED, **_SLIDING}),
    "Qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "Qwen2, sliding": ("qwen2", {**_HALF, "num_key_value_heads": 2}),
    "Qwen3": ("qwen3", _GROUPED),
    "Qwen3-MoE": ("qwen3_moe", {**_GROUPED, **_MOE, "decoder_sparse_step": 1}),
    "Gemma": ("gemma", _GROUPED),
    "Gemma 2": ("gemma2", {**_GROUPED, **_SLIDING, **_EVERY_SECOND, "query_pre_attn_scalar": 16}),
    "Gemma 3": ("gemma3_text", {**_GROUPED, **_SLIDING, **_EVERY_SECOND, "query_pre_attn_scalar": 16}),
    "Phi-3": ("phi3", {"num_key_value_heads": 2}),
    "Phi-3, sliding": ("phi3", {"num_key_value_heads": 2, **_SLIDING}),
    "gpt-oss": ("gpt_oss", {**_GROUPED, **_SLIDING, **_EVERY_SECOND, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "Granite": ("granite", {"num_key_value_heads": 2}),
    "OLMo 2": ("olmo2", {"num_key_value_heads": 2}),
    "GPT-2": ("gpt2", _GPT2),
    "GPT-NeoX": ("gpt_neox", {}),
    "Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False, "parallel_attn": True}),
    "Cohere 2": ("cohere2", {**_SLIDING, **_EVERY_SECOND, "num_key_value_heads": 2}),
    "DeepSeek-V3, latents": ("deepseek_v3", {**_LATENT, **_ROUTED, "q_lora_rank": 32}),
    "DeepSeek-V2, latents": ("deepseek_v2", {**_LATENT, **_ROUTED, "q_lora_rank": None}),
    "OLMo 3": ("olmo3", {**_SLIDING, **_EVERY_SECOND, "num_key_value_heads": 2}),
    "OLMoE": ("olmoe", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": ("smollm3", {"num_key_value_heads": 2}),
    "GLM-4": ("glm4", _GROUPED),
    "Phi": ("phi", {}),
    "Phi-3.5-MoE": ("phimoe", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "StarCoder2, sliding": ("starcoder2", {"num_key_value_heads": 2, **_SLIDING}),
    "EXAONE 4": ("exaone4", {**_SLIDING, **_EVERY_SECOND, "num_key_value_heads": 2}),
    "Seed-OSS": ("seed_oss", _GROUPED),
    "Nemotron": ("nemotron", {"num_key_value_heads": 2}),
    "StableLM": ("stablelm", {"num_key_value_heads": 2}),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BLOOM": ("bloom", {"n_layer": 4, "n_head": 4}),
    "MPT": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "use_cache": True}),
    "GPT-J": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "CodeGen": ("codegen", {**_GPT2, "rotary_dim": 8, "n_inner": 96}),
    "GPT-BigCode": ("gpt_bigcode", _GPT2),
    "BioGPT": ("biogpt", {}),
    "DiffLlama": ("diffllama", {"num_key_value_heads": 2}),
    "Llama 4": ("llama4_text", {**_GROUPED, "num_local_experts": 2, "intermediate_size_mlp": 96}),
    "Qwen3-Next": ("qwen3_next", {**_GROUPED, **_MOE, **_LINEAR}),
    "Mamba-2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}),
}  # fmt: skip
# Of those that attend on blocks and of those that get tensors.
BLOCKS, TENSORS, REFUSED = "blocks", "tensors", "refused"


@dataclass(slots=True)
class Row:
    """A line of the table. `served`: BLOCKS, TENSORS or REFUSED; `why` it isn't the first. The others: "yes", "no", or
    "native" where the call ran on the model's own cache. `int8`: largest change of a logit, over the spread of all.
    """

    family: str
    served: str
    why: str = ""
    passthrough: str = ""
    warm: str = ""
    batch: str = ""
    beam: str = ""
    crop: str = ""
    assisted: str = ""
    int8: float | None = None


def make_model(family: str) -> Any:
    """The tiny model of a family, fp32, on the CPU; always the same."""
    kind, own = FAMILIES[family]
    settings = {**_BASE, **own}
    config = AutoConfig.for_model(kind)
    for name, value in settings.items():
        # Names that a family has, and no others: some of them would be properties.
        if name in vars(config) or name in own:
            config.__dict__[name] = value
    # Again, so that what is derived is derived from these.
    config = type(config)(**{name: value for name, value in settings.items() if name in vars(config) or name in own})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def measure(family: str, store: Any) -> Row:
    """Everything about one family, through `store`."""
    model = make_model(family)
    prompt = _ids(1, PROMPT, 1)
    native = {
        "plain": _generate(model, prompt),
        "beam": _tokens(model, prompt, num_beams=3),
        "batch": _tokens(model, *_padded()),
        "assisted": _tokens(model, prompt, prompt_lookup_num_tokens=3),
    }
    before = dict(model.__dict__)
    try:
        attachment = attach(store, model, codec="passthrough")
    except UnsupportedModelError as error:
        return Row(family, REFUSED, str(error).partition("): ")[2] or str(error).partition(") ")[2] or str(error))
    row = Row(family, TENSORS if attachment.plan.gathers else BLOCKS, attachment.plan.gathers)
    with attachment:
        row.passthrough = _verdict(store, native["plain"], _generate(model, prompt))
        store.flush()
        row.warm = _verdict(store, native["plain"], _generate(model, prompt))
        if row.warm == "yes" and store.last_report.reused_tokens < PROMPT // 2:
            row.warm = "no reuse"
        row.batch = _verdict(store, native["batch"], _tokens(model, *_padded()))
        row.beam = _verdict(store, native["beam"], _tokens(model, prompt, num_beams=3))
        row.assisted = _verdict(store, native["assisted"], _tokens(model, prompt, prompt_lookup_num_tokens=3))
        row.crop = "yes" if _crops(model, attachment) else "no"
    assert model.__dict__.keys() == before.keys(), "detach() left something behind"
    with attach(store, model, codec="int8"):
        _generate(model, prompt)
        store.flush()
        found = _generate(model, prompt)
        row.int8 = _difference(native["plain"][1][:1], found[1][:1])
    return row


def _ids(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = _ids(2, PROMPT, 2), torch.ones(2, PROMPT, dtype=torch.int64)
    ids[1, : PROMPT - SHORTER], mask[1, : PROMPT - SHORTER] = 0, 0
    return ids, mask


def _generate(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [ANSWER] and the logits that each was chosen from [ANSWER, vocabulary]."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, use_cache=True,
    )  # fmt: skip
    tokens, logits = out.sequences[0, ids.shape[1] :], torch.cat(out.logits)
    if hasattr(out.past_key_values, "close"):
        out.past_key_values.close()
    return tokens, logits


def _tokens(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | str:
    """New tokens [rows, ANSWER]; what the call raises where the family can't do it, attached or not."""
    mask = torch.ones_like(ids) if mask is None else mask
    try:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0,
            use_cache=True, **options,
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return out[:, ids.shape[1] :]


def _verdict(store: Any, native: Any, found: Any) -> str:
    if isinstance(native, str):
        return "native can't" if isinstance(found, str) else "no"
    if isinstance(native, tuple):
        same = torch.equal(native[0], found[0]) and _difference(native[1], found[1]) <= SAME
    else:
        same = not isinstance(found, str) and torch.equal(native, found)
    if not same:
        return "no"
    return "yes" if store.last_report.path == "kvstore" else "native"


def _difference(native: torch.Tensor, found: torch.Tensor) -> float:
    return float((native - found).abs().max() / native.std())


@torch.no_grad()
def _crops(model: Any, attachment: Any) -> bool:
    """Logits after a text was cropped across a block's border and went on otherwise, beside a native cache's."""
    text, other = _ids(1, PROMPT, 3), _ids(1, 40, 4)
    logits = []
    for cache in (DynamicCache(), attachment.cache(text[:, :1])):
        _feed(model, text, 0, cache)
        # The native cache of a model with windows can't always go back: it is fed anew instead.
        keep = PROMPT - 70
        if isinstance(cache, DynamicCache):
            cache = DynamicCache()
            _feed(model, text[:, :keep], 0, cache)
        else:
            cache.crop(-70)
        logits.append(_feed(model, other, keep, cache))
        if hasattr(cache, "close"):
            cache.close()
    return _difference(logits[0], logits[1]) <= SAME


def _feed(model: Any, ids: torch.Tensor, past: int, cache: Any) -> torch.Tensor:
    import inspect

    placed = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        placed["position_ids"] = torch.arange(past, past + ids.shape[1])[None]
    mask = torch.ones(1, past + ids.shape[1], dtype=torch.int64)
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **placed).logits[0]


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = [
        "family",
        "served",
        "passthrough equals native",
        "warm",
        "padded batch",
        "beams",
        "crop",
        "assisted",
        "int8",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        int8 = "" if row.int8 is None else f"{100 * row.int8:.1f} %"
        cells = [row.family, row.served, row.passthrough, row.warm, row.batch, row.beam, row.crop, row.assisted, int8]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = [f"- {row.family}: {row.why}" for row in rows if row.why]
    return "\n".join([*lines, "", "Why not on blocks:", "", *reasons])


def quiet() -> None:
    """Without what transformers and the hook say about models like these."""
    for name in ("transformers", "kvstore_client"):
        logging.getLogger(name).setLevel(logging.ERROR)
