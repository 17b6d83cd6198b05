"""Models on a CUDA device: the same tokens as the native cache, and nothing waits for the device in decode."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstore_client.errors import LocalBudgetExceeded
from kvstore_client.hook import KVStoreCache, UnsupportedInputError, UnsupportedModelError, attach
from kvstore_client.hook.fingerprint import Fingerprint
from kvstore_client.namespace import Namespace
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Triton compiles kernels at the first use of each shape.
    pytest.mark.timeout(300),
    # The mode that makes a wait an error is itself announced as a prototype.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def store(kit: Any) -> Any:
    return kit.FakeStore(DEVICE)


@pytest.fixture(scope="module")
def model(kit: Any) -> Any:
    return kit.build("llama").to(DEVICE)


def on_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(DEVICE) for tensor in tensors)


SHAPES = {
    "llama-64-gqa": ("llama", {}),
    "qwen2-64-mha": ("qwen2", {"hidden_size": 256, "num_key_value_heads": 4}),
    "qwen3-80-gqa": ("qwen3", {}),
    "mistral-96-mqa": ("mistral", {}),
    "llama-128-mha": ("llama", {"head_dim": 128, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_is_the_native_one_cold_and_warm(kit: Any, store: Any, shape: str) -> None:
    kind, changes = SHAPES[shape]
    model = kit.build(kind, **changes).to(DEVICE)
    rows = [kit.ids_of(150, 1), kit.ids_of(71, 2)]
    ids, mask = on_device(*kit.padded(rows))
    options = {"attention_mask": mask, "max_new_tokens": 70, "do_sample": False}
    native = model.generate(ids, **options)
    with attach(store, model, codec="passthrough"):
        cold = model.generate(ids, **options)
        warm = model.generate(ids, **options)
        alone = model.generate(rows[0].to(DEVICE), max_new_tokens=70, do_sample=False)
    kit.same_text(model, ids, native, cold, mask)
    kit.same_text(model, ids, native, warm, mask)
    assert [row.reused_tokens for row in store.reports[1].rows] == [128, 49]
    assert store.last_report.reused_tokens == 128
    kit.same_text(model, rows[0], native[:1], alone)


def forced_logits(model: Any, ids: torch.Tensor, cache: Any, cuts: list[int]) -> torch.Tensor:
    """Logits of all of ids [1, n], fed in pieces that end at `cuts`, then one by one."""
    found = []
    ends = [*cuts, *range(cuts[-1] + 1, ids.shape[1] + 1)]
    with torch.no_grad():
        for first, last in zip([0, *ends], ends, strict=False):
            found.append(model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["llama-64-gqa", "llama-128-mha"])
def test_half_precision_is_as_near_as_another_split_of_the_prompt(
    kit: Any, store: Any, shape: str, dtype: torch.dtype
) -> None:
    kind, changes = SHAPES[shape]
    model = kit.build(kind, dtype=dtype, **changes).to(DEVICE)
    (ids,) = on_device(kit.ids_of(200, 4))
    native = forced_logits(model, ids, DynamicCache(config=model.config), [100, 160])
    other = forced_logits(model, ids, DynamicCache(config=model.config), [200])
    # Nothing is held yet: the whole prompt is computed here.
    with attach(store, model, codec="passthrough") as attachment, attachment.cache(ids) as cache:
        ours = forced_logits(model, ids, cache, [100, 160])
    assert float((ours - native).abs().max()) <= 2 * float((other - native).abs().max())


# Where a number lies on the border of two codes, a last bit decides: that costs more the fewer bits there are.
NEAR = {"int8": 1e-5, "k8v4": 2e-4, "int4": 1e-3, "k4v3": 2e-3, "k4v2": 5e-3, "int8:1,int4:1": 1e-3}


@pytest.mark.parametrize("codec", NEAR)
@pytest.mark.parametrize("shape", ["llama-64-gqa", "llama-128-mha"])
def test_codecs_agree_with_the_cpu(kit: Any, shape: str, codec: str, monkeypatch: Any) -> None:
    kind, changes = SHAPES[shape]
    model = kit.build(kind, **changes)
    ids = kit.ids_of(200, 9)
    here = kit.FakeStore("cpu")
    with attach(here, model, codec=codec) as attachment:
        plan = attachment.namespace().plan
        with attachment.cache(ids) as cache:
            expected = forced_logits(model, ids, cache, [100, 150])
    there = kit.FakeStore(DEVICE)
    monkeypatch.setattr(there, "namespace_for", lambda identity, make, *, device: _kept(there, identity, plan))
    model.to(DEVICE)
    with attach(there, model, codec=codec) as attachment, attachment.cache(ids.to(DEVICE)) as cache:
        found = forced_logits(model, ids.to(DEVICE), cache, [100, 150]).cpu()
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) <= NEAR[codec]


def _kept(store: Any, identity: Any, plan: Any) -> Namespace:
    return store.namespaces.setdefault(identity.layout.digest(), Namespace(identity, plan))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("codec", ["int8", "passthrough", "int4", "int8:1,k4v2:1"])
def test_a_decode_step_waits_for_nothing(kit: Any, store: Any, model: Any, codec: str, padded: bool) -> None:
    ids, mask = on_device(*kit.padded([kit.ids_of(100, 1), kit.ids_of(60, 2)]))
    token = torch.full((2, 1), 5, device=DEVICE)
    more = mask.new_ones(2, 1)
    with attach(store, model, codec=codec) as attachment, torch.no_grad():
        cache = attachment.cache(ids, mask if padded else None)
        with cache:
            position = (mask.cumsum(-1) - 1).clamp_min(0)
            arguments = {"past_key_values": cache, "use_cache": True}
            for step in range(72):
                if not padded:
                    model(input_ids=token if step else ids, **arguments)
                elif step:
                    mask = torch.cat([mask, more], dim=1)
                    position = position[:, -1:] + 1
                    model(input_ids=token, attention_mask=mask, position_ids=position, **arguments)
                else:
                    model(input_ids=ids, attention_mask=mask, position_ids=position, **arguments)
                if step == 2:
                    # Everything is compiled and allocated; from here on two block borders are crossed.
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
            torch.cuda.set_sync_debug_mode("default")
            assert cache.get_seq_length() == 100 + 71


@pytest.fixture(autouse=True)
def no_debug_mode() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def test_the_forward_passes_of_generate_wait_for_nothing(kit: Any, store: Any, monkeypatch: Any) -> None:
    model = kit.build("llama").to(DEVICE)
    stock, seen = model.forward, []

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        # The first steps compile.
        torch.cuda.set_sync_debug_mode("error" if len(seen) > 4 and seen[-1] == 1 else "default")
        try:
            return stock(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setitem(model.__dict__, "forward", forward)
    ids, mask = on_device(*kit.padded([kit.ids_of(120, 1), kit.ids_of(90, 2)]))
    with attach(store, model, codec="int8"):
        seen.clear()
        for _ in range(2):
            model.generate(ids, attention_mask=mask, max_new_tokens=80, do_sample=False)
    assert store.last_report.path == "kvstore"
    assert store.last_report.reused_tokens
    assert seen.count(1) > 140


def test_a_changed_mask_is_found_one_step_late(kit: Any, store: Any, model: Any) -> None:
    ids, mask = on_device(*kit.padded([kit.ids_of(20, 1), kit.ids_of(12, 2)]))
    token = torch.full((2, 1), 5, device=DEVICE)
    with attach(store, model, codec="int8") as attachment, torch.no_grad():
        cache = attachment.cache(ids, mask)
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        wrong = mask.clone()
        wrong[0, 3] = 0
        model(input_ids=token, attention_mask=wrong, past_key_values=cache, use_cache=True)
        torch.cuda.synchronize()
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        with pytest.raises(UnsupportedInputError, match="an earlier step"):
            model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.close()


def test_beams_samples_and_chunks_are_the_native_ones(kit: Any, store: Any, model: Any) -> None:
    ids, mask = on_device(*kit.padded([kit.ids_of(70, 1), kit.ids_of(130, 2)]))
    ways: list[dict[str, Any]] = [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 48},
    ]
    for options in ways:
        arguments = {**options, "attention_mask": mask, "max_new_tokens": 16}
        torch.manual_seed(7)
        native = model.generate(ids, **arguments)
        with attach(store, model, codec="passthrough"):
            for _ in range(2):
                torch.manual_seed(7)
                assert torch.equal(native, model.generate(ids, **arguments)), options
    assert store.last_report.reused_tokens


class _Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_a_streamer_gets_every_token_as_it_comes(kit: Any, store: Any, model: Any) -> None:
    (ids,) = on_device(kit.ids_of(90, 3))
    with attach(store, model, codec="int8"):
        streamer = _Collected()
        text = model.generate(ids, max_new_tokens=12, do_sample=False, streamer=streamer)
    assert streamer.tokens == text[0].tolist()


def test_threads_and_their_streams_share_one_model(kit: Any, store: Any, model: Any) -> None:
    prompts = [kit.ids_of(90 + n, 20 + n).to(DEVICE) for n in range(4)]
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = [model.generate(ids, **options) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        stream = torch.cuda.Stream(DEVICE) if index % 2 else torch.cuda.default_stream(DEVICE)
        stream.wait_stream(torch.cuda.default_stream(DEVICE))
        with torch.cuda.stream(stream):
            for _ in range(2):
                found[index] = model.generate(prompts[index], **options)
            stream.synchronize()

    with attach(store, model, codec="passthrough"):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for index, ids in enumerate(prompts):
        kit.same_text(model, ids, expected[index], found[index])


def test_blocks_are_committed_behind_the_work_that_wrote_them(
    kit: Any, store: Any, model: Any, monkeypatch: Any
) -> None:
    at_commit: list[bool] = []
    after: list[Any] = []

    def note(self: Any, what: str, work: Any) -> None:
        assert work is not None or what == "close"
        if what == "commit":
            at_commit.append(work.query())
        after.append(work)

    with attach(store, model, codec="int8") as attachment:
        (ids,) = on_device(kit.ids_of(200, 5))
        model.generate(ids, max_new_tokens=2, do_sample=False)
        monkeypatch.setattr(kit.FakeRequest, "note", note)
        (ids,) = on_device(kit.ids_of(200, 6))
        cache = attachment.cache(ids)
        cache.state.armed = True
        # Half a second of spinning in front of the last layer; the first pass reads positions before its first one.
        last = model.model.layers[-1]
        spinning = last.register_forward_pre_hook(lambda *_: torch.cuda._sleep(1_000_000_000))
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        spinning.remove()
        cache.close()
        assert at_commit == [False]
        assert not after[-1].query()
        torch.cuda.synchronize()
        assert all(work.query() for work in after)


def test_a_fingerprint_is_the_same_on_every_device(kit: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = kit.build("qwen2", dtype=dtype)
        here = Fingerprint(model).value
        there = Fingerprint(model.to(DEVICE))
        assert there.value == here
        assert there.check() == here
        model.lm_head.weight.data[0, 0] += 1
        changed = there.check()
        assert changed != here
        model.lm_head.weight.data[0, 0] -= 1
        with torch.no_grad():
            model.lm_head.weight[3, 3] *= 2
        assert there.check() not in (here, changed)


def test_what_no_kernel_serves_is_refused_at_attach(kit: Any, store: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="k_dim is 320"):
        attach(store, kit.build("llama", head_dim=320).to(DEVICE))
    with pytest.raises(UnsupportedModelError, match="float64"):
        attach(store, kit.build("llama", dtype=torch.float64).to(DEVICE))


def test_autocast_runs_on_the_models_own_cache(kit: Any, store: Any, model: Any) -> None:
    (ids,) = on_device(kit.ids_of(70, 1))
    with attach(store, model, codec="int8") as attachment, torch.autocast("cuda", dtype=torch.bfloat16):
        model.generate(ids, max_new_tokens=2, do_sample=False)
        assert "autocast" in store.last_report.warnings[0]
        with pytest.raises(UnsupportedInputError, match="autocast"):
            attachment.cache(ids)


def test_a_used_up_budget_is_a_typed_error_before_anything_is_computed(kit: Any, store: Any, model: Any) -> None:
    (ids,) = on_device(kit.ids_of(400, 1))
    with attach(store, model, codec="int8"):
        store.budget = 3
        with pytest.raises(LocalBudgetExceeded):
            model.generate(ids, max_new_tokens=2, do_sample=False)


def test_no_temporary_of_a_long_prompt_is_quadratic(kit: Any, store: Any) -> None:
    model = kit.build("llama", dtype=torch.bfloat16, max_position_embeddings=65536).to(DEVICE)
    peaks = []
    with attach(store, model, codec="int8"):
        for length in (8192, 16384, 32768):
            ids = torch.randint(2, 100, (1, length), device=DEVICE)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model.generate(ids, max_new_tokens=1, do_sample=False)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert second <= 2.2 * first + (8 << 20)
    # A mask of 32k x 32k would be a GiB.
    assert peaks[2] < 256 << 20


def test_a_cache_of_ones_own_is_read_back_on_the_device(kit: Any, store: Any, model: Any) -> None:
    (ids,) = on_device(kit.ids_of(150, 8))
    native = DynamicCache(config=model.config)
    with attach(store, model, codec="passthrough") as attachment, torch.no_grad():
        cache = attachment.cache(ids)
        assert isinstance(cache, KVStoreCache)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.crop(-20)
        cache.batch_repeat_interleave(2)
        keys, values = cache.read(1)
        cache.close()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=native, use_cache=True)
    assert keys.device == torch.device(DEVICE)
    assert keys.shape[0] == 2
    for row in range(2):
        assert float((keys[row] - native.layers[1].keys[0, :, :130]).abs().max()) < 1e-4
        assert float((values[row] - native.layers[1].values[0, :, :130]).abs().max()) < 1e-4
