"""Nothing changes the text: passthrough against native, batches, and two writers of one document."""

from __future__ import annotations

from kvstore.demo import texts
from kvstore.demo.compare import compare_tokens
from kvstore.demo.stage import RUN_S, Stage

_BATCH_DOCUMENT = 250


def texts_equal(stage: Stage) -> None:
    """`passthrough` gives the native text: cold against native, warm against native that prefills in the same parts.

    int8 rounds, so it is held to its own undisturbed run: the same prompt with the same reuse gives the same text.
    """
    new = stage.settings.new_tokens
    prompts = stage.prompts if stage.settings.full else stage.prompts[:2]
    for number, prompt in enumerate(prompts):
        worker = "worker-c" if number % 2 else "worker-b"
        ours = stage.run(worker, "passthrough", prompt, new)
        stage.flush(worker)
        # One worker's native arm serves all: it keeps the prefilled prefix, which is most of the work.
        known = stage.native if number == 0 and not ours["reused"] else None
        native = known or stage.run("worker-b", "native", prompt, new, gaps=True, split=ours["reused"])
        case = "warm" if ours["reused"] else "cold"
        stage.compare(native, ours, codec="passthrough", case=case, worker=worker, prompt=number)
        # Reuse is by whole blocks, so another codec's answer to this prompt was split at the same token.
        if number in stage.answers and stage.answers[number]["reused"] == ours["reused"]:
            against = f"{case}, against native"
            answer = stage.answers[number]
            stage.compare(native, answer, measure="drift", codec=stage.settings.codec, case=against, prompt=number)
    again = [stage.run("worker-b", "int8", stage.prompts[2], new) for _ in range(2)]
    stage.compare(again[0], again[1], codec="int8", case="the same prompt, the same reuse", worker="worker-b", prompt=2)


def batch(stage: Stage) -> None:
    """Four rows with equal prefixes and different padding, cold and warm, each against native with the same parts."""
    new = min(8, stage.settings.new_tokens)
    questions = [question + " " + "Please be brief. " * index for index, question in enumerate(texts.QUESTIONS)]
    length = min(_BATCH_DOCUMENT, stage.settings.document_tokens)
    rows = stage.documents("worker-b", length, 5 * stage.settings.document_tokens, questions)
    worker = stage.workers["worker-b"]
    for case in ("cold", "warm"):
        for row in rows:
            stage.note_written("worker-b", "passthrough", row)
        ours = worker.ask("batch", RUN_S, arm="passthrough", rows=rows, new_tokens=new)
        split = ours["padding"][0] + ours["reused"][0] if case == "warm" and ours["reused"][0] else 0
        native = worker.ask("batch", RUN_S, arm="native", rows=rows, new_tokens=new, split=split)
        for index in range(len(rows)):
            found = compare_tokens(native["tokens"][index], ours["tokens"][index], native["gaps"][index])
            stage.add(
                "text",
                codec="passthrough",
                case=f"batch {case}",
                worker="worker-b",
                prompt=index,
                equal=found.equal,
                first_difference=found.first_difference,
                gap=found.gap,
                tokens=new,
            )
            if case == "warm":
                stage.add(
                    "batch",
                    row=index,
                    tokens=len(rows[index]),
                    padding=ours["padding"][index],
                    reused=ours["reused"][index],
                )
        stage.flush("worker-b")
    stage.add_stored("worker-b", "passthrough", "batch")


def same_moment(stage: Stage) -> None:
    """Both workers get a document nobody has seen, at the same moment. It is computed twice at worst, stored once."""
    prompts = stage.documents(
        "worker-b", stage.settings.short_tokens, 7 * stage.settings.document_tokens, texts.QUESTIONS[:2]
    )
    pair = ("worker-b", "worker-c")
    for worker, prompt in zip(pair, prompts, strict=True):
        stage.note_written(worker, "int8", prompt)
        stage.workers[worker].send("run", arm="int8", tokens=prompt, new_tokens=8)
    answers = [stage.workers[worker].receive(RUN_S) for worker in pair]
    for worker in pair:
        stage.flush(worker)
    stage.add(
        "same-moment",
        reused=[answer["reused"] for answer in answers],
        first_token_s=[answer["times_s"][0] for answer in answers],
    )
    stage.add_stored("worker-b", "int8", "at the same moment")
