"""What keeps a CUDA device busy: nothing on the token path reads from it, and blocks move behind its work.

No GPU here. Tensors on the meta device have no data, so whatever reads one fails, as a synchronisation would cost.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kvstore_client.hook import UnsupportedInputError, UnsupportedModelError, attach, attention
from kvstore_client.hook import rows as rows_module
from kvstore_client.hook import state as state_module
from kvstore_client.hook import step as step_module
from kvstore_client.hook.cache import KVStoreCache
from kvstore_client.hook.padding import LateCheck, Padding
from kvstore_client.hook.plan import model_plan
from kvstore_client.hook.rows import BlockPool
from kvstore_client.hook.selfcheck import layout_of
from kvstore_client.hook.state import CacheState
from kvstore_client.hook.streams import ended, together
from kvstore_client.hook.tensorhash import HASH_WORDS, TensorHasher
from kvstore_client.namespace import ModelIdentity, Namespace, Shard
from kvstore_kernels.codecs.plan import CodecPlan

META = torch.device("meta")


class Work:
    """Device work that ends when it is told to."""

    def __init__(self, name: str = "", *, fails: bool = False) -> None:
        self.name, self.fails, self.done = name, fails, False

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.done


@pytest.fixture
def meta(kit: Any, store: Any, monkeypatch: Any) -> Any:
    """A tiny model on the meta device and an empty cache for it, the kernels replaced by nothing."""
    model = kit.build("llama")
    plan = model_plan(model)
    identity = ModelIdentity(bytes(32), "tiny", "passthrough", layout_of(plan, "passthrough"), Shard("full:0-1", 0, 2))
    namespace = Namespace(identity, CodecPlan("passthrough", {}, "test"))
    pool = BlockPool(store.open_request(namespace), namespace, META)
    monkeypatch.setattr(type(pool.codec), "write", lambda *_, **__: None)

    def nothing(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.transpose(1, 2).contiguous()

    # There is no autocast on meta, not even to be asked for.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(step_module, "decode_attention", nothing)
    monkeypatch.setattr(step_module, "prefill_attention", nothing)
    model = model.to("meta")
    attention.install(model.config)
    yield model, KVStoreCache(CacheState(pool))
    attention.uninstall(model.config)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("starts", [[0, 0], [3, 0]])
def test_no_step_of_generate_reads_from_the_device(meta: Any, starts: list[int]) -> None:
    model, cache = meta
    state = cache.state
    # What generate() sets up: padding known from the prompt, positions made from the mask.
    state.start_rows(starts)
    state.armed = state.padding.in_generate = True
    masks = set()
    with torch.no_grad():
        for q in (70, 1, 1, 1, 1):
            total = state.length + q
            positions = ones(2, q)
            state.reused = False
            model(
                input_ids=ones(2, q),
                attention_mask=ones(2, total),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            masks.add(id(state.step.mask))
            assert state.length == total
    assert len(masks) == 1
    assert state.step.mask.device == META
    assert state.step.mask.shape == (2, 1, 1, 1)


def test_positions_on_a_device_are_read_in_the_first_pass_only(meta: Any) -> None:
    model, cache = meta
    state = cache.state
    state.start_rows([0])
    state.armed = state.padding.in_generate = state.reused = True
    arguments = {"past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        with pytest.raises(NotImplementedError):
            model(input_ids=ones(1, 2), attention_mask=ones(1, 2), position_ids=ones(1, 2), **arguments)
        cache.crop(0)
        state.padding.looked_at = True
        for total in (1, 2, 3):
            model(input_ids=ones(1, 1), attention_mask=ones(1, total), position_ids=ones(1, 1), **arguments)


def test_a_mask_of_another_shape_is_refused_without_a_look(meta: Any) -> None:
    padding = Padding(META)
    padding.in_generate = padding.looked_at = True
    assert padding.starts(ones(2, 8), rows=2, cached=7, new=1, known=[3, 0], fixed=True) == [3, 0]
    with pytest.raises(UnsupportedInputError, match=r"shape \(2, 9\); expected \(2, 8\)"):
        padding.starts(ones(2, 9), rows=2, cached=7, new=1, known=[3, 0], fixed=True)


def test_a_changed_mask_in_a_loop_of_ones_own_shows_late() -> None:
    check = LateCheck()
    starts = torch.tensor([[2], [0]], dtype=torch.int32)
    good = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    check.look(good, starts)
    check.raise_if_wrong()
    check.look(good.bool(), starts)
    check.raise_if_wrong()
    hole = good.clone()
    hole[1, 2] = 0
    check.look(hole, starts)
    check.look(good, starts)
    with pytest.raises(UnsupportedInputError, match="an earlier step"):
        check.raise_if_wrong()


def test_blocks_are_committed_and_given_back_behind_the_device(
    kit: Any, llama: Any, store: Any, monkeypatch: Any
) -> None:
    sent: list[Work] = []

    def work_so_far(stream: Any) -> Work:
        sent.append(Work(stream))
        return sent[-1]

    for module in (rows_module, state_module):
        monkeypatch.setattr(module, "current_stream", lambda _: threading.get_ident())
        monkeypatch.setattr(module, "work_so_far", work_so_far)
    noted: list[tuple[str, Any]] = []
    with attach(store, llama, codec="passthrough"):
        monkeypatch.setattr(kit.FakeRequest, "note", lambda self, what, after: noted.append((what, after)))
        llama.generate(kit.ids_of(130, 3), max_new_tokens=3, do_sample=False, num_beams=2)
    assert {what for what, _ in noted} >= {"commit", "close"}
    assert all(after is not None for _, after in noted)
    assert {work.name for work in sent} == {threading.get_ident()}


def test_several_works_are_one() -> None:
    works = [Work(), Work()]
    both = together(works)
    assert both is not None
    assert together([]) is None
    assert together(works[:1]) is works[0]
    assert not both.query()
    works[1].done = True
    assert not both.query()
    works[0].done = True
    assert both.query()
    assert ended(Work(fails=True))


def test_a_hash_tells_every_change_and_no_accident_of_memory() -> None:
    hasher = TensorHasher()
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(3, 40_001, generator=generator)

    def sums(tensor: torch.Tensor) -> tuple[int, ...]:
        result = hasher.sums(tensor)
        assert result.shape == (HASH_WORDS,)
        return tuple(result.tolist())

    plain = sums(base)
    assert plain == sums(base.clone()) == sums(base.t().contiguous().t())
    assert plain == sums(torch.cat([torch.zeros(1), base.flatten()])[1:].view(3, -1))
    with torch.inference_mode():
        assert plain == sums(base.clone())
    seen = {plain}
    for index in (0, 1, 32_767, 65_535, 65_536, 120_002):
        changed = base.clone().flatten()
        changed[index] += 1e-3
        seen.add(sums(changed))
    swapped = base.clone()
    swapped[[0, 1]] = base[[1, 0]]
    seen.add(sums(swapped))
    assert len(seen) == 8
    for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.float64):
        for size in (0, 1, 3, 8, 11):
            sums(torch.ones(size, dtype=dtype))
    with pytest.raises(UnsupportedModelError, match="meta device"):
        hasher.sums(torch.empty(2, device="meta"))


def test_models_that_lie_elsewhere_are_refused_by_name(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"parameters on cpu, meta.*one device"):
        attach(store, model)
    with pytest.raises(UnsupportedModelError, match="parameters on meta"):
        attach(store, kit.build("llama").to("meta"))


def test_a_model_that_moved_since_attach_runs_on_its_own_cache(kit: Any, store: Any, monkeypatch: Any) -> None:
    model = kit.build("llama")
    ids = kit.ids_of(70, 1)
    with attach(store, model, codec="passthrough") as attachment:
        object.__setattr__(attachment.plan, "device", META)
        model.generate(ids, max_new_tokens=2, do_sample=False)
        assert store.last_report.path == "native"
        assert "moved from meta to cpu" in store.last_report.warnings[0]
        with pytest.raises(UnsupportedInputError, match="moved from meta to cpu"):
            attachment.cache(ids)
