"""The service absent, killed and full: generation goes on with the same codec on the worker's own memory."""

from __future__ import annotations

import signal
from typing import Any

from kvstore.demo import texts
from kvstore.demo.compare import compare_tokens
from kvstore.demo.errors import DemoError
from kvstore.demo.stage import BLOCK_TOKENS, MIB, RUN_S, Stage, budget_for

_NEW_TOKENS = 160


def outages(stage: Stage) -> None:
    """One prompt, cold, in four situations: the text must be that of the undisturbed run."""
    prompt = stage.documents(
        "worker-b", stage.settings.short_tokens, 60 * stage.settings.document_tokens, texts.QUESTIONS[:1]
    )[0]
    reference = stage.run("worker-b", "int8", prompt, _NEW_TOKENS, exact=True)
    block_bytes = stage.admin.namespace(stage.settings.model, "int8").block_bytes
    _absent(stage, prompt, reference)
    _killed(stage, prompt, reference)
    # Room for the prompt and nothing more, so that it is used up while tokens are generated.
    _full(stage, prompt, reference, budget_for(-(-len(prompt) // BLOCK_TOKENS), block_bytes))


def _absent(stage: Stage, prompt: list[int], reference: dict[str, Any]) -> None:
    stage.start_worker("orphan", ("int8",), address=stage.folder / "nobody.sock")
    answer = stage.run("orphan", "int8", prompt, _NEW_TOKENS, exact=True)
    # The warning about the missing service came with the first request, which was the warm-up.
    warnings = [line for line in stage.workers["orphan"].ask("warnings_so_far") if line]
    _add(stage, "service absent", reference, answer, len(warnings))
    stage.end_worker("orphan")


def _killed(stage: Stage, prompt: list[int], reference: dict[str, Any]) -> None:
    service, _ = stage.start_service("mortal", budget=512 * MIB)
    stage.start_worker("bereft", ("int8",), address=service.address)
    worker = stage.workers["bereft"]
    worker.send("run", arm="int8", tokens=prompt, new_tokens=_NEW_TOKENS, exact=True, announce=True)
    worker.wait_event(RUN_S)
    service.signal_group(signal.SIGKILL)
    answer = worker.receive(RUN_S)
    _add(stage, "service killed in mid-generation", reference, answer, len(answer["warnings"]))
    stage.end_worker("bereft")


def _full(stage: Stage, prompt: list[int], reference: dict[str, Any], budget: int) -> None:
    service, _ = stage.start_service("small", budget=budget)
    stage.start_worker("crowded", ("int8",), address=service.address)
    answer = stage.run("crowded", "int8", prompt, _NEW_TOKENS, exact=True)
    if not answer["local_blocks"]:
        raise DemoError("the service was not full: this model's blocks are too small for a budget of one slab")
    _add(stage, "service full in mid-generation", reference, answer, len(answer["warnings"]))
    stage.end_worker("crowded")


def _add(stage: Stage, case: str, reference: dict[str, Any], answer: dict[str, Any], warnings: int) -> None:
    found = compare_tokens(reference["tokens"], answer["tokens"])
    stage.add(
        "fault",
        case=case,
        equal=found.equal,
        first_difference=found.first_difference,
        warns=True,
        warnings=warnings,
        local_blocks=answer["local_blocks"],
        reused=answer["reused"],
    )
