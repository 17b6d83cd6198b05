"""Times the CPU attention path against transformers' DynamicCache with SDPA, layer shapes of SmolLM2-135M.

Three measurements, arms interleaved, medians: a decode step (append + attention, all layers), storing a prompt (on
top of its attention), and attention of a short question behind a stored document. The native arm does what
transformers does: torch.cat of K and V, then scaled_dot_product_attention with enable_gqa.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from kvstore_kernels.attention import decode_attention, prefill_attention
from kvstore_kernels.codecs import Calibrator, Codec, get_codec
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 30, 9, 3, 64
SCALING = DIM**-0.5


class Native:
    """What DynamicLayer.update and sdpa_attention_forward do."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys = [key.clone() for _ in range(LAYERS)]
        self.values = [value.clone() for _ in range(LAYERS)]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys[layer] = torch.cat([self.keys[layer], key], dim=-2)
        self.values[layer] = torch.cat([self.values[layer], value], dim=-2)
        out = F.scaled_dot_product_attention(
            query, self.keys[layer], self.values[layer], scale=SCALING, is_causal=False, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()


class Ours:
    """One row's blocks, in consecutive slots."""

    def __init__(self, name: str, key: torch.Tensor, value: torch.Tensor, room: int) -> None:
        layout = BlockLayout.create(
            name, layers=LAYERS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, dtype="float32"
        )  # fmt: skip
        calibrator = Calibrator(name, layers=LAYERS, kv_heads=KV_HEADS, k_dim=DIM)
        for layer in range(LAYERS):
            calibrator.observe(layer, key)
        self.codec: Codec = get_codec(name)(layout, calibrator.finish("benchmark"))
        blocks = -(-(key.shape[2] + room) // layout.block_tokens)
        slab = Slab.allocate(layout.block_bytes, blocks)
        slab.data.zero_()
        self.table = BlockTable(1)
        for slot in range(blocks):
            self.table.append_block(0, slab, slot)
        for layer in range(LAYERS):
            self.codec.write(layer, key, value, self.table, [(0, 0)])
        self.table.set_tokens(0, key.shape[2])

    def grow(self) -> None:
        self.table.set_tokens(0, self.table.tokens(0) + 1)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.codec.write(layer, key, value, self.table, [(0, self.table.tokens(0) - 1)])
        return decode_attention(query, self.codec, layer, self.table, scaling=SCALING)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def weights_walk(megabytes: int) -> Callable[[], object]:
    """Reads as much memory as the model's weights of one layer, so that the caches are as cold as in a model."""
    weights = torch.ones(megabytes << 18)
    return weights.sum


def decode(tokens: int, steps: int, walk_mb: int) -> dict[str, float]:
    key, value = torch.randn(1, KV_HEADS, tokens, DIM), torch.randn(1, KV_HEADS, tokens, DIM)
    native = Native(key, value)
    arms = {name: Ours(name, key, value, steps + 8) for name in ("int8", "passthrough")}
    walk = weights_walk(walk_mb) if walk_mb else None
    times: dict[str, list[float]] = {"native": [], **{name: [] for name in arms}}
    for _ in range(steps):
        query = torch.randn(1, 1, QUERY_HEADS, DIM).transpose(1, 2)
        k, v = (torch.randn(1, 1, KV_HEADS, DIM).transpose(1, 2) for _ in range(2))
        for name in times:
            arm = arms.get(name)
            if arm is not None:
                arm.grow()
            spent = 0.0
            for layer in range(LAYERS):
                if walk is not None:
                    walk()
                start = time.perf_counter()
                (arm or native).attend(layer, query, k, v)
                spent += time.perf_counter() - start
            times[name].append(spent * 1e3)
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def prompt(tokens: int, repeats: int) -> dict[str, float]:
    query = torch.randn(1, tokens, QUERY_HEADS, DIM).transpose(1, 2)
    key, value = (torch.randn(1, tokens, KV_HEADS, DIM).transpose(1, 2) for _ in range(2))
    arm = Ours("int8", key, value, 0)
    store: list[float] = []
    ours: list[float] = []
    native: list[float] = []
    for repeat in range(repeats):
        layer = repeat % LAYERS
        store.append(timed(partial(arm.codec.write, layer, key, value, arm.table, [(0, 0)])))
        native.append(
            timed(
                lambda: (
                    F.scaled_dot_product_attention(query, key, value, scale=SCALING, is_causal=True, enable_gqa=True)
                    .transpose(1, 2)
                    .contiguous()
                )
            )
        )
        ours.append(timed(partial(prefill_attention, query, key, value, arm.codec, layer, None, scaling=SCALING)))
    return {
        "store_all_layers": LAYERS * statistics.median(store),
        "attention_all_layers": LAYERS * statistics.median(ours),
        "native_attention_all_layers": LAYERS * statistics.median(native),
    }


def question(tokens: int, fresh: int, repeats: int) -> dict[str, float]:
    key, value = torch.randn(1, KV_HEADS, tokens, DIM), torch.randn(1, KV_HEADS, tokens, DIM)
    arm = Ours("int8", key, value, 0)
    query = torch.randn(1, fresh, QUERY_HEADS, DIM).transpose(1, 2)
    k, v = (torch.randn(1, fresh, KV_HEADS, DIM).transpose(1, 2) for _ in range(2))
    all_k, all_v = torch.cat([key, k], dim=2), torch.cat([value, v], dim=2)
    mask = torch.ones(1, 1, fresh, tokens + fresh, dtype=torch.bool).tril(tokens)
    ours: list[float] = []
    native: list[float] = []
    for repeat in range(repeats):
        layer = repeat % LAYERS
        ours.append(timed(partial(prefill_attention, query, k, v, arm.codec, layer, arm.table, scaling=SCALING)))
        native.append(
            timed(
                lambda: F.scaled_dot_product_attention(
                    query, all_k.repeat_interleave(3, 1), all_v.repeat_interleave(3, 1), attn_mask=mask, scale=SCALING
                )
            )
        )
    return {
        "attention_all_layers": LAYERS * statistics.median(ours),
        "native_attention_all_layers": LAYERS * statistics.median(native),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of context")
    parser.add_argument("--fresh", type=int, default=100, help="tokens of the question behind the document")
    parser.add_argument("--steps", type=int, default=40, help="decode steps a measured arm takes")
    parser.add_argument("--walk-mb", type=int, default=0, help="MiB read between layers, as a model reads its weights")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: leave)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        result = {
            "decode": decode(options.tokens, options.steps, options.walk_mb),
            "prompt": prompt(options.tokens, LAYERS),
            "question": question(options.tokens, options.fresh, LAYERS),
        }
    if options.json:
        print(json.dumps({"unit": "ms, all layers", **result}, indent=2))
        return
    for name, arms in result.items():
        print(name)
        for arm, value in arms.items():
            print(f"  {arm:30s} {value:9.2f} ms")


if __name__ == "__main__":
    main()
