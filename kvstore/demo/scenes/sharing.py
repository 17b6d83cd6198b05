"""The idea itself: a cold worker, a warm one, a killed one, one that comes after, and another model beside them."""

from __future__ import annotations

from typing import Any

from kvstore.demo import models, texts
from kvstore.demo.stage import BLOCK_TOKENS, MIB, Stage, tokens_per_second

ARMS = ("int8", "passthrough", "native")
BUDGET = 2048 * MIB
NAMESPACE_BUDGET = 1024 * MIB


def start(stage: Stage) -> None:
    """Service, workers A and B. What loading and attaching takes is shown, but is no part of a first token."""
    stage.service, stage.admin = stage.start_service(budget=BUDGET, namespace_budget=NAMESPACE_BUDGET)
    arms_a = (stage.settings.codec, "native")
    stage.launch("worker-a", arms_a)
    stage.launch("worker-b", ARMS)
    worker = stage.await_worker("worker-a", arms_a)
    stage.await_worker("worker-b", ARMS)
    answer = worker.ask(
        "prompts", document_tokens=stage.settings.document_tokens, start=0, questions=list(texts.QUESTIONS)
    )
    stage.prompts, stage.title = answer["prompts"], answer["title"]
    if answer["note"]:
        stage.say(answer["note"])
    for name in ("worker-a", "worker-b"):
        loaded = stage.loaded[name]
        stage.add("start", worker=name, **loaded)
    shared = texts.common_prefix(stage.prompts[0], stage.prompts[1])
    note = texts.why_nothing_shared(shared, BLOCK_TOKENS)
    if note:
        stage.say(note)


def first_tokens(stage: Stage) -> None:
    """A answers its question cold, with our cache and with the native one; B answers others about the same document."""
    first, second = stage.prompts[0], stage.prompts[1]
    new = stage.settings.new_tokens
    codec = stage.settings.codec
    repeats = 3 if stage.settings.full else 1
    for number in range(repeats):
        cold = stage.run("worker-a", codec, first, new)
        _first_token(stage, "worker-a", codec, "cold", first, cold)
        stage.answers[0] = cold
        native = stage.run("worker-a", "native", first, new, gaps=True)
        stage.native = native
        _first_token(stage, "worker-a", "native", "cold", first, native)
        stage.flush("worker-a")
        if number < repeats - 1:
            stage.admin.evict(stage.admin.namespace(stage.settings.model, codec).namespace_id)
            stage.written.pop((stage.settings.model, codec))
    warm = {}
    for index in (1, 2, 1):
        warm = stage.run("worker-b", codec, stage.prompts[index], new)
        _first_token(stage, "worker-b", codec, "warm", stage.prompts[index], warm)
        stage.answers[index] = warm
    stage.flush("worker-b")
    stage.add_stored("worker-b", codec, "one after the other")
    _bytes(stage, "worker-b", codec, second, warm, native)


def kill_and_return(stage: Stage) -> None:
    """A is killed; what it wrote stays. C starts afterwards and is warm at once."""
    stage.workers.pop("worker-a").kill()
    stage.admin.wait_until(
        lambda: all(session.name != "worker-a" for session in stage.admin.sessions()),
        5.0,
        "the service noticed that worker A died",
    )
    stage.start_worker("worker-c", ARMS)
    stage.add("start", worker="worker-c", **stage.loaded["worker-c"])
    prompt, codec = stage.prompts[1], stage.settings.codec
    before = stage.run("worker-b", codec, prompt, stage.settings.new_tokens)
    warm = stage.run("worker-c", codec, prompt, stage.settings.new_tokens)
    _first_token(stage, "worker-c", codec, "warm", prompt, warm)
    stage.compare(before, warm, codec=codec, case="worker C after A was killed, against worker B", worker="worker-c")


def second_model(stage: Stage) -> None:
    """Another model, same text and same token ids: it finds nothing of the first model's, then its own blocks."""
    name = models.SECOND[stage.settings.model]
    arms = ("int8", "native")
    stage.start_worker("worker-q", arms, model=name)
    prompt = stage.prompts[0]
    first = stage.run("worker-q", "int8", prompt, 4)
    native = stage.run("worker-q", "native", prompt, 4)
    stage.flush("worker-q")
    second = stage.run("worker-q", "int8", prompt, 4)
    own = {"worker-q"}
    foreign = first["reused"] + sum(tokens for writer, tokens in second["written_by"] if writer not in own)
    stage.add("second-model", model=name, foreign_hits=foreign, own_hits=second["reused"], tokens=len(prompt))
    _bytes(stage, "worker-q", "int8", prompt, second, native)
    for space in stage.admin.namespaces():
        stage.add(
            "quota",
            model=space.model_name,
            codec=space.codec,
            held_bytes=space.slab_bytes,
            quota_bytes=space.max_bytes,
        )
    stage.end_worker("worker-q")


def _first_token(stage: Stage, worker: str, arm: str, case: str, prompt: list[int], answer: dict[str, Any]) -> None:
    stage.add(
        "first-token",
        worker=worker,
        arm=arm,
        case=case,
        tokens=len(prompt),
        reused=answer["reused"],
        written_by=answer["written_by"],
        why_no_more=answer["why_no_more"],
        first_token_s=answer["times_s"][0],
        match_ms=answer["match_ms"],
        tokens_per_s=tokens_per_second(answer),
        text=answer["text"],
    )


def _bytes(
    stage: Stage, worker: str, codec: str, prompt: list[int], answer: dict[str, Any], native: dict[str, Any]
) -> None:
    """What one document takes. Whole blocks only, so that a half-empty block says nothing about the codec."""
    loaded = stage.loaded[worker]
    space = stage.admin.namespace(stage.model_of(worker), codec)
    blocks = len(prompt) // BLOCK_TOKENS
    if not blocks:
        return
    numbers = 2 * loaded["layers"] * loaded["kv_heads"] * loaded["head_dim"] * blocks * BLOCK_TOKENS
    stage.add(
        "bytes",
        worker=worker,
        model=stage.model_of(worker),
        codec=codec,
        head_dim=loaded["head_dim"],
        tokens=blocks * BLOCK_TOKENS,
        block_bytes=space.block_bytes,
        stored_bytes=blocks * space.block_bytes,
        worker_bytes=answer["local_blocks"] * space.block_bytes,
        native_bytes_16bit=2 * numbers,
        native_bytes_held=native["native_bytes"],
        native_tokens=native["native_bytes_16bit"] // (2 * numbers // (blocks * BLOCK_TOKENS)),
    )
