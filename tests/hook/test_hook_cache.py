"""KVStoreCache as a Cache: the same operations on a DynamicCache give the same keys and values."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from typing import Any

import pytest
import torch
from kvstore_client.hook import CacheStateError, KVStoreCache, UnsupportedInputError, attach
from kvstore_client.hook.plan import model_plan
from kvstore_client.hook.selfcheck import local_cache
from kvstore_kernels.codecs.calibrate import Calibrator
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration


@pytest.fixture
def make(kit: Any) -> Any:
    """A cache of `codec` without a store, and a DynamicCache, to be filled alike."""
    model = kit.build("llama")
    plan = model_plan(model)

    def make(codec: str = "passthrough", max_blocks: int = 200) -> tuple[KVStoreCache, DynamicCache]:
        calibrator = Calibrator(codec, layers=2, kv_heads=2, k_dim=64)
        for layer in range(2):
            calibrator.observe(layer, torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(layer)) * 3)
        return local_cache(plan, calibrator.finish("test"), max_blocks=max_blocks), DynamicCache()

    return make


def feed(caches: Any, rows: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        k = torch.randn(rows, 2, tokens, 64, generator=generator) * 3
        v = torch.randn(rows, 2, tokens, 64, generator=generator)
        for cache in caches:
            cache.update(k, v, layer)


def assert_same(ours: KVStoreCache, native: DynamicCache, tolerance: float = 0.0) -> None:
    for layer in range(2):
        assert ours.get_seq_length(layer) == native.get_seq_length(layer)
        for found, expected in zip(
            ours.read(layer), (native.layers[layer].keys, native.layers[layer].values), strict=False
        ):
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) <= tolerance


@pytest.mark.parametrize(("codec", "tolerance"), [("passthrough", 0.0), ("int8", 0.12), ("int4", 1.5)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_every_order_of_operations_acts_on_all_tokens_b001(make: Any, codec: str, tolerance: float, order: Any) -> None:
    ours, native = make(codec)
    feed((ours, native), 2, 90, 0)
    for _ in range(10):
        feed((ours, native), 2, 1, random.Random(str(order)).randrange(99))
    operations = [
        lambda c: c.reorder_cache(torch.arange(_rows(c) - 1, -1, -1)),
        lambda c: c.crop(-45),
        lambda c: c.batch_select_indices(torch.tensor([_rows(c) - 1])),
        lambda c: c.batch_repeat_interleave(3),
    ]
    for index in order:
        for cache in (ours, native):
            operations[index](cache)
        assert_same(ours, native, tolerance)
        feed((ours, native), _rows(native), 3, index + 7)
        assert_same(ours, native, tolerance)


def _rows(cache: Any) -> int:
    return cache.batch_size if isinstance(cache, KVStoreCache) else cache.layers[0].keys.shape[0]


def test_reordering_never_changes_a_code_b043(make: Any) -> None:
    ours, _ = make("int8")
    feed((ours,), 4, 100, 1)
    before = [ours.read(layer) for layer in range(2)]
    rng = random.Random(3)
    where = list(range(4))
    for step in range(64):
        order = [rng.randrange(4) for _ in range(4)] if step % 3 == 0 else rng.sample(range(4), 4)
        ours.reorder_cache(torch.tensor(order))
        where = [where[i] for i in order]
    for layer in range(2):
        for found, expected in zip(ours.read(layer), before[layer], strict=True):
            assert torch.equal(found, expected[where])


def test_reset_leaves_nothing_behind_b008(make: Any) -> None:
    ours, native = make()
    feed((ours,), 2, 150, 1)
    used = len(ours.state.pool.request._used)
    ours.reset()
    assert used
    assert not ours.state.pool.request._used
    assert ours.get_seq_length() == 0
    assert ours.batch_size == -1
    feed((ours, native), 3, 5, 2)
    assert_same(ours, native)


def test_crop_goes_anywhere_and_back(make: Any) -> None:
    ours, native = make()
    feed((ours, native), 2, 200, 1)
    for remove, add in ((0, 3), (1, 1), (70, 5), (64, 64), (130, 2), (500, 9)):
        ours.crop(-remove)
        if remove < native.get_seq_length():
            native.crop(-remove)
        else:
            # Not reset(): in transformers 5.17 it zeroes the tensors and keeps their length.
            native = DynamicCache()
        feed((ours, native), 2, add, remove)
        assert_same(ours, native)
    ours.crop(4)
    assert ours.get_seq_length() == 4


def test_deep_copies_share_until_they_write_b065_b182(make: Any) -> None:
    ours, native = make()
    feed((ours, native), 1, 64 * 6 + 10, 1)
    used = ours.state.pool.request._used
    before = len(used)
    branches = [(copy.deepcopy(ours), copy.deepcopy(native)) for _ in range(8)]
    assert len(used) == before
    for index, branch in enumerate(branches):
        feed(branch, 1, 5, index)
    # The last writer may write in place once it is alone.
    assert len(used) <= before + 8
    for branch in branches:
        assert_same(*branch)
    assert_same(ours, native)
    del branches, branch
    gc.collect()
    feed((ours, native), 1, 1, 99)
    assert_same(ours, native)
    assert len(used) == before


def test_the_last_reference_closes_without_a_garbage_collection_b067(make: Any) -> None:
    ours, _ = make()
    feed((ours,), 1, 100, 1)
    request = ours.state.pool.request
    gc.disable()
    try:
        del ours
        assert not request._used
    finally:
        gc.enable()


def test_a_closed_cache_says_so(make: Any) -> None:
    ours, _ = make()
    feed((ours,), 1, 10, 1)
    ours.close()
    ours.close()
    for use in (lambda: feed((ours,), 1, 1, 1), lambda: ours.crop(-1), lambda: ours.read(0), ours.reset):
        with pytest.raises(CacheStateError, match="closed"):
            use()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_closed_cache_maps_nothing(kit: Any, store: Any, llama: Any, how: str) -> None:
    calibrator = Calibrator("int8", layers=2, kv_heads=2, k_dim=64)
    for layer in range(2):
        calibrator.observe(layer, torch.randn(1, 2, 256, 64))
    ids = kit.ids_of(100, 1)
    with attach(store, llama, codec="passthrough"):
        cache = local_cache(model_plan(llama), calibrator.finish("test"))
        for first, last in ((0, 97), (97, 98), (98, 100)):
            with torch.no_grad():
                llama(ids[:, first:last], past_key_values=cache)
        state = cache.state
        slabs = [weakref.ref(held.block.slab) for held in state.rows[0].blocks]
        assert all(slab() is not None for slab in slabs)
        gc.collect()
        gc.disable()
        try:
            if how == "close":
                cache.close()
            else:
                del cache
            # Without a garbage collection, and while somebody keeps the closed cache.
            assert not any(slab() is not None for slab in slabs)
        finally:
            gc.enable()
        assert state.closed
        assert not state.rows
        assert state.table is None
        assert state.step is None


def test_what_has_no_meaning_raises(make: Any) -> None:
    ours, _ = make()
    feed((ours,), 2, 10, 1)
    assert ours.is_compileable is False
    assert ours.is_croppable is True
    assert ours.get_max_length() == -1
    assert ours.is_sliding == [False, False]
    assert ours.get_mask_sizes(3, 0) == (13, 0)
    assert ours.is_initialized is False
    for use in (
        lambda: ours.offload(0),
        lambda: ours.prefetch(0),
        lambda: pickle.dumps(ours),
        lambda: ours.layers[0].crop(-1),
        lambda: ours.layers[1].reset(),
        lambda: ours.layers[0].reorder_cache(torch.tensor([1, 0])),
        lambda: ours.layers[0].batch_repeat_interleave(2),
        lambda: ours.layers[0].batch_select_indices(torch.tensor([0])),
        lambda: ours.batch_repeat_interleave(0),
        lambda: ours.batch_select_indices(torch.tensor([2])),
        lambda: feed((ours,), 3, 1, 1),
    ):
        with pytest.raises(CacheStateError):
            use()


def test_a_pass_that_stopped_halfway_is_told_and_can_be_dropped(make: Any) -> None:
    ours, native = make()
    feed((ours, native), 1, 70, 1)
    k = torch.randn(1, 2, 3, 64)
    ours.update(k, k, 0)
    assert ours.get_seq_length(0) == 73
    assert ours.get_seq_length(1) == 70
    with pytest.raises(CacheStateError, match="1 of 2 layers"):
        copy.deepcopy(ours)
    with pytest.raises(CacheStateError, match="layer 0 updated after 1"):
        ours.update(k, k, 0)
    ours.crop(0)
    feed((ours, native), 1, 2, 5)
    assert_same(ours, native)


def test_a_model_that_is_not_attached_is_told_b180(kit: Any, make: Any) -> None:
    model = kit.build("llama")
    ours, _ = make()
    with pytest.raises(CacheStateError, match="while it is attached"):
        model(kit.ids_of(5, 1), past_key_values=ours)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=99, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).eval()
    for cache in (make()[0], EncoderDecoderCache(make()[0], DynamicCache())):
        with pytest.raises((UnsupportedInputError, CacheStateError)):
            t5.generate(kit.ids_of(5, 1) % 99, past_key_values=cache, max_new_tokens=3)


@pytest.mark.parametrize("grad", [False, True])
def test_tutorial_of_a_prefilled_prefix_with_branches_b182(kit: Any, store: Any, llama: Any, grad: bool) -> None:
    prefix = kit.ids_of(100, 1)
    questions = [torch.cat([prefix, kit.ids_of(9, n)], dim=1) for n in (5, 6)]
    native = [llama.generate(q, max_new_tokens=6, do_sample=False, use_cache=False) for q in questions]
    with attach(store, llama, codec="passthrough") as attachment:
        with torch.set_grad_enabled(grad), attachment.cache(prefix) as cache:
            llama(prefix[:, cache.get_seq_length() :], past_key_values=cache)
            assert cache.get_seq_length() == 100
            for question, expected in zip(questions, native, strict=True):
                branch = copy.deepcopy(cache)
                found = llama.generate(question, past_key_values=branch, max_new_tokens=6, do_sample=False)
                assert torch.equal(found, expected)
                branch.close()
            assert cache.get_seq_length() == 100
        assert not store.requests


@pytest.mark.parametrize("codec", ["passthrough", "int8", "k4v3"])
def test_three_questions_over_one_context_with_crop_b027(kit: Any, store: Any, llama: Any, codec: str) -> None:
    context = kit.ids_of(150, 1)
    with attach(store, llama, codec=codec) as attachment:
        attachment.prewarm(context)
        with attachment.cache(context) as cache:
            for n in (3, 11, 5):
                ids = torch.cat([context, kit.ids_of(n, n)], dim=1)
                found = llama.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
                alone = llama.generate(ids, max_new_tokens=8, do_sample=False)
                if codec == "passthrough":
                    assert torch.equal(found, alone)
                assert cache.get_seq_length() == ids.shape[1] + 7
                cache.crop(-(cache.get_seq_length() - 150))
                assert [cache.get_seq_length(layer) for layer in range(2)] == [150, 150]


def test_a_conversation_that_keeps_its_cache(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(40, 1)
    with attach(store, llama, codec="passthrough", commit="all") as attachment, attachment.cache(ids) as cache:
        cached = 0
        for turn in range(3):
            mask = torch.ones_like(ids)
            expected = llama.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, use_cache=False)
            found = llama.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False)
            assert torch.equal(found, expected)
            assert cache.report is not None
            assert cache.report.reused_tokens == (0 if turn == 0 else cached)
            cached = cache.get_seq_length()
            ids = torch.cat([found, kit.ids_of(9, turn)], dim=1)
        index = next(iter(store.index.values()))
        assert len(index) == cached // 64
        # Somebody else gets it, too: the committed blocks hold what their digests say.
        native = llama.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, use_cache=False
        )
        assert torch.equal(
            native, llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        )
        assert store.last_report.reused_tokens == cached // 64 * 64


def test_a_whole_prompt_in_the_callers_cache_is_not_put_twice(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(64, 1)
    native = llama.generate(ids, max_new_tokens=5, do_sample=False)
    with attach(store, llama, codec="passthrough") as attachment, attachment.cache(ids) as cache:
        llama(ids, past_key_values=cache)
        assert torch.equal(native, llama.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False))
        with pytest.raises(UnsupportedInputError, match=r"crop\(-4\)"):
            llama.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)


def test_ids_that_the_cache_did_not_see_are_never_committed(kit: Any, store: Any, llama: Any) -> None:
    ids, other = kit.ids_of(130, 1), kit.ids_of(130, 2)
    with attach(store, llama, codec="passthrough", commit="all") as attachment, attachment.cache(ids) as cache:
        # A loop of one's own fills the cache with another text than the one it was made for.
        llama(other, past_key_values=cache)
        llama.generate(torch.cat([ids, ids], dim=1), past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert not any(store.index.values())


def test_a_manual_loop_over_a_padded_batch_b126(kit: Any, store: Any, llama: Any) -> None:
    rows = [kit.ids_of(n, n) for n in (140, 135, 131)]
    ids, mask = kit.padded(rows)
    expected = [
        llama.generate(row, max_new_tokens=25, do_sample=False, use_cache=False)[0, row.shape[1] :] for row in rows
    ]
    with attach(store, llama, codec="passthrough") as attachment:
        llama.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
        with attachment.cache(ids, mask) as cache:
            new, texts = ids[:, cache.get_seq_length() :], [[], [], []]
            assert 0 < cache.get_seq_length() < 140
            alive = [0, 1, 2]
            for step in range(25):
                positions = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
                out = llama(new, attention_mask=mask, position_ids=positions, past_key_values=cache)
                new = out.logits[:, -1:].argmax(-1)
                mask = torch.cat([mask, torch.ones_like(new)], dim=1)
                for index, row in enumerate(alive):
                    texts[row].append(int(new[index, 0]))
                if step == 4:
                    # The longest leaves: the others' places must not depend on it.
                    keep = torch.tensor([1, 2])
                    cache.batch_select_indices(keep)
                    new, mask, alive = new[keep], mask[keep], [1, 2]
            for row in (1, 2):
                assert texts[row] == expected[row].tolist()
            # Positions that count the padding would be silently wrong over a past that doesn't.
            with pytest.raises(UnsupportedInputError, match="position"):
                llama(new, attention_mask=mask, past_key_values=cache)


def test_masks_the_cache_can_not_honour_are_refused(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(10, 1)
    with attach(store, llama, codec="passthrough") as attachment:
        four = torch.zeros(1, 1, 10, 10)
        hole = torch.ones(1, 10, dtype=torch.int64)
        hole[0, 4] = 0
        for mask, text in ((four, "2-D attention_mask"), (hole, "not all on the left"), (hole[:, :7], "expected")):
            with attachment.cache(ids) as cache, pytest.raises(UnsupportedInputError, match=text):
                llama(ids, attention_mask=mask, past_key_values=cache)
        with attachment.cache(ids) as cache:
            llama.train()
            try:
                with pytest.raises(UnsupportedInputError, match="inference only"):
                    llama(ids, past_key_values=cache)
            finally:
                llama.eval()


class Cancelled(Exception):
    """Raised by a streamer."""


class Streamer:
    """Keeps what it is given, and stops the answer after so many pieces."""

    def __init__(self, pieces: int) -> None:
        self.ids: list[int] = []
        self.pieces = pieces

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()
        self.pieces -= 1
        if not self.pieces:
            raise Cancelled

    def end(self) -> None:
        """Nothing to do."""


def test_a_turn_after_a_cancelled_one_gives_the_right_text_and_commits_nothing_unknown(
    kit: Any, store: Any, llama: Any
) -> None:
    ids = kit.ids_of(150, 1)
    with attach(store, llama, codec="passthrough", commit="all") as attachment, attachment.cache(ids) as cache:
        streamer = Streamer(11)
        with pytest.raises(Cancelled):
            llama.generate(ids, past_key_values=cache, streamer=streamer, max_new_tokens=60, do_sample=False)
        assert cache.get_seq_length() == 159
        assert cache.state.known == 150
        index = next(iter(store.index.values()))
        assert len(index) == 2
        follow = torch.cat([torch.tensor([streamer.ids]), kit.ids_of(90, 2)], dim=1)
        options = {"attention_mask": torch.ones_like(follow), "max_new_tokens": 6, "do_sample": False}
        native = llama.generate(follow, use_cache=False, **options)
        assert torch.equal(native, llama.generate(follow, past_key_values=cache, **options))
        assert len(index) == 2
        # Back where all is known, the cache commits again.
        cache.crop(150)
        assert torch.equal(native, llama.generate(follow, past_key_values=cache, **options))
        assert len(index) == 3


def test_rows_after_a_beam_turn_are_not_taken_for_known(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(70, 1)
    with attach(store, llama, codec="passthrough", commit="all") as attachment, attachment.cache(ids) as cache:
        out = llama.generate(
            ids, past_key_values=cache, num_beams=2, num_return_sequences=2, max_new_tokens=9, do_sample=False
        )
        assert len(cache.state.rows) == 2
        assert cache.state.known == 70
        follow = torch.cat([out, kit.ids_of(140, 2).view(2, 70)], dim=1)
        options = {"attention_mask": torch.ones_like(follow), "max_new_tokens": 5, "do_sample": False}
        index = next(iter(store.index.values()))
        llama.generate(follow, past_key_values=cache, **options)
        assert len(index) == 1


def test_pad_ids_inside_a_chat_are_told_as_such(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(80, 1)
    ids[0, 40] = 0
    with attach(store, llama, codec="passthrough") as attachment:
        llama.generate(ids, max_new_tokens=2, do_sample=False)
        assert "pass attention_mask" in store.last_report.warnings[0]
        with attachment.cache(ids) as cache:
            with pytest.raises(UnsupportedInputError, match=r"pad ids \(0\) inside the text.*pass attention_mask"):
                llama.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
            native = llama.generate(ids, use_cache=False, **options)
            assert torch.equal(native, llama.generate(ids, past_key_values=cache, **options))
