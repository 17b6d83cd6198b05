"""A worker process of the benchmark: `python -m kvstore.bench.worker FD`.

As the demo's: one JSON command a line on stdin, one JSON answer a line on descriptor FD, ends when stdin does.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from kvstore.bench import arms, blocks, models
from kvstore.bench.arms import NATIVE, Meter, backends, native_cache
from kvstore.bench.turns import TurnClock, Turns, in_turns
from kvstore.demo.program import CommandProgram
from kvstore.fidelity.variants import make_variant

# A turn takes a second at most; a prompt's first one may compile.
_TURN_S = 120.0
_RATE_BYTES = 512 * 2**20
_RATE_REPEATS = 5


class WorkerProgram(CommandProgram):
    """The commands.

    `_attached` holds, for each arm of ours, its store, its attachment and its copy of the model (weights shared).
    `_kept` is the last run's cache: it holds its memory until `drop`.
    """

    def __init__(self, answers: int) -> None:
        super().__init__(answers)
        self._attached: dict[str, tuple[Any, Any, Any]] = {}
        self._stores: dict[str, Any] = {}
        self._kept: Any = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._device = torch.device("cpu")
        self._meter = Meter(self._device)
        self._base: int | None = None

    # -- setting up -------------------------------------------------------------------------------------------

    def load(self, device: str, shape: str = "", model: str = "", folder: str | None = None) -> dict[str, Any]:
        """Makes the model of a shape, or loads the demo's model of a name (fp32), and runs it once."""
        start = time.perf_counter()
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._meter = Meter(self._device)
        if shape:
            self._model = models.make(shape, self._device)
        else:
            self._model, self._tokenizer = models.load(model, Path(folder) if folder else None, self._device)
        # Libraries take their workspaces with the first pass; those are nobody's cache.
        arms.forward_without_cache(self._model, self._ids(1, 64, 0), self._meter)
        self._base = self._meter.settle()
        # What is there now stays: collecting it again before each run would take most of a second.
        gc.freeze()
        parameters = [*self._model.parameters(), *self._model.buffers()]
        return {
            "seconds": time.perf_counter() - start,
            "weights_bytes": sum(tensor.nbytes for tensor in parameters),
            "base_bytes": self._base,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "",
        }

    def attach(
        self, arm: str, codec: str, address: str, name: str, budget: int, variant: str = "plain"
    ) -> dict[str, Any]:
        """Attaches a copy of the model, or of a variant of it, to the service at `address` ("embedded": one in this
        process, on its device).
        """
        from kvstore_client import connect

        if address not in self._stores:
            on_device: dict[str, Any] = {}
            if address == "embedded" and self._device.type == "cuda":
                on_device = {"device": str(self._device), "budget": budget}
            self._stores[address] = connect(address, name=name, required=True, **on_device)
        store = self._stores[address]
        start = time.perf_counter()
        copy = make_variant(variant, self._model)
        attachment = store.attach(copy, self._tokenizer, codec=codec)
        self._attached[arm] = (store, attachment, copy)
        namespace = attachment.namespace()
        gc.collect()
        gc.freeze()
        stats = store.stats()
        return {
            "attach_s": time.perf_counter() - start,
            "address": store.address,
            "transport": stats["transport"],
            "transport_reason": stats["transport_reason"],
            "block_bytes": namespace.layout.block_bytes,
            "plan": blocks.digest(namespace.plan.to_bytes()),
            "origin": namespace.plan.origin,
        }

    # -- runs -------------------------------------------------------------------------------------------------

    def run(
        self, arm: str, batch: int, tokens_in: int, tokens_out: int, seed: int, bound_s: float = 600.0, room: int = 0
    ) -> dict[str, Any]:
        """One run on a prompt made from `seed`. Its cache is kept until `drop`. `room`: answer tokens that a cache of
        fixed size is made for, when those are more than `tokens_out`.
        """
        self.drop()
        ids = self._ids(batch, tokens_in, seed)
        if arm == "no-cache":
            return asdict(arms.forward_without_cache(self._model, ids, self._meter))
        if arm in NATIVE:
            length = tokens_in + max(tokens_out, room)
            with arms.backends(arm):
                measured, self._kept = arms.generate(
                    self._model, ids, tokens_out, self._meter,
                    cache=lambda: arms.native_cache(arm, self._model.config, length), base=None, bound_s=bound_s,
                )  # fmt: skip
            return asdict(measured)
        store, _, model = self._attached[arm]
        measured, self._kept = arms.generate(
            model, ids, tokens_out, self._meter, cache=None, base=self._base, bound_s=bound_s
        )
        report = store.last_report
        if report.path != "kvstore":
            raise RuntimeError(f"the request ran on the native cache: {report}")
        measured.reused = report.reused_tokens
        measured.why_no_more = "; ".join(sorted({row.why_no_more for row in report.rows if row.why_no_more}))
        measured.warnings = list(report.warnings)
        measured.worker_kv = store.stats()["local_bytes"]
        return {**asdict(measured), "local_blocks": report.local_blocks, "match_ms": report.match_ms}

    def run_in_turns(
        self, arms: list[str], tokens_in: int, tokens_out: int, seeds: list[int], chunk: int
    ) -> dict[str, list[float]]:
        """One answer of each arm, `chunk` tokens in turn. Milliseconds of each turn, by arm; their caches are gone."""
        self.drop()
        turns = Turns(len(arms), _TURN_S)
        clocks = [TurnClock(turns, player, chunk, self._meter.answered) for player in range(len(arms))]
        plays = [
            partial(self._answer, arm, self._ids(1, tokens_in, seed), tokens_out)
            for arm, seed in zip(arms, seeds, strict=True)
        ]
        # torch's choice of attention is the process's.
        with backends("dynamic-flash"):
            in_turns(plays, clocks, turns)
        return {arm: clock.chunks_ms for arm, clock in zip(arms, clocks, strict=True)}

    def _answer(self, arm: str, ids: torch.Tensor, tokens_out: int, clock: TurnClock) -> None:
        native = arm in NATIVE
        model = self._model if native else self._attached[arm][2]
        options = {"past_key_values": native_cache(arm, model.config, 0)} if native else {}
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens_out,
                do_sample=False,
                logits_processor=LogitsProcessorList([clock]),
                **options,
            )
        if output.shape[1] - ids.shape[1] != tokens_out:
            raise RuntimeError(f"{arm}: {output.shape[1] - ids.shape[1]} tokens instead of {tokens_out}")

    def drop(self) -> None:
        """Lets the last run's cache go."""
        kept, self._kept = self._kept, None
        if kept is not None and hasattr(kept, "close"):
            kept.close()
        del kept
        self._meter.settle()

    def flush(self, arm: str, timeout: float = 60.0) -> bool:
        """Waits until an arm's commits and releases have reached its service."""
        return bool(self._attached[arm][0].flush(timeout))

    def memory(self) -> dict[str, int | None]:
        """Bytes by torch in this process, and used on the whole device."""
        if self._device.type != "cuda":
            return {"reserved": None, "allocated": None, "device_used": None}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "reserved": torch.cuda.memory_reserved(self._device),
            "allocated": torch.cuda.memory_allocated(self._device),
            "device_used": total - free,
        }

    def healthy(self) -> bool:
        """Whether the device still takes work from this process. Raises what the device says when it doesn't."""
        self._meter.settle()
        torch.zeros(8, device=self._device).add_(1).sum().item()
        return True

    def pinned_rate(self) -> float | None:
        """Bytes a second from pinned host memory to the device: the best of a few copies. None on a CPU."""
        if self._device.type != "cuda":
            return None
        source = torch.zeros(_RATE_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=self._device)
        best = 0.0
        for _ in range(_RATE_REPEATS):
            self._meter.wait()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._meter.wait()
            best = max(best, _RATE_BYTES / (time.perf_counter() - start))
        return best

    # -- blocks and logits ------------------------------------------------------------------------------------

    def block_hashes(self, arm: str, tokens_in: int, seed: int) -> dict[str, Any]:
        """Hashes of the held blocks of a prompt, read through this process's own mapping."""
        return blocks.hashes(self._attached[arm][1], self._ids(1, tokens_in, seed))

    def write_read_only(self, arm: str, tokens_in: int, seed: int) -> str:
        """Writes into a leased block that is mapped read-only. Where that ends this process, there is no answer."""
        return blocks.write_read_only(self._attached[arm][1], self._ids(1, tokens_in, seed))

    def text_ids(self, tokens: int) -> list[int]:
        """Ids of a real text by the model's tokenizer."""
        from kvstore.demo import texts

        ids: list[int] = self._tokenizer(texts.find_text().body, add_special_tokens=False).input_ids[:tokens]
        return ids

    def teacher_forced(
        self,
        arm: str,
        ids: list[int],
        prefill: int,
        target: str,
        keep: str | None = None,
        given: str | None = None,
        nudge: float = 0.0,
    ) -> int:
        """Logits of `ids` from position `prefill` - 1 on, written to `target` (.npy, float32); their number."""
        _, attachment, model = self._attached[arm]
        files = [Path(name) if name else None for name in (keep, given)]
        how = blocks.Forced(Path(target), prefill, keep=files[0], given=files[1], nudge=nudge)
        return blocks.teacher_forced(attachment, model, torch.tensor([ids], device=self._device), how)

    def close(self) -> None:
        """Drops the cache and ends the connections."""
        self.drop()
        for store in self._stores.values():
            store.close()

    def _ids(self, batch: int, tokens: int, seed: int) -> torch.Tensor:
        return models.prompt(self._model.config.vocab_size, batch, tokens, seed, self._device)


if __name__ == "__main__":
    WorkerProgram.main()
