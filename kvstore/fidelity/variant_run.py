"""Everything that is measured on one variant of the model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from kvstore_client import KVStoreError
from kvstore_client.hook.step import MAX_DECODE_TOKENS
from kvstore_kernels.errors import KernelError
from transformers import DynamicCache

from kvstore.demo.arms import NativeArm
from kvstore.demo.claims import Row
from kvstore.fidelity.caches import OwnCache
from kvstore.fidelity.interpose import Rounding, exact_keys_values, layer_errors, rounded
from kvstore.fidelity.measures import PROMPT, STEPS, Cut, Divergence, compare, logits_at_once, logits_in_passes, split
from kvstore.fidelity.ours import Ours
from kvstore.fidelity.peers import Scheme
from kvstore.fidelity.settings import NEEDLE_ANSWER_TOKENS, NEEDLE_DEPTHS, PROBE_TOKENS
from kvstore.fidelity.stage import Stage
from kvstore.fidelity.tasks import Needle, agreement, needles

# What a cache that doesn't serve this model raises, ours or transformers' own: a row, and the others go on.
FAILURES = (KVStoreError, KernelError, RuntimeError, ValueError, TypeError, AttributeError, ImportError, IndexError)
NO_CACHE = "native"
CUTS = {"steps": STEPS, "prompt": PROMPT}
# Groups of HQQ's 4 bits are packed in pairs, and an odd number of them can't be unpacked: no pass of one token.
_EVEN = Cut(MAX_DECODE_TOKENS, MAX_DECODE_TOKENS)
ONE_PASS, SAME_PASSES = "native, one pass", "native, same passes"


class VariantRun:
    """One variant with all caches that serve it. `model` is unattached; `close` detaches the others. `windows` says how
    many were measured.

    Invariant: what failed is in none of `_ours`, `_peers`, `_caches` any more, and its row says so; all that is left
    was measured on the same windows.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        model: Any,
        tokenizer: Any,
        store: Any,
        peers: list[Scheme],
        caches: list[OwnCache],
    ) -> None:
        self._stage = stage
        self._name = name
        self._model = model
        self._tokenizer = tokenizer
        self._ours: dict[str, Ours] = {}
        self._peers = {peer.name: peer for peer in peers}
        self._caches = {cache.name: cache for cache in caches}
        self.windows = 0
        self._seen: dict[str, Divergence] = {}
        self._seconds: dict[str, float] = {}
        for codec in stage.settings.codecs:
            stage.doing(f"{name}: attaching {codec}")
            try:
                self._ours[codec] = Ours(store, model, tokenizer, codec)
            except FAILURES as error:
                stage.fail(codec, name, error)

    def close(self) -> None:
        """Detaches all."""
        for ours in self._ours.values():
            ours.close()

    # -- logits -----------------------------------------------------------------------------------------------

    def measure_windows(self, windows: Iterable[torch.Tensor], difference: float) -> None:
        """Adds a row for each cache: as many windows as there is time for, one at least. `difference`: see variants."""
        stage = self._stage
        for ids in windows:
            if self.windows and stage.out_of_time():
                stage.skip("further windows", self._name, f"out of time after {self.windows} (--max-minutes)")
                break
            self._window(ids.to(self._model.device))
            self.windows += 1
        native = self._seen[NO_CACHE].summary()
        stage.add(
            "variant",
            variant=self._name,
            windows=self.windows,
            positions=native["positions"],
            perplexity=native["native_perplexity"],
            difference=difference,
        )
        for codec, ours in self._ours.items():
            for how in CUTS if codec != "passthrough" else ("steps",):
                reference = SAME_PASSES if codec == "passthrough" else ONE_PASS
                self._row("codec", codec, ours.bits, reference, ours.origin, how=how)
        dim = _head_dim(self._model)
        for peer in self._peers.values():
            self._row("peer", peer.name, peer.bits(dim), ONE_PASS, "rounding of K and V, simulated")
        for cache in self._caches.values():
            self._row("peer", cache.name, cache.bits, ONE_PASS, "run as it is; its newest tokens are exact")

    def _row(self, measure: str, name: str, bits: float, reference: str, note: str, how: str = "") -> None:
        seen = f"{name}, {how}" if how else name
        self._stage.add(
            measure,
            name=name,
            variant=self._name,
            how=how,
            bits=bits,
            reference=reference,
            **self._seen[seen].summary(),
            seconds=self._seconds[seen],
            note=note,
        )

    def _window(self, ids: torch.Tensor) -> None:
        stage, tokens = self._stage, ids.shape[1]
        stage.doing(f"{self._name}: unquantized")
        native = logits_at_once(self._model, ids)
        self._seen.setdefault(NO_CACHE, Divergence())
        compare(self._seen[NO_CACHE], [native], [native], ids)
        stage.done("at once", tokens)
        for codec, ours in list(self._ours.items()):
            if not self._codec(codec, ours, native, ids):
                self._ours.pop(codec).close()
        for peer in list(self._peers.values()):
            with rounded(self._model, peer.rounding, peer.group):
                if not self._compared(peer.name, [native], _once(self._model, ids), ids):
                    del self._peers[peer.name]
            stage.done("peer", tokens)
        # Slow, and only there to be compared with: one window is enough.
        for cache in list(self._caches.values()) if not self.windows else ():
            if not self._compared(cache.name, split(native, _EVEN), _through(self._model, ids, cache), ids):
                del self._caches[cache.name]
            stage.done("own cache", tokens)

    def _codec(self, codec: str, ours: Ours, native: torch.Tensor, ids: torch.Tensor) -> bool:
        """One window of one of ours, cut in each way. False if it fails."""
        if codec == "passthrough":
            # The same sums in the same order, as far as attention allows: what differs is the cache.
            cache = DynamicCache(config=self._model.config)
            reference = logits_in_passes(self._model, ids, cache)
            found = self._compared(f"{codec}, steps", reference, ours.logits(ids, STEPS), ids)
            self._stage.done("in passes", ids.shape[1])
            self._stage.done("codec", ids.shape[1])
            return found
        for how, cut in CUTS.items():
            if not self._compared(f"{codec}, {how}", split(native, cut), ours.logits(ids, cut), ids):
                return False
            self._stage.done("codec", ids.shape[1])
        return True

    def _compared(
        self, name: str, reference: Iterable[torch.Tensor], found: Iterable[torch.Tensor], ids: torch.Tensor
    ) -> bool:
        self._stage.doing(f"{self._name}: {name}")
        began = time.monotonic()
        try:
            compare(self._seen.setdefault(name, Divergence()), reference, found, ids)
        except FAILURES as error:
            self._stage.fail(name, self._name, error)
            return False
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began
        return True

    # -- layers -----------------------------------------------------------------------------------------------

    def measure_layers(self, window: torch.Tensor) -> None:
        """Adds a row of errors by layer for each of ours and each simulated scheme, on the beginning of a window."""
        stage = self._stage
        stage.doing(f"{self._name}: layers")
        ids = window[:, :PROBE_TOKENS].to(self._model.device)
        exact = exact_keys_values(self._model, ids)
        roundings: dict[str, Rounding] = {peer.name: peer.rounding for peer in self._peers.values()}
        for codec, ours in self._ours.items():
            try:
                roundings[codec] = ours.rounding(exact, ids)
            except FAILURES as error:
                stage.fail(f"{codec}, layers", self._name, error)
        del exact
        errors = layer_errors(self._model, ids, list(roundings.values()))
        for name, found in zip(roundings, errors, strict=True):
            stage.add("layers", name=name, variant=self._name, tokens=ids.shape[1], errors=found)
        stage.done("layers", ids.shape[1] * len(roundings))

    # -- tasks ------------------------------------------------------------------------------------------------

    def measure_greedy(self, window: torch.Tensor) -> None:
        """Adds a row for each codec: how long its greedy text is native's."""
        stage, tokens = self._stage, self._stage.settings.greedy
        prompt = window[0, : stage.settings.prompt_tokens].tolist()
        stage.doing(f"{self._name}: greedy, native")
        native = NativeArm(self._model).run(prompt, tokens, exact=True, gaps=True)
        stage.done("step", tokens)
        for codec, ours in self._ours.items():
            if stage.out_of_time():
                stage.skip(f"{codec}, greedy", self._name, "out of time (--max-minutes)")
                continue
            stage.doing(f"{self._name}: greedy, {codec}")
            try:
                found = ours.arm.run(prompt, tokens, exact=True)
            except FAILURES as error:
                stage.fail(f"{codec}, greedy", self._name, error)
                continue
            figures = agreement(native.tokens, native.gaps, found.tokens)
            stage.add("greedy", name=codec, variant=self._name, prompt=len(prompt), **figures)
            stage.done("step", tokens)

    def measure_needles(self, body: str) -> None:
        """Adds a row for each cache and depth, unless the model can't do it natively at any."""
        stage = self._stage
        try:
            asked = needles(self._tokenizer, body, NEEDLE_DEPTHS, stage.settings.window)
        except ValueError as error:
            stage.skip("needle", self._name, str(error))
            return
        stage.doing(f"{self._name}: needle, native")
        native = self._found(NativeArm(self._model), asked)
        if not any(native):
            stage.skip("needle", self._name, "the model can't do it with its native cache at any depth")
            return
        self._needle_rows(NO_CACHE, asked, native, native)
        for codec, ours in self._ours.items():
            if stage.out_of_time():
                stage.skip(f"{codec}, needle", self._name, "out of time (--max-minutes)")
                continue
            stage.doing(f"{self._name}: needle, {codec}")
            try:
                self._needle_rows(codec, asked, self._found(ours.arm, asked), native)
            except FAILURES as error:
                stage.fail(f"{codec}, needle", self._name, error)

    def _found(self, arm: Any, asked: list[Needle]) -> list[bool]:
        found = []
        for needle in asked:
            answer = arm.run(needle.prompt, NEEDLE_ANSWER_TOKENS)
            found.append(needle.found_in(self._tokenizer.decode(answer.tokens, skip_special_tokens=True)))
            self._stage.done("at once", len(needle.prompt))
        return found

    def _needle_rows(self, name: str, asked: list[Needle], found: list[bool], native: list[bool]) -> None:
        rows: list[Row] = [
            {"depth": needle.depth, "tokens": len(needle.prompt), "found": mine, "native_found": theirs}
            for needle, mine, theirs in zip(asked, found, native, strict=True)
        ]
        for row in rows:
            self._stage.add("needle", name=name, variant=self._name, **row)


def _once(model: Any, ids: torch.Tensor) -> Iterable[torch.Tensor]:
    # Made when it is asked for: inside what catches its errors.
    yield logits_at_once(model, ids)


def _through(model: Any, ids: torch.Tensor, cache: OwnCache) -> Iterable[torch.Tensor]:
    yield from logits_in_passes(model, ids, cache.make(model.config), _EVEN)


def _head_dim(model: Any) -> int:
    config = model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
