"""Codecs that quantize whole blocks, in a model on a CUDA device: what a hit gives is what the cold run stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client.hook import attach
from kvstore_kernels.layout import SEALED_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Triton compiles kernels at the first use of each shape.
    pytest.mark.timeout(300),
]
DEVICE = "cuda:0"
CODECS = (*SEALED_BITS, "int8:1,int4:1")


@pytest.fixture
def store(kit: Any) -> Any:
    return kit.FakeStore(DEVICE)


@pytest.fixture(scope="module")
def model(kit: Any) -> Any:
    return kit.build("llama").to(DEVICE)


@pytest.mark.parametrize("codec", CODECS)
def test_a_hit_reads_what_was_stored_and_the_first_token_exactly(kit: Any, store: Any, model: Any, codec: str) -> None:
    ids = kit.ids_of(150, 2).to(DEVICE)
    with attach(store, model, codec=codec) as attachment:
        kept = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True).past_key_values
        cold = [kept.read(layer) for layer in range(2)]
        kept.close()
        with attachment.cache(ids) as warm:
            assert warm.get_seq_length() == 128
            for layer in range(2):
                for found, expected in zip(warm.read(layer), cold[layer], strict=True):
                    assert torch.equal(found[:, :, 1:128], expected[:, :, 1:128])
                    assert torch.allclose(found[:, :, 0], expected[:, :, 0], atol=2e-2)


@pytest.mark.parametrize("codec", CODECS)
def test_batches_beams_and_a_cache_that_is_cropped(kit: Any, store: Any, model: Any, codec: str) -> None:
    ids, mask = (tensor.to(DEVICE) for tensor in kit.padded([kit.ids_of(130, 5), kit.ids_of(70, 6)]))
    options = {"max_new_tokens": 70, "do_sample": False, "attention_mask": mask}
    with attach(store, model, codec=codec) as attachment:
        model.generate(ids, **options)
        warm = model.generate(ids, **options)
        again = model.generate(ids, **options)
        beams = model.generate(ids, **options | {"num_beams": 3, "max_new_tokens": 12})
        # Both hits read the same blocks.
        assert torch.equal(again, warm)
        assert beams.shape == (2, ids.shape[1] + 12)
        with attachment.cache(ids[:1]) as cache, torch.no_grad():
            length = cache.get_seq_length()
            model(ids[:1, length:], past_key_values=cache)
            first = model(ids[:1, :1], past_key_values=cache).logits
            for _ in range(70):
                model(ids[:1, :1], past_key_values=cache)
            cache.crop(ids.shape[1])
            second = model(ids[:1, :1], past_key_values=cache).logits
        assert torch.isfinite(second).all()
        assert float((first - second).std() / first.std()) < 0.3


def test_a_bound_chooses_codecs_on_the_device(kit: Any, store: Any, model: Any) -> None:
    ids = kit.ids_of(100, 2).to(DEVICE)
    with attach(store, model, max_error=0.2) as attachment:
        assert len(attachment.errors) == 2
        assert all(0 < error <= 0.2 for error in attachment.errors)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 103)
