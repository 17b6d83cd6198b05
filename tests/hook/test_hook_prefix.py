"""Identity and look-up: digests, fingerprints, waiting for another worker, prewarm, reports."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client.errors import LocalBudgetExceeded
from kvstore_client.hook import UnsupportedInputError, attach
from kvstore_client.hook.digest import block_digest, chain_digests
from kvstore_client.hook.fingerprint import Fingerprint
from kvstore_client.hook.prefix import open_cache
from kvstore_client.hook.prompt import read_prompt


def test_a_chain_depends_on_everything_before_it() -> None:
    ids = np.arange(200, dtype=np.int64)
    chain = chain_digests(ids, 64)
    assert len(chain) == 3
    assert [len(digest) for digest in chain] == [32] * 3
    assert chain == chain_digests(ids, 64, known=chain[:2])
    changed = ids.copy()
    changed[0] += 1
    assert not set(chain) & set(chain_digests(changed, 64))
    assert chain[:2] == chain_digests(ids[:130], 64)
    variants = [
        block_digest(bytes(32), 0, ids[:64]),
        block_digest(bytes(32), 64, ids[:64]),
        block_digest(bytes(32), 0, ids[:63]),
        block_digest(bytes(32), 0, ids[:64], salt=b"x"),
        block_digest(bytes(32), 0, ids[:64], extra=b"x"),
        block_digest(b"\1" * 32, 0, ids[:64]),
        block_digest(bytes(32), 0, ids[:64], salt=b"x", extra=b"y"),
        block_digest(bytes(32), 0, ids[:64], salt=b"xy"),
    ]
    assert len(set(variants)) == len(variants)
    # Fixed for ever: blocks outlive the process that wrote them.
    assert variants[0].hex()[:16] == block_digest(bytes(32), 0, ids[:64].astype(np.int32).astype(np.int64)).hex()[:16]


@pytest.mark.parametrize("edit", ["in place", "data", "new tensor", "buffer", "optimizer"])
def test_changed_weights_are_another_model_b017_b153(kit: Any, store: Any, edit: str) -> None:
    model = kit.build("llama")
    ids = kit.ids_of(130, 1)
    with attach(store, model, codec="passthrough"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
        weight = model.model.layers[1].self_attn.k_proj.weight
        if edit == "in place":
            with torch.no_grad():
                weight[3, 5] += 0.5
        elif edit == "data":
            weight.data.mul_(1.01)
        elif edit == "new tensor":
            model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)
        elif edit == "buffer":
            model.model.rotary_emb.inv_freq.mul_(0.5)
        else:
            model(ids, labels=ids).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        native = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(native, model.generate(ids, max_new_tokens=6, do_sample=False))
        assert store.last_report.reused_tokens == 0
    assert len(store.index) == 2


def test_an_edit_that_leaves_no_trace_needs_weights_changed(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    with attach(store, model, codec="passthrough") as attachment:
        before = attachment.fingerprint()
        model.model.layers[0].mlp.up_proj.weight.data[1, 1] += 1.0
        attachment.weights_changed()
        assert attachment.fingerprint() != before


def test_equal_weights_have_equal_fingerprints_whatever_the_name(kit: Any) -> None:
    first, second = kit.build("llama"), kit.build("llama")
    second.config._name_or_path = "elsewhere"
    second.set_attn_implementation("eager")
    assert Fingerprint(first).value == Fingerprint(second, threads=1).value
    assert Fingerprint(first).value != Fingerprint(kit.build("llama", seed=1)).value
    assert Fingerprint(first).value != Fingerprint(kit.build("llama", dtype=torch.bfloat16)).value
    second.config.rope_parameters["rope_theta"] = 77.0
    assert Fingerprint(first).value != Fingerprint(second).value


@pytest.mark.parametrize("edit", ["scaling", "epsilon", "activation", "a new switch"])
def test_what_is_set_on_a_module_is_another_model(kit: Any, store: Any, edit: str) -> None:
    model, same = kit.build("llama"), kit.build("llama")
    ids = kit.ids_of(130, 1)
    layer = model.model.layers[0]
    with attach(store, model, codec="passthrough") as attachment:
        before = attachment.fingerprint()
        assert before == Fingerprint(same).value
        model.generate(ids, max_new_tokens=2, do_sample=False)
        if edit == "scaling":
            layer.self_attn.scaling *= 3
        elif edit == "epsilon":
            layer.input_layernorm.variance_epsilon = 0.5
        elif edit == "activation":
            layer.mlp.act_fn = torch.nn.GELU()
        else:
            layer.mlp.rank = 4
        native = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(native, model.generate(ids, max_new_tokens=6, do_sample=False))
        assert store.last_report.reused_tokens == 0
        assert attachment.fingerprint() != before
    assert len(store.index) == 2


def test_what_changes_nothing_leaves_the_fingerprint(kit: Any) -> None:
    model = kit.build("llama")
    fingerprint = Fingerprint(model)
    before = fingerprint.value
    model.train()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.eval()
    model.generate = model.generate
    assert fingerprint.check() == before
    # A setting that becomes something that can't be compared.
    model.model.layers[0].self_attn.scaling = torch.ones(3)
    assert fingerprint.check() != before
    assert fingerprint.check() == fingerprint.check()


def test_salt_keeps_prompts_apart(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(130, 1)
    for salt in (b"a", b"b", b"a"):
        with attach(store, llama, codec="passthrough", salt=salt):
            llama.generate(ids, max_new_tokens=1, do_sample=False)
    assert [report.reused_tokens for report in store.reports] == [0, 0, 128]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def other_writer(kit: Any, store: Any, llama: Any) -> Any:
    """Another worker that has reserved the blocks of a prompt and isn't done."""
    ids = kit.ids_of(200, 1)
    with attach(store, llama, codec="passthrough") as attachment:
        namespace = attachment.namespace()
        cache = open_cache(store, namespace, read_prompt(ids, None))
        cache.state.armed = True
        yield attachment, namespace, ids, cache
        cache.close()


def test_it_waits_for_a_writer_as_long_as_computing_would_take(store: Any, other_writer: Any) -> None:
    attachment, namespace, ids, writer = other_writer
    clock = Clock()
    waits: list[int] = []

    def on_match(request: Any, wait_ms: int) -> None:
        if wait_ms:
            waits.append(wait_ms)
            clock.now += wait_ms / 1e3

    store.on_match = on_match
    with open_cache(store, namespace, read_prompt(ids, None), tokens_per_s=100.0, clock=clock) as cache:
        # 200 tokens at 100 a second.
        assert sum(waits) == pytest.approx(2000, abs=2)
        assert cache.report.wait_ms == pytest.approx(2000, abs=2)
        assert cache.get_seq_length() == 0
        assert cache.report.rows[0].why_no_more == "another worker is still writing it"
    waits.clear()
    with open_cache(store, namespace, read_prompt(ids, None), clock=clock):
        assert not waits
    assert writer.get_seq_length() == 0
    assert attachment is not None


def test_it_goes_on_as_soon_as_the_writer_is_done(store: Any, llama: Any, other_writer: Any) -> None:
    attachment, namespace, ids, writer = other_writer

    def on_match(request: Any, wait_ms: int) -> None:
        if wait_ms and not writer.get_seq_length():
            attachment.forward(ids, None, torch.arange(200).view(1, -1), writer)

    store.on_match = on_match
    began = time.monotonic()
    with open_cache(store, namespace, read_prompt(ids, None), tokens_per_s=1.0) as cache:
        assert cache.get_seq_length() == 192
    assert time.monotonic() - began < 20
    assert len(store.index[store.key(namespace)]) == 3


def test_a_writer_that_dies_is_not_waited_for(store: Any, other_writer: Any) -> None:
    _, namespace, ids, writer = other_writer
    calls: list[int] = []

    def on_match(request: Any, wait_ms: int) -> None:
        calls.append(wait_ms)
        if wait_ms:
            writer.close()

    store.on_match = on_match
    with open_cache(store, namespace, read_prompt(ids, None), tokens_per_s=1.0) as cache:
        assert len(calls) == 2
        assert cache.state.pool.request.writing


def test_one_that_begins_between_look_up_and_reservation(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(200, 1)
    prompt = read_prompt(ids, None)
    with attach(store, llama, codec="passthrough") as attachment:
        namespace = attachment.namespace()
        writers: list[Any] = []

        def on_reserve(request: Any) -> None:
            store.on_reserve = None
            writers.append(open_cache(store, namespace, prompt))
            writers[0].state.armed = True

        def on_match(request: Any, wait_ms: int) -> None:
            if wait_ms and not writers[0].get_seq_length():
                attachment.forward(ids, None, torch.arange(200).view(1, -1), writers[0])

        store.on_reserve, store.on_match = on_reserve, on_match
        with open_cache(store, namespace, prompt, tokens_per_s=1.0) as cache:
            assert cache.get_seq_length() == 192
            # What was reserved in vain went back.
            assert not cache.state.pool.request.held
        writers[0].close()
    assert len(store.index[store.key(namespace)]) == 3


def test_prewarm_computes_once_pins_and_serves(kit: Any, store: Any, llama: Any) -> None:
    text = kit.ids_of(200, 1)

    def tokenizer(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % 140 for letter in text]}

    with attach(store, llama, tokenizer, codec="passthrough") as attachment:
        report = attachment.prewarm(text, pin=True)
        assert (report.prefill_tokens, report.committed_blocks, len(store.pinned)) == (192, 3, 1)
        report = attachment.prewarm(text[0].tolist())
        assert (report.prefill_tokens, report.committed_blocks, report.reused_tokens) == (0, 0, 192)
        native = llama.generate(text, max_new_tokens=5, do_sample=False, use_cache=False)
        assert torch.equal(native, llama.generate(text, max_new_tokens=5, do_sample=False))
        assert store.last_report.reused_tokens == 192
        assert attachment.prewarm("a text of letters, " * 8).committed_blocks == 2
        with pytest.raises(UnsupportedInputError, match=r"shorter than a block \(3 tokens < 64\)"):
            attachment.prewarm("abc")
    assert not store.requests


def test_the_report_says_who_wrote_what(kit: Any, store: Any, llama: Any) -> None:
    first, more = kit.ids_of(130, 1), kit.ids_of(130, 2)
    longer = torch.cat([first, more], dim=1)
    with attach(store, llama, codec="passthrough") as attachment:
        llama.generate(first, max_new_tokens=1, do_sample=False)
        store.worker = "B"
        llama.generate(longer, max_new_tokens=3, do_sample=False)
        store.worker = "C"
        llama.generate(longer, max_new_tokens=3, do_sample=False)
        report = attachment.reports[-1]
    assert report.rows[0].written_by == [("A", 128), ("B", 128)]
    assert report.prompt_tokens == 260
    assert report.prefill_tokens == 4
    assert report.generated_tokens == 3
    block = next(iter(store.namespaces.values())).layout.block_bytes
    assert report.shared_bytes == 4 * block
    assert report.first_token_ms > 0
    assert "reused 256 of 260" in str(report)


def test_a_short_prompt_asks_for_no_match_b171(kit: Any, store: Any, llama: Any) -> None:
    with attach(store, llama):
        llama.generate(kit.ids_of(30, 1), max_new_tokens=2, do_sample=False)
    assert store.made[-1].calls[0] == "reserve"
    assert store.last_report.rows[0].why_no_more == "text shorter than a block (30 tokens < 64)"


def test_slots_are_reserved_while_generate_prepares(kit: Any, store: Any, llama: Any) -> None:
    """The first use of the cache waits for them, in the thread that made the call; errors come there, too."""
    reserving, go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    def slow(request: Any) -> None:
        threads.append(threading.get_ident())
        reserving.set()
        assert go_on.wait(10)

    ids = kit.ids_of(200, 77)
    with attach(store, llama, codec="passthrough") as attachment:
        native = llama.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
        store.on_reserve = slow
        cache = attachment.open_cache(read_prompt(ids, None), background=True)
        assert reserving.wait(10)
        assert threads[0] != threading.get_ident()
        go_on.set()
        assert cache.get_seq_length() == 0
        cache.close()
        assert torch.equal(native, llama.generate(ids, max_new_tokens=5, do_sample=False))
        # Dropped unused: nothing waits for it.
        attachment.open_cache(read_prompt(ids, None), background=True).close()

        def fail(request: Any) -> None:
            raise LocalBudgetExceeded("no room")

        store.on_reserve = fail
        with pytest.raises(LocalBudgetExceeded, match="no room"):
            llama.generate(kit.ids_of(200, 78), max_new_tokens=5, do_sample=False)
    assert store.private_blocks() == 0


def test_a_device_that_is_gone_is_an_error_of_the_first_use_and_no_wait(
    kit: Any, store: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(device: torch.device) -> None:
        raise RuntimeError(f"{device} is gone")

    with attach(store, llama, codec="passthrough") as attachment:
        llama.generate(kit.ids_of(100, 80), max_new_tokens=2, do_sample=False)
        monkeypatch.setattr("kvstore_client.hook.prefix.on_device", gone)
        cache = attachment.open_cache(read_prompt(kit.ids_of(200, 81), None), background=True)
        with pytest.raises(RuntimeError, match="cpu is gone"):
            cache.get_seq_length()
        cache.close()
    assert store.private_blocks() == 0


def test_a_streamer_gets_nothing_of_a_request_without_room(kit: Any, store: Any, llama: Any) -> None:
    class Streamer:
        put_anything = False

        def put(self, value: torch.Tensor) -> None:
            self.put_anything = True

        def end(self) -> None:
            pass

    streamer = Streamer()
    with attach(store, llama, codec="passthrough"):
        store.budget = 1
        with pytest.raises(LocalBudgetExceeded):
            llama.generate(kit.ids_of(200, 79), max_new_tokens=5, do_sample=False, streamer=streamer)
    assert not streamer.put_anything
