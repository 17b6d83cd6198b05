"""int8 on the K and V of a real model: the device's kernels against the CPU's, same codec plan, teacher-forced."""

from __future__ import annotations

from kvstore.bench.stage import Stage
from kvstore.demo.errors import DemoError

_NAMES = ("reference", "tested")
_TOKENS, _PREFILL = 400, 256
_SHORT = (150, 70)
_RUN_S = 240.0


def launch(stage: Stage) -> None:
    """One worker on the CPU, one on the device, with the same model."""
    settings = stage.settings
    folder = str(settings.folder) if settings.folder else None
    for name, device in zip(_NAMES, ("cpu", settings.device), strict=True):
        stage.worker(name, start_only=True, device=device, model="smollm2" if folder else "tiny", folder=folder)


def play(stage: Stage) -> None:
    """KL divergence of the next-token distributions, in fp32 without TF32."""
    settings = stage.settings
    model = "smollm2" if settings.folder else "tiny"
    if settings.folder is None and settings.on_gpu:
        stage.skip("fidelity on SmolLM2", settings.why_no_folder)
    if settings.on_gpu:
        stage.skip("fidelity on models with a large bias on K", "those models do not exist yet")
    names = _NAMES
    launch(stage)
    plans, files = [], [stage.folder / f"{name}.npy" for name in names]
    served = {"reference": stage.service("reference", "cpu"), "tested": stage.service("gpu", settings.device)}
    for name in names:
        stage.worker(name)
        plans.append(stage.attach(name, "int8", "int8", served[name].address))
    if plans[0]["plan"] != plans[1]["plan"]:
        raise DemoError("the two workers have different codec plans: expected the one from the shared cache folder")
    tokens, prefill = (_TOKENS, _PREFILL) if model == "smollm2" else _SHORT
    ids = stage.workers["reference"].ask("text_ids", 60.0, tokens=tokens)
    for name, file in zip(names, files, strict=True):
        stage.workers[name].send("teacher_forced", arm="int8", ids=ids, prefill=prefill, target=str(file))
    counts = [stage.workers[name].receive(_RUN_S) for name in names]
    mean, largest, top = divergence(*[str(file) for file in files])
    stage.add(
        "fidelity",
        model=model,
        tokens=len(ids),
        prefill=prefill,
        positions=counts[0],
        kl_mean=mean,
        kl_max=largest,
        top_equal=top,
        plan=plans[0]["plan"],
        origin=plans[0]["origin"],
    )
    for name in names:
        stage.end_worker(name)


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
