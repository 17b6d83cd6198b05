"""One process writes, another reads the same bytes through its own mapping, for every kind of slab."""

from __future__ import annotations

import subprocess

from kvstore.bench.memory import MIB
from kvstore.bench.shapes import Run
from kvstore.bench.stage import Stage
from kvstore.demo.errors import DemoError

_TOKENS = 200
_BUDGET = 1024 * MIB


def launch(stage: Stage) -> None:
    """Writer, reader, intruder."""
    for worker in ("main", "second", "intruder"):
        stage.worker(worker, start_only=True)


def play(stage: Stage) -> None:
    """Hashes of blocks in two processes; a third one writes where it may only read, and is the only one to suffer."""
    kinds = ("vmm", "legacy") if stage.settings.on_gpu else ("memfd",)
    workers = ("main", "second", "intruder")
    for name in workers:
        stage.worker(name)
    for kind in kinds:
        # An arm of its own: the same model, another service.
        try:
            _one_kind(stage, kind)
        except DemoError as error:
            stage.fail(f"mappings, {kind}", error)
            for name in workers:
                stage.recover(name, error)
                stage.worker(name)
    stage.end_worker("intruder")


def _one_kind(stage: Stage, kind: str) -> None:
    options = ("--slab-kind", kind) if stage.settings.on_gpu else ()
    served = stage.service(
        f"slabs-{kind}", stage.settings.device, budget=_BUDGET if stage.settings.on_gpu else 0, options=options
    )
    seed = stage.next_seed()
    for name in ("main", "second"):
        stage.attach(name, kind, "int8", served.address)
    stage.run("main", kind, Run(1, _TOKENS, 1), seed=seed)
    stage.flush("main", kind)
    written = stage.workers["main"].ask("block_hashes", 60.0, arm=kind, tokens_in=_TOKENS, seed=seed)
    read = stage.workers["second"].ask("block_hashes", 60.0, arm=kind, tokens_in=_TOKENS, seed=seed)
    stage.add(
        "mapping",
        kind=kind,
        transport=stage.attached["second"][kind]["transport"],
        reason=stage.attached["second"][kind]["transport_reason"],
        blocks=len(written["hashes"]),
        equal=bool(written["hashes"]) and written["hashes"] == read["hashes"],
        reader_writable=any(read["writable"]),
    )
    if kind == "legacy":
        # Such handles are always writable; nothing to show.
        return
    stage.attach("intruder", kind, "int8", served.address)
    outcome = _intrude(stage, kind, seed)
    again = stage.workers["second"].ask("block_hashes", 60.0, arm=kind, tokens_in=_TOKENS, seed=seed)
    alive = stage.run("main", kind, Run(1, _TOKENS, 4))
    stage.add(
        "read-only",
        kind=kind,
        outcome=outcome,
        faulted=outcome.startswith("faulted"),
        others_unharmed=again["hashes"] == read["hashes"] and alive["tokens_out"] == 4,
    )
    stage.end_worker("intruder")


def _intrude(stage: Stage, kind: str, seed: int) -> str:
    """What became of the writer: "faulted: …", or what went wrong instead."""
    worker = stage.workers["intruder"]
    try:
        return "faulted: " + str(worker.ask("write_read_only", 60.0, arm=kind, tokens_in=_TOKENS, seed=seed))
    except DemoError as error:
        try:
            code: int | None = worker.process.wait(10.0)
        except subprocess.TimeoutExpired:
            code = None
        # On a CPU the process ends with SIGSEGV (11) or SIGBUS (7).
        if code in (-11, -7):
            return f"faulted: signal {-code}"
        return str(error).splitlines()[0]
