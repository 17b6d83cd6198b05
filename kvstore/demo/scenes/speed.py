"""How fast: cold prompts, decode and look-ups, ours and native taking turns in one process."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

from kvstore.demo import texts
from kvstore.demo.claims import percentile
from kvstore.demo.stage import RUN_S, Stage, tokens_per_second

_STEPS = 100
_LOOKUP_BLOCKS = 512


def cold_pairs(stage: Stage) -> None:
    """Prompts that nobody has seen, each computed with both caches, the order changing from pair to pair."""
    settings = stage.settings
    pairs, length = (13, settings.document_tokens) if settings.full else (5, settings.short_tokens)
    for pair in range(pairs):
        start = 20 * settings.document_tokens + (pair + 1) * (length + 17)
        prompt = stage.documents("worker-b", length, start, texts.QUESTIONS[:1])[0]
        order = ("native", "int8") if pair % 2 else ("int8", "native")
        answers = {arm: stage.run("worker-b", arm, prompt, 2) for arm in order}
        ours, native = answers["int8"], answers["native"]
        stage.add(
            "cold-pair",
            pair=pair,
            first=order[0],
            tokens=len(prompt),
            reused=ours["reused"],
            ours_s=ours["times_s"][0],
            native_s=native["times_s"][0],
            ratio=ours["times_s"][0] / native["times_s"][0],
        )
        stage.flush("worker-b")


def decode_pairs(stage: Stage) -> None:
    """Decode after the whole document, with both caches in turn. No step of either ends early."""
    prompt = stage.prompts[1]
    pairs, new = (7, 48) if stage.settings.full else (3, 24)
    # The same split as in the texts before: its prefilled prefix is still there.
    split = stage.run("worker-b", "int8", prompt, 2)["reused"]
    stage.run("worker-b", "native", prompt, 2, split=split)
    for pair in range(pairs):
        order = ("native", "int8") if pair % 2 else ("int8", "native")
        speeds = {}
        for arm in order:
            options = {"split": split} if arm == "native" else {}
            answer = stage.run("worker-b", arm, prompt, new, exact=True, **options)
            speeds[arm] = tokens_per_second(answer)
        stage.add(
            "decode-pair",
            pair=pair,
            first=order[0],
            context=len(prompt),
            tokens=new,
            ours_tokens_per_s=speeds["int8"],
            native_tokens_per_s=speeds["native"],
            ratio=speeds["int8"] / speeds["native"],
        )


def look_ups(stage: Stage) -> None:
    """LookupAndLease of a long prefix over the Unix socket, with a service and a client of its own (benchmarks/)."""
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "lookup.py"
    if not script.exists():
        stage.say("look-ups are not measured: benchmarks/lookup.py is in the source checkout only")
        return
    target = stage.folder / "lookup.json"
    calls = 2000 if stage.settings.full else 500
    arguments = ["--blocks", str(_LOOKUP_BLOCKS), "--calls", str(calls), "--json", str(target)]
    stage.run_script("lookup", [str(script), *arguments], timeout=120)
    found = json.loads(target.read_text())
    stage.add("lookup", **{key: found[key] for key in ("blocks", "calls", "p50_ms", "p90_ms", "p99_ms")})


def stopped_server(stage: Stage) -> None:
    """SIGSTOP for supervisor and server from the first token to the last: no step may wait for either."""
    prompt = stage.prompts[1]
    worker = stage.workers["worker-b"]
    for pair in range(3):
        for arm in ("undisturbed", "stopped") if pair % 2 else ("stopped", "undisturbed"):
            stage.note_written("worker-b", "int8", prompt)
            worker.send("run", arm="int8", tokens=prompt, new_tokens=_STEPS + 1, exact=True, announce=True)
            worker.wait_event(RUN_S)
            if arm == "stopped":
                stage.service.signal_group(signal.SIGSTOP)
            try:
                answer = worker.receive(RUN_S)
            finally:
                stage.service.signal_group(signal.SIGCONT)
            stage.flush("worker-b")
            times = answer["times_s"]
            gaps = [1000 * (after - before) for before, after in itertools.pairwise(times)]
            stage.add(
                "stopped-server",
                pair=pair,
                arm=arm,
                steps=len(gaps),
                median_ms=percentile(gaps, 0.5),
                p99_ms=percentile(gaps, 0.99),
                longest_ms=max(gaps),
                gaps_ms=[round(gap, 2) for gap in gaps],
            )
