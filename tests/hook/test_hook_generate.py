"""An attached model's generate() against the stock one: the same tokens, whatever is reused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from kvstore_client.hook import KVStoreCache, UnsupportedInputError, attach
from transformers import DynamicCache, GenerationConfig


@pytest.fixture
def attached(store: Any, llama: Any) -> Any:
    with attach(store, llama, codec="passthrough") as attachment:
        yield attachment


def same_text(model: Any, prompt: torch.Tensor, expected: torch.Tensor, found: torch.Tensor, mask: Any = None) -> None:
    """Design 3.9: a difference counts unless the native top-2 gap there is below 1e-4."""
    assert expected.shape == found.shape
    for row in range(expected.shape[0]):
        different = (expected[row] != found[row]).nonzero().flatten()
        if not len(different):
            continue
        first = int(different[0])
        assert first >= prompt.shape[1]
        until = expected[row : row + 1, :first]
        keep = slice(0 if mask is None else int((mask[row] == 0).sum()), None)
        logits = model(until[:, keep]).logits[0, -1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) < 1e-4, f"row {row} differs at {first}"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2", "mixtral", "gpt2"])
def test_greedy_text_is_the_native_one_cold_and_warm(kit: Any, store: Any, kind: str) -> None:
    model = kit.build(kind)
    rows = [kit.ids_of(150, 1), kit.ids_of(71, 2)]
    ids, mask = kit.padded(rows)
    options = {"attention_mask": mask, "max_new_tokens": 70, "do_sample": False}
    native = model.generate(ids, **options)
    with attach(store, model, codec="passthrough"):
        cold = model.generate(ids, **options)
        warm = model.generate(ids, **options)
        alone = model.generate(rows[0], max_new_tokens=70, do_sample=False)
    same_text(model, ids, native, cold, mask)
    same_text(model, ids, native, warm, mask)
    assert [row.reused_tokens for row in store.reports[1].rows] == [128, 49]
    assert store.last_report.reused_tokens == 128
    same_text(model, rows[0], native[:1], alone)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 192])
def test_a_prompt_that_is_held_completely_computes_its_last_token_once_b004(
    kit: Any, store: Any, llama: Any, attached: Any, length: int
) -> None:
    ids = kit.ids_of(length, length)
    native = llama.generate(ids, max_new_tokens=9, do_sample=False, use_cache=False)
    for _ in range(3):
        result = llama.generate(ids, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
        same_text(llama, ids, native, result.sequences)
        assert result.past_key_values.get_seq_length() == length + 8
        result.past_key_values.close()
    row = store.last_report.rows[0]
    assert row.reused_tokens == min(length // 64 * 64, length - 1)
    if length < 64:
        assert row.why_no_more == f"text shorter than a block ({length} tokens < 64)"


def test_a_batch_with_different_padding_reuses_in_every_row(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    prefix = kit.ids_of(192, 5)
    rows = [torch.cat([prefix, kit.ids_of(n, 50 + n)], dim=1) for n in (40, 9, 1, 77)]
    llama.generate(prefix, max_new_tokens=2, do_sample=False)
    ids, mask = kit.padded(rows)
    batch = llama.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    reused = [row.reused_tokens for row in store.last_report.rows]
    assert all(reused)
    # Padding 37, 68, 76, 0: the longest row's 192 tokens end where all rows' pasts end.
    assert reused == [192 - 37, 192 - 68, 192 - 76, 192]
    assert [row.written_by[0][0] for row in store.last_report.rows] == ["A"] * 4
    for index, row in enumerate(rows):
        single = llama.generate(row, max_new_tokens=20, do_sample=False)
        same_text(llama, row, single, batch[index : index + 1, -single.shape[1] :])


def test_rows_written_from_a_padded_batch_are_aligned_and_serve_single_rows(
    kit: Any, store: Any, llama: Any, attached: Any
) -> None:
    rows = [kit.ids_of(200, 1), kit.ids_of(140, 2), kit.ids_of(33, 3)]
    ids, mask = kit.padded(rows)
    llama.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    store.worker = "B"
    for row, expected in zip(rows, (192, 128, 0), strict=True):
        native = llama.generate(row, max_new_tokens=12, do_sample=False, use_cache=False)
        same_text(llama, row, native, llama.generate(row, max_new_tokens=12, do_sample=False))
        assert store.last_report.reused_tokens == expected


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours_b012(kit: Any, store: Any, llama: Any, codec: str) -> None:
    row = kit.ids_of(90, 4)
    texts = []
    for neighbours in ([], [kit.ids_of(5, 6)], [kit.ids_of(170, 7)]):
        fresh = type(store)()
        with attach(fresh, llama, codec=codec):
            ids, mask = kit.padded([row, *neighbours])
            out = llama.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
        texts.append(out[0, -106:].tolist())
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("codec", ["int8", "k8v4", "int4", "k4v3", "k4v2"])
def test_hits_are_equal_to_one_another_b024(kit: Any, store: Any, llama: Any, codec: str) -> None:
    ids = kit.ids_of(130, 8)
    with attach(store, llama, codec=codec):
        texts = {tuple(llama.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()) for _ in range(8)}
        # A cold prefill attends on fresh keys, a warm one on codes: at most two texts, not eight.
        assert len(texts) <= 2
        warm = {tuple(llama.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()) for _ in range(8)}
    assert len(warm) == 1


def test_sampling_with_a_seed_is_the_native_sample(kit: Any, llama: Any, store: Any) -> None:
    ids = kit.ids_of(100, 3)
    options = {"max_new_tokens": 15, "do_sample": True, "num_return_sequences": 3, "top_k": 20}
    torch.manual_seed(7)
    native = llama.generate(ids, **options)
    with attach(store, llama, codec="passthrough"):
        for _ in range(2):
            torch.manual_seed(7)
            assert torch.equal(native, llama.generate(ids, **options))
    assert store.last_report.reused_tokens == 64


@pytest.mark.parametrize(("beams", "returned"), [(3, 1), (4, 2)])
def test_beams_are_the_native_beams_b009(kit: Any, store: Any, llama: Any, beams: int, returned: int) -> None:
    rows = [kit.ids_of(70, 1), kit.ids_of(130, 2)]
    ids, mask = kit.padded(rows)
    options = {
        "attention_mask": mask,
        "num_beams": beams,
        "num_return_sequences": returned,
        "max_new_tokens": 70,
        "do_sample": False,
    }
    native = llama.generate(ids, **options)
    with attach(store, llama, codec="passthrough"):
        assert torch.equal(native, llama.generate(ids, **options))
        assert torch.equal(native, llama.generate(ids, **options))
    assert min(row.reused_tokens for row in store.last_report.rows) > 0
    assert store.private_blocks() == 0


def test_beams_share_the_prompt_in_memory(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    llama.generate(kit.ids_of(300, 1), num_beams=4, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    # 4 full blocks once; the last one of 44 tokens, once for the prompt and then once a beam.
    assert len(store.made[-1].held) <= 4 + 1 + 4


@pytest.mark.parametrize("reuse", [False, True])
def test_prompt_lookup_is_the_greedy_text_b032(kit: Any, store: Any, llama: Any, attached: Any, reuse: bool) -> None:
    ids = kit.ids_of(20, 1).repeat(1, 7)
    native = llama.generate(ids, max_new_tokens=40, do_sample=False, use_cache=False)
    if reuse:
        llama.generate(ids, max_new_tokens=2, do_sample=False)
    found = llama.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
    same_text(llama, ids, native, found)
    assert store.last_report.reused_tokens == (128 if reuse else 0)


def test_an_assistant_model_gives_the_greedy_text_b176(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    assistant = copy.deepcopy(kit.build("llama", seed=0))
    ids = kit.ids_of(100, 1)
    native = llama.generate(ids, max_new_tokens=30, do_sample=False, use_cache=False)
    for _ in range(2):
        same_text(
            llama, ids, native, llama.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=assistant)
        )
    with attach(store, assistant, codec="passthrough"):
        same_text(
            llama, ids, native, llama.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=assistant)
        )


@pytest.mark.parametrize("chunk", [16, 64, 100, 1000])
def test_chunked_prefill_appends_the_prompt_once(kit: Any, store: Any, llama: Any, attached: Any, chunk: int) -> None:
    ids, mask = kit.padded([kit.ids_of(210, 1), kit.ids_of(150, 2)])
    native = llama.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False)
    for config in (None, GenerationConfig(prefill_chunk_size=chunk, max_new_tokens=8, do_sample=False)):
        options = (
            {"generation_config": config}
            if config
            else {"prefill_chunk_size": chunk, "max_new_tokens": 8, "do_sample": False}
        )
        same_text(llama, ids, native, llama.generate(ids, attention_mask=mask, **options), mask)
    assert store.last_report.reused_tokens > 0


def test_a_mask_that_generate_makes_up_from_pad_tokens(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    rows = [kit.ids_of(90, 1), kit.ids_of(140, 2)]
    ids, mask = kit.padded(rows)
    expected = llama.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    found = llama.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(expected, found)
    assert store.last_report.path == "kvstore"
    assert store.last_report.reused_tokens > 0


def test_what_the_digest_does_not_cover_runs_native_with_the_reason_b156(
    kit: Any, store: Any, llama: Any, attached: Any
) -> None:
    ids = kit.ids_of(80, 1)
    native = llama.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
    assert "use_cache" in store.last_report.warnings[0]
    right = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    right_mask = (right != 0).long()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("input_ids", {"inputs_embeds": llama.get_input_embeddings()(ids)}),
        ("position_ids", {"input_ids": ids, "position_ids": torch.arange(80).view(1, -1)}),
        ("DynamicCache", {"input_ids": ids, "past_key_values": DynamicCache(config=llama.config)}),
        ("static", {"input_ids": ids, "cache_implementation": "static", "disable_compile": True}),
        ("output_hidden_states", {"input_ids": ids, "output_hidden_states": True, "output_attentions": False}),
        ("on the left", {"input_ids": right, "attention_mask": right_mask}),
    ]
    for name, arguments in cases:
        result = llama.generate(**arguments, max_new_tokens=5, do_sample=False)
        report = store.last_report
        assert report.path == "native", name
        assert name in report.warnings[0]
        if name != "on the left":
            assert torch.equal(result[:, -5:], native[:, -5:]), name
    assert not store.requests


def test_results_that_are_kept_keep_their_own_blocks_only_b068(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    ids = kit.ids_of(70, 1)
    kept = [llama.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True) for _ in range(5)]
    assert len(store.requests) == 5
    assert all(isinstance(result.past_key_values, KVStoreCache) for result in kept)
    assert all(request.calls[-1] == "release-ahead" for request in store.requests)
    # It may grow again: then all it needs comes in one call.
    result = kept.pop()
    more = torch.cat([result.sequences, kit.ids_of(70, 2)], dim=1)
    llama.generate(more, max_new_tokens=3, do_sample=False, past_key_values=result.past_key_values)
    assert "reserve" in result.past_key_values.state.pool.request.calls[1:]
    del kept, result
    assert not store.requests
    assert store.private_blocks() == 0


def test_the_request_ends_with_generate_also_by_an_exception(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    class Stop(Exception):
        pass

    class Streamer:
        def __init__(self, after: int) -> None:
            self.seen: list[int] = []
            self.after = after

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()
            self.after -= 1
            if self.after == 0:
                raise Stop

        def end(self) -> None:
            self.seen.append(-1)

    ids = kit.ids_of(70, 1)
    streamer = Streamer(1000)
    out = llama.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.seen == [*out[0].tolist(), -1]
    with pytest.raises(Stop):
        llama.generate(ids, max_new_tokens=6, do_sample=False, streamer=Streamer(4))
    assert not store.requests
    assert torch.equal(out, llama.generate(ids, max_new_tokens=6, do_sample=False))


def test_four_threads_on_one_model_get_their_serial_texts_b145(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    prefix = kit.ids_of(64, 9)
    batches = [
        kit.padded([torch.cat([prefix, kit.ids_of(5 + 11 * n, n)], dim=1), kit.ids_of(20 + n, 40 + n)])
        for n in range(4)
    ]
    serial = [llama.generate(i, attention_mask=m, max_new_tokens=10, do_sample=False) for i, m in batches]
    found: list[list[torch.Tensor]] = [[] for _ in batches]
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            ids, mask = batches[n]
            for _ in range(6):
                found[n].append(llama.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False))
        except Exception as error:  # noqa: BLE001  shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for n, texts in enumerate(found):
        assert len(texts) == 6
        for text in texts:
            same_text(llama, batches[n][0], serial[n], text, batches[n][1])


def test_the_answer_is_shared_only_if_asked_for(kit: Any, llama: Any, store: Any) -> None:
    ids = kit.ids_of(100, 1)
    for commit, expected in (("prompt", 64), ("all", 192)):
        fresh = type(store)()
        with attach(fresh, llama, codec="passthrough", commit=commit):
            first = llama.generate(ids, max_new_tokens=100, do_sample=False)
            follow = torch.cat([first, kit.ids_of(7, 2)], dim=1)
            options = {"attention_mask": torch.ones_like(follow), "max_new_tokens": 8, "do_sample": False}
            native = llama.generate(follow, use_cache=False, **options)
            same_text(llama, follow, native, llama.generate(follow, **options))
            assert fresh.last_report.reused_tokens == expected


def test_local_budget_is_a_typed_error_or_the_native_cache(kit: Any, llama: Any, store: Any) -> None:
    from kvstore_client.errors import LocalBudgetExceeded

    ids = kit.ids_of(200, 1)
    native = llama.generate(ids, max_new_tokens=4, do_sample=False)
    store.budget = 2
    with attach(store, llama, codec="int8"), pytest.raises(LocalBudgetExceeded, match="2 blocks"):
        llama.generate(ids, max_new_tokens=4, do_sample=False)
    with attach(store, llama, codec="int8", fallback="native"):
        assert torch.equal(native, llama.generate(ids, max_new_tokens=4, do_sample=False))
    assert store.last_report.path == "native"
    assert not store.requests


def test_an_absent_service_changes_nothing_but_the_report(kit: Any, llama: Any, store: Any, attached: Any) -> None:
    ids = kit.ids_of(100, 1)
    expected = llama.generate(ids, max_new_tokens=10, do_sample=False)
    store.absent = True
    assert torch.equal(expected, llama.generate(ids, max_new_tokens=10, do_sample=False))
    assert store.last_report.rows[0].why_no_more == "service absent"


def test_direct_calls_without_our_cache_are_the_stock_ones(kit: Any, llama: Any, store: Any) -> None:
    ids, mask = kit.padded([kit.ids_of(30, 1), kit.ids_of(22, 2)])
    expected = llama(ids, attention_mask=mask).logits
    cache = DynamicCache(config=llama.config)
    with attach(store, llama, codec="int8"):
        assert torch.equal(expected, llama(ids, attention_mask=mask).logits)
        found = llama(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert torch.equal(expected, found.logits)
        assert cache.get_seq_length() == 30


def test_bf16_and_fp32_models_share_nothing_b006(kit: Any, store: Any) -> None:
    ids = kit.ids_of(130, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = kit.build("llama", dtype=dtype)
        with attach(store, model, codec="int8"):
            model.generate(ids, max_new_tokens=4, do_sample=False)
            assert store.last_report.reused_tokens == 0
            model.generate(ids, max_new_tokens=4, do_sample=False)
            assert store.last_report.reused_tokens == 128
    assert len(store.index) == 3


def test_a_kept_cache_is_refused_where_it_would_be_wrong(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    ids = kit.ids_of(80, 1)
    with attached.cache(ids) as cache, pytest.raises(UnsupportedInputError, match="output_hidden_states"):
        llama.generate(ids, past_key_values=cache, output_hidden_states=True, max_new_tokens=2)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 20}])
def test_a_row_that_is_all_padding_in_a_piece_has_no_positions_to_check(
    kit: Any, store: Any, llama: Any, attached: Any, options: dict[str, Any]
) -> None:
    long, short = kit.ids_of(215, 1), kit.ids_of(2 if "prefill_chunk_size" in options else 1, 2)
    ids, mask = kit.padded([long, short])
    common = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    native = llama.generate(ids, **common, num_beams=options.get("num_beams", 1), use_cache=False)
    llama.generate(long, max_new_tokens=1, do_sample=False)
    assert torch.equal(native, llama.generate(ids, **common, **options))
    assert store.last_report.path == "kvstore"
    assert [row.reused_tokens for row in store.last_report.rows] == [192, 0]


def test_autocast_runs_native_with_the_reason(kit: Any, store: Any, llama: Any, attached: Any) -> None:
    ids = kit.ids_of(130, 1)
    with torch.autocast("cpu", torch.bfloat16):
        native = llama.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
        assert torch.equal(native, llama.generate(ids, max_new_tokens=4, do_sample=False))
    assert store.last_report.path == "native"
    assert "autocast" in store.last_report.warnings[0]
    assert not any(store.index.values())


def test_autocast_around_a_loop_of_ones_own_is_refused_before_anything_is_written(
    kit: Any, store: Any, llama: Any, attached: Any
) -> None:
    ids = kit.ids_of(130, 1)
    with attached.cache(ids) as cache:
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UnsupportedInputError, match="autocast"):
                llama(ids, past_key_values=cache)
            with pytest.raises(UnsupportedInputError, match="autocast"):
                llama.generate(ids, past_key_values=cache, max_new_tokens=2)
            with pytest.raises(UnsupportedInputError, match="autocast"):
                attached.prewarm(ids)
        llama(ids, past_key_values=cache)
        assert cache.get_seq_length() == 130
    assert not any(store.index.values())


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "for all modules"])
def test_hooks_that_may_change_the_text_keep_a_request_off_the_store(
    kit: Any, store: Any, llama: Any, attached: Any, kind: str
) -> None:
    ids = kit.ids_of(130, 1)
    llama.generate(ids, max_new_tokens=6, do_sample=False)
    layer = llama.model.layers[0].self_attn.v_proj
    if kind == "forward hook":
        handle = layer.register_forward_hook(lambda module, args, output: -2 * output)
    elif kind == "pre-hook":
        handle = layer.register_forward_pre_hook(lambda module, args: (-2 * args[0],))
    else:
        handle = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: (-2 * args[0],) if module is layer else None
        )
    try:
        native = llama.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(native, llama.generate(ids, max_new_tokens=6, do_sample=False))
        assert store.last_report.path == "native"
        assert "hook" in store.last_report.warnings[0]
        for use in (attached.cache, attached.prewarm):
            with pytest.raises(UnsupportedInputError, match="hook"):
                use(ids)
    finally:
        handle.remove()
    llama.generate(ids, max_new_tokens=6, do_sample=False)
    assert store.last_report.reused_tokens == 128


def test_hooks_of_transformers_itself_only_look(kit: Any, store: Any) -> None:
    model, ids = kit.build("llama"), kit.ids_of(130, 1)
    with attach(store, model, codec="passthrough"):
        # Leaves hooks on the model for good.
        model(ids, output_hidden_states=True, output_attentions=True)
        assert any(module._forward_hooks for module in model.modules())
        for _ in range(2):
            model.generate(ids, max_new_tokens=2, do_sample=False)
        assert store.last_report.reused_tokens == 128
