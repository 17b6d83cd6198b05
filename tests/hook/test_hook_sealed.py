"""Codecs that quantize whole blocks, in a model: what a hit gives is what the cold run stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client import connect
from kvstore_client.hook import AttachError, UnsupportedInputError, attach
from kvstore_client.hook.firsttoken import FirstTokens
from kvstore_kernels.layout import SEALED_BITS

SEALED = tuple(SEALED_BITS)


@pytest.mark.parametrize("codec", SEALED)
def test_a_hit_reads_what_was_stored_and_the_first_token_exactly_b051(
    kit: Any, store: Any, llama: Any, codec: str
) -> None:
    ids = kit.ids_of(150, 2)
    with attach(store, llama, codec=codec) as attachment:
        kept = llama.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True).past_key_values
        cold = [kept.read(layer) for layer in range(2)]
        kept.close()
        with attachment.cache(ids) as warm:
            reused = warm.get_seq_length()
            assert reused == 128
            for layer in range(2):
                for found, expected in zip(warm.read(layer), cold[layer], strict=True):
                    assert torch.equal(found[:, :, 1:reused], expected[:, :, 1:reused])
                    # Computed in a pass of its own, so to rounding.
                    assert torch.allclose(found[:, :, 0], expected[:, :, 0], atol=1e-5)


def test_logits_stay_near_the_native_ones(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(200, 3)
    with torch.no_grad():
        native = llama(ids).logits[0, 100:]
    errors = []
    for codec in ("passthrough", *SEALED):
        with attach(store, llama, codec=codec) as attachment, attachment.cache(ids[:, :1]) as cache, torch.no_grad():
            logits = [llama(ids[:, :100], past_key_values=cache).logits[0, -1:]]
            passes = range(100, 200, 20)
            logits += [llama(ids[:, at : at + 20], past_key_values=cache).logits[0] for at in passes]
        errors.append(float((torch.cat(logits)[1:] - native).std() / native.std()))
    assert errors[0] < 1e-5
    assert errors[1] < errors[2] <= errors[3] < errors[4] < 0.5


@pytest.mark.parametrize("codec", ["k8v4", "int4"])
def test_beams_and_padding(kit: Any, store: Any, llama: Any, codec: str) -> None:
    ids, mask = kit.padded([kit.ids_of(130, 5), kit.ids_of(70, 6)])
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "attention_mask": mask}
    with attach(store, llama, codec=codec):
        first = llama.generate(ids, **options)
        again = llama.generate(ids, **options)
        warm = llama.generate(ids, **options)
    assert first.shape == again.shape
    # Both hits read the same blocks.
    assert torch.equal(again, warm)


def test_through_a_service(kit: Any, llama: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids = kit.ids_of(140, 7)
    with connect("embedded", budget=64 << 20) as service, attach(service, llama, codec="int4"):
        llama.generate(ids, max_new_tokens=4, do_sample=False)
        assert service.flush()
        warm = llama.generate(ids, max_new_tokens=4, do_sample=False)
        assert service.last_report.reused_tokens == 128
        assert torch.equal(warm, llama.generate(ids, max_new_tokens=4, do_sample=False))
        assert service.last_report.traffic.damaged_blocks == 0


def test_layers_with_codecs_of_their_own(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(140, 8)
    with attach(store, llama, codec="int4", overrides={0: "passthrough", -1: "int4"}) as attachment:
        assert attachment.codec == "passthrough:1,int4:1"
        cold = llama.generate(ids, max_new_tokens=5, do_sample=False)
        warm = llama.generate(ids, max_new_tokens=5, do_sample=False)
        assert store.last_report.reused_tokens == 128
        assert cold.shape == warm.shape
        # The same request again is no contradiction, another codec is.
        assert attach(store, llama, codec="passthrough:1,int4:1") is attachment
        with pytest.raises(AttachError, match="int4"):
            attach(store, llama, codec="int4")
    for wrong, text in (({2: "int8"}, "has 2 layers"), ({0: "int9"}, "unknown codec 'int9'")):
        with pytest.raises(AttachError, match=text):
            attach(store, llama, codec="int4", overrides=wrong)
    with pytest.raises(AttachError, match="names 3 layers"):
        attach(store, llama, codec="int8:1,int4:2")


def test_first_tokens_are_computed_once_and_bounded(llama: Any) -> None:
    calls = []
    handle = llama.register_forward_pre_hook(lambda *_: calls.append(1))
    first = FirstTokens(llama)
    try:
        k, v = first.of(b"f" * 32, 5)[1]
        first.of(b"f" * 32, 5)
        assert len(calls) == 1
        first.of(b"g" * 32, 5)
        assert len(calls) == 2
        for token in range(100):
            first.of(b"f" * 32, token)
        assert len(first) <= 64
    finally:
        handle.remove()
    assert k.shape == v.shape == (2, 64)


def test_first_tokens_are_exact_whoever_asked_first(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(150, 2)
    with attach(store, llama, codec="int4") as attachment:
        llama.generate(ids, max_new_tokens=1, do_sample=False)
        with torch.no_grad():
            exact = llama(ids[:, :1], use_cache=True).past_key_values.layers[1].keys[0, :, 0]
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedInputError, match="autocast"):
            attachment.cache(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attachment._first.of(b"f" * 32, int(ids[0, 0]))
        with attachment.cache(ids) as cache:
            assert torch.allclose(cache.read(1)[0][0, :, 0], exact, atol=1e-5)


def test_a_block_that_was_quantized_twice_is_not_committed(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(128, 9)
    with attach(store, llama, codec="int4", commit="all") as attachment, attachment.cache(ids[:, :1]) as cache:
        out = llama.generate(ids, max_new_tokens=2, do_sample=False, past_key_values=cache)
        committed = len(store.index[store.key(attachment.namespace())])
        assert committed == 2
        cache.crop(100)
        other = torch.cat((out[:, :100], kit.ids_of(100, 10)), dim=1)
        llama.generate(other, max_new_tokens=2, do_sample=False, past_key_values=cache)
        kept = store.index[store.key(attachment.namespace())]
        chain = cache.state.rows[0].chain
        assert chain[0] in kept
        assert chain[1] not in kept
