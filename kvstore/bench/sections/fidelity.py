"""int8 on the K and V of a real model: the device's kernels against the CPU's, same codec plan, teacher-forced.

Three comparisons, all with the CPU's run. `given`: the device stores the K and V that the CPU stored, so both attend on
the same codes, and what differs is the kernels and the model's own arithmetic: this is the claim. `free`: the device
stores its own K and V; a difference in the last bit then moves some numbers to another code, and layer by layer more of
them. `nudged`: the CPU itself, its input embeddings changed by one part in 2**22: how much of `free` is such luck.
"""

from __future__ import annotations

from typing import Any

from kvstore.bench.stage import Stage
from kvstore.demo.errors import DemoError
from kvstore.fidelity.settings import VARIANTS

_NAMES = ("reference", "tested")
_TOKENS, _PREFILL = 400, 256
_SHORT = (150, 70)
_RUN_S = 240.0
_NUDGE = 2.0**-22


def launch(stage: Stage) -> None:
    """One worker on the CPU, one on the device, with the same model."""
    settings = stage.settings
    folder = str(settings.folder) if settings.folder else None
    for name, device in zip(_NAMES, ("cpu", settings.device), strict=True):
        stage.worker(name, start_only=True, device=device, model="smollm2" if folder else "tiny", folder=folder)


def play(stage: Stage) -> None:
    """KL divergence of the next-token distributions, in fp32 without TF32, of the model and of its harder variants."""
    settings = stage.settings
    if settings.folder is None and settings.on_gpu:
        stage.skip("fidelity on SmolLM2", settings.why_no_folder)
    launch(stage)
    for variant in VARIANTS:
        if stage.out_of_time(f"fidelity, {variant}"):
            continue
        _play_variant(stage, variant)
    for name in _NAMES:
        stage.end_worker(name)


def _play_variant(stage: Stage, variant: str) -> None:
    settings = stage.settings
    model = "smollm2" if settings.folder else "tiny"
    arm = f"int8-{variant}"
    served = {"reference": stage.service("reference", "cpu"), "tested": stage.service("gpu", settings.device)}
    plans = []
    for name in _NAMES:
        stage.worker(name)
        plans.append(stage.attach(name, arm, "int8", served[name].address, variant=variant))
    if plans[0]["plan"] != plans[1]["plan"]:
        raise DemoError("the two workers have different codec plans: expected the one from the shared cache folder")
    tokens, prefill = (_TOKENS, _PREFILL) if model == "smollm2" else _SHORT
    ids = stage.workers["reference"].ask("text_ids", 60.0, tokens=tokens)
    stored = str(stage.folder / f"{variant}.pt")

    def logits(worker: str, how: str, **options: Any) -> str:
        file = str(stage.folder / f"{variant}-{how}.npy")
        stage.workers[worker].ask("teacher_forced", _RUN_S, arm=arm, ids=ids, prefill=prefill, target=file, **options)
        return file

    reference = logits("reference", "reference", keep=stored)
    runs: list[tuple[str, str, dict[str, Any]]] = [("given", "tested", {"given": stored}), ("free", "tested", {})]
    if variant == "plain":
        runs.append(("nudged", "reference", {"nudge": _NUDGE}))
    for how, name, options in runs:
        mean, largest, top = divergence(reference, logits(name, how, **options))
        stage.add(
            "fidelity",
            how=how,
            model=model,
            variant=variant,
            tokens=len(ids),
            prefill=prefill,
            kl_mean=mean,
            kl_max=largest,
            top_equal=top,
            plan=plans[0]["plan"],
            origin=plans[0]["origin"],
        )


def divergence(reference: str, tested: str) -> tuple[float, float, float]:
    """(mean, largest) KL(reference ‖ tested) in nats over positions, and the share of equal best tokens. Both files
    hold logits [positions, vocabulary].
    """
    import numpy as np

    ours, theirs = (np.load(name).astype(np.float64) for name in (tested, reference))
    logs = []
    for logits in (theirs, ours):
        shifted = logits - logits.max(axis=1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1)
    top = float((logs[0].argmax(axis=1) == logs[1].argmax(axis=1)).mean())
    return float(kl.mean()), float(kl.max()), top
