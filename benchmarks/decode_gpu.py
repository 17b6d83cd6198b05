"""Times the CUDA kernels against torch on one GPU: decode, host time a layer, prompts over a history, fetching.

Arms are interleaved, medians of at least 30, L2 flushed before each; bytes are those a kernel must read once. The
error column is the relative RMS against float32 attention on the dequantized cache. `--json` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from kvstore_kernels.attention import decode_attention, prefill_attention
from kvstore_kernels.codecs import Calibrator, get_codec
from kvstore_kernels.gpu import split
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

# Rows, query heads, KV heads, head dim, tokens.
SHAPES = [
    (8, 32, 8, 128, 32768),
    (32, 16, 16, 128, 2048),
    (1, 32, 8, 128, 131072),
    (1, 32, 8, 128, 32768),
    (1, 16, 16, 128, 10240),
    (1, 16, 16, 128, 2048),
    (1, 16, 16, 128, 256),
]
# The seed's model: Qwen-1.8B.
LAYERS, HEADS, DIM = 24, 16, 128


class Case:
    """A filled table of one layer, or of several that share one content, on the GPU."""

    def __init__(
        self, codec: str, rows: int, kv_heads: int, dim: int, tokens: int, *, layers: int = 1, room: int = 0
    ) -> None:
        layout = BlockLayout.create(
            codec, layers=layers, kv_heads=kv_heads, k_dim=dim, v_dim=dim, dtype="bfloat16"
        )  # fmt: skip
        calibrator = Calibrator(codec, layers=layers, kv_heads=kv_heads, k_dim=dim)
        sample = torch.randn(1, kv_heads, 512, dim) + 1
        for layer in range(layers):
            calibrator.observe(layer, sample)
        self.codec = get_codec(codec)(layout, calibrator.finish("benchmark"))
        self.scaling, self.layers = dim**-0.5, layers
        each = -(-(tokens + room) // layout.block_tokens)
        slab = Slab.allocate(layout.block_bytes, rows * each, device="cuda")
        self.table = BlockTable(rows)
        # Scattered: neighbours in a row aren't neighbours in memory.
        order = torch.randperm(rows * each).tolist()
        for row in range(rows):
            for index in range(each):
                self.table.append_block(row, slab, order[row * each + index])
        for row in range(rows):
            for first in range(0, tokens, 8192):
                k, v = self.fresh(1, min(8192, tokens - first), kv_heads, dim)
                one = self.table.select_rows([row])
                for layer in range(layers):
                    self.codec.write(layer, k, v, one, [(0, first)])
            self.table.set_tokens(row, tokens)
        self.bytes = rows * tokens * kv_heads * (2 * dim + 4 if codec == "int8" else 4 * dim)

    @staticmethod
    def fresh(rows: int, tokens: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (rows, kv_heads, tokens, dim)
        return torch.randn(shape, device="cuda").bfloat16() + 1, torch.randn(shape, device="cuda").bfloat16()

    def decode(self, query: torch.Tensor, layer: int = 0) -> torch.Tensor:
        return decode_attention(query, self.codec, layer, self.table, scaling=self.scaling)

    def error(self, query: torch.Tensor, out: torch.Tensor) -> float:
        """Of the last row, against float32 attention on what the blocks hold."""
        row = self.table.rows - 1
        k, v = self.codec.read(0, self.table, row)
        group = query.shape[1] // k.shape[0]
        scores = torch.einsum("hgd,htd->hgt", query[row, :, 0].float().unflatten(0, (-1, group)), k) * self.scaling
        expected = torch.einsum("hgt,htd->hgd", scores.softmax(-1), v).flatten(0, 1)
        return float((out[row, 0].float() - expected).norm() / expected.norm())


def medians(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Microseconds of device time of each, interleaved, L2 flushed before."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        for _ in range(3):
            action()
    for _ in range(repeats):
        for name, action in actions.items():
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            before.record()
            action()
            after.record()
            torch.cuda.synchronize()
            found[name].append(before.elapsed_time(after) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def decode_rows(programs: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    for rows, query_heads, kv_heads, dim, tokens in SHAPES:
        shape = f"{rows}x{query_heads}x{kv_heads}x{dim}x{tokens}"
        query = torch.randn(rows, query_heads, 1, dim, device="cuda").bfloat16()
        k, v = (torch.randn(rows, kv_heads, tokens, dim, device="cuda").bfloat16() for _ in range(2))
        sdpa = partial(F.scaled_dot_product_attention, query, k, v, enable_gqa=query_heads != kv_heads)
        for codec in ("int8", "passthrough"):
            case = Case(codec, rows, kv_heads, dim, tokens)
            for most in programs:
                with programs_a_processor(most):
                    # The plan is made anew with another bound.
                    case.table.view_cache.clear()
                    out = case.decode(query)
                    times = medians({"ours": partial(case.decode, query), "sdpa": sdpa}, repeats)
                yield {
                    "what": "decode",
                    "shape": shape,
                    "codec": codec,
                    "programs": most,
                    "us": round(times["ours"], 1),
                    "sdpa_us": round(times["sdpa"], 1),
                    "ratio": round(times["sdpa"] / times["ours"], 2),
                    "tb_s": round(case.bytes / times["ours"] / 1e6, 2),
                    "error": float(f"{case.error(query, out):.2e}"),
                }
            del case, out
        del k, v, sdpa
        torch.cuda.empty_cache()


@contextmanager
def programs_a_processor(most: int) -> Iterator[None]:
    before = split.PROGRAMS
    split.PROGRAMS = most
    yield
    split.PROGRAMS = before


def host_rows(steps: int) -> Iterator[dict[str, Any]]:
    """Host microseconds a layer of an eager step: append and attend, against two torch.cat and SDPA."""
    for rows, tokens in ((1, 100), (8, 100)):
        fresh = Case.fresh(rows, 1, HEADS, DIM)
        query = torch.randn(rows, HEADS, 1, DIM, device="cuda").bfloat16()
        start = Case.fresh(rows, tokens, HEADS, DIM)
        native = [list(start) for _ in range(LAYERS)]

        def native_step(native: list[Any] = native, fresh: Any = fresh, query: torch.Tensor = query) -> None:
            for kept in native:
                kept[0] = torch.cat([kept[0], fresh[0]], dim=-2)
                kept[1] = torch.cat([kept[1], fresh[1]], dim=-2)
                out = F.scaled_dot_product_attention(query, kept[0], kept[1], scale=DIM**-0.5, is_causal=False)
                out.transpose(1, 2).contiguous()

        actions: dict[str, Callable[[], None]] = {"native": native_step}
        for codec in ("int8", "passthrough"):
            case = Case(codec, rows, HEADS, DIM, tokens, layers=LAYERS, room=steps + 64)

            def our_step(case: Case = case, fresh: Any = fresh, query: torch.Tensor = query) -> None:
                at = case.table.tokens(0)
                for row in range(case.table.rows):
                    case.table.set_tokens(row, at + 1)
                targets = [(0, at)] * case.table.rows
                for layer in range(LAYERS):
                    case.codec.write(layer, fresh[0], fresh[1], case.table, targets)
                    case.decode(query, layer)

            actions[codec] = our_step
        found: dict[str, list[float]] = {name: [] for name in actions}
        for step in range(steps):
            for name, action in actions.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                action()
                if step >= 5:
                    found[name].append((time.perf_counter() - began) * 1e6 / LAYERS)
        for name, times in found.items():
            yield {"what": "host", "rows": rows, "arm": name, "us_a_layer": round(statistics.median(times), 1)}


def prompt_rows(repeats: int) -> Iterator[dict[str, Any]]:
    """A prompt's append; questions and chunks over a history."""
    for codec in ("int8", "passthrough"):
        empty = Case(codec, 1, HEADS, DIM, 0, room=10_240)
        k, v = Case.fresh(1, 10_000, HEADS, DIM)
        write = partial(empty.codec.write, 0, k, v, empty.table, [(0, 0)])
        yield {"what": "append 10000", "codec": codec, "us": round(medians({"": write}, repeats)[""], 1)}
        case = Case(codec, 1, HEADS, DIM, 60_000)
        for length in (1, 8, 32, 100, 512, 2048):
            query = torch.randn(1, HEADS, length, DIM, device="cuda").bfloat16()
            k, v = Case.fresh(1, length, HEADS, DIM)
            if length <= 32:
                action: Callable[[], object] = partial(case.decode, query)
            else:
                action = partial(
                    prefill_attention, query, k, v, case.codec, 0, case.table, history=[60_000], scaling=DIM**-0.5
                )
            flops = 4 * HEADS * DIM * length * (60_000 + length / 2)
            us = medians({"": action}, max(5, repeats // 3))[""]
            yield {
                "what": "over 60000",
                "codec": codec,
                "queries": length,
                "us": round(us, 1),
                "tflop_s": round(flops / us / 1e6, 1),
            }


def fetch_rows() -> Iterator[dict[str, Any]]:
    """A decode step of all layers over 10k tokens in pinned host memory, against the plain rate of the same bytes."""
    local = Case("int8", 1, HEADS, DIM, 10_240, layers=LAYERS)
    slab = local.table.entry(0, 0).slab
    pinned = Slab.allocate(slab.slot_bytes, slab.slots, pinned=True)
    pinned.data.copy_(slab.data)
    away = BlockTable(1)
    for slot in range(slab.slots):
        away.append_block(0, pinned, slot)
    away.set_tokens(0, 10_240)
    query = torch.randn(1, HEADS, 1, DIM, device="cuda").bfloat16()
    whole = pinned.data[: slab.slots * slab.slot_bytes]

    def step(table: BlockTable) -> None:
        for layer in range(LAYERS):
            decode_attention(query, local.codec, layer, table, scaling=DIM**-0.5)

    def plain() -> None:
        slab.data.copy_(whole, non_blocking=True)

    for name, action in (("fetched", partial(step, away)), ("local", partial(step, local.table)), ("copy", plain)):
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        ms = statistics.median(times[2:]) * 1e3
        yield {"what": "fetch", "arm": name, "ms": round(ms, 2), "gb_s": round(whole.numel() / ms / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, nargs="*", default=[split.PROGRAMS], help="bounds to try")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--parts", nargs="*", default=["host", "decode", "prompt", "fetch"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "host": partial(host_rows, 60),
        "decode": partial(decode_rows, arguments.programs, arguments.repeats),
        "prompt": partial(prompt_rows, arguments.repeats),
        "fetch": fetch_rows,
    }
    rows = []
    with torch.inference_mode():
        for name in arguments.parts:
            for row in parts[name]():
                rows.append(row)
                print(json.dumps(row), flush=True)
    if arguments.json is not None:
        device = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
