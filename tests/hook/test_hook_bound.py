"""A bound on the error, as workers share it: one measures, all adopt its choice; blocks that miss it stay private."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client import connect
from kvstore_client.hook import AttachError, attach
from kvstore_client.hook.choice import LAYER_ERROR
from kvstore_client.hook.probe import measure_layers
from kvstore_client.hook.report import HitReport, describe
from kvstore_client.plans import NOISE_LIMIT
from kvstore_client.testing import PATIENT

from kvstore.launch import ServiceProcess

MEASURE = "kvstore_client.hook.choice.measure_layers"


def test_the_second_worker_adopts_the_choice(kit: Any, store: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(store, llama, max_error=0.05) as first:
        plan, layers = first.namespace().plan, first.plan.layers
        assert first.namespace().identity.plan_name == "max_error=0.05"
        assert plan.tensors[LAYER_ERROR].tolist() == pytest.approx(first.errors)
        # What the text had is within the limit; how far, says the error.
        assert plan.tensors[NOISE_LIMIT].shape == (layers, 2)
        assert bool((plan.tensors[NOISE_LIMIT] > 0).all())
    with monkeypatch.context() as patched:
        patched.setattr(MEASURE, lambda *_: pytest.fail("measured again"))
        with attach(store, kit.build("llama"), max_error=0.05) as second:
            assert second.namespace() is first.namespace()
            assert (second.codec, second.max_error) == (first.codec, 0.05)
            assert second.errors == pytest.approx(first.errors)
    # Another bound, other weights: somebody else's choice says nothing.
    asked = []
    monkeypatch.setattr(store, "named_plans", lambda *place: asked.append(place) or [])
    with attach(store, llama, max_error=0.04), attach(store, kit.build("llama", seed=1), max_error=0.05):
        assert [name for _, name in asked] == ["max_error=0.04", "max_error=0.05"]
        assert asked[0][0] != asked[1][0]


def test_what_is_kept_is_checked(store: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(store, llama, max_error=0.05) as attachment:
        good = attachment.namespace().plan
    for bad in (
        b"no plan",
        type(good)(good.codec, {**good.tensors, LAYER_ERROR: torch.full((2,), 0.06)}).to_bytes(),
        type(good)(good.codec, {**good.tensors, LAYER_ERROR: torch.zeros(3)}).to_bytes(),
        type(good)(good.codec, {**good.tensors, NOISE_LIMIT: torch.ones(1, 2)}).to_bytes(),
        type(good)(good.codec, {k: t for k, t in good.tensors.items() if k != NOISE_LIMIT}).to_bytes(),
        type(good)("int8:7,int4:9", good.tensors).to_bytes(),
    ):
        monkeypatch.setattr(store, "named_plans", lambda *_, bad=bad: [bad])
        store.namespaces.clear()
        with attach(store, llama, max_error=0.05) as again:
            assert again.namespace().plan == good


def test_other_weights_get_limits_of_their_own(kit: Any, store: Any) -> None:
    model = kit.build("llama")
    with attach(store, model, max_error=0.05) as attachment:
        before = attachment.namespace()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        after = attachment.namespace()
        assert after.identity.plan_name.startswith("max_error=0.05 ")
        assert after.layout == before.layout
        assert not torch.equal(after.plan.tensors[NOISE_LIMIT], before.plan.tensors[NOISE_LIMIT])


def test_a_reader_says_what_it_takes(kit: Any, store: Any, llama: Any) -> None:
    with attach(store, llama, min_fidelity=0.99) as attachment:
        llama.generate(kit.ids_of(70, 1), max_new_tokens=1, do_sample=False)
        assert store.max_block_error == pytest.approx(0.01)
        with pytest.raises(AttachError, match="min_fidelity="):
            attach(store, llama)
        assert attach(store, llama, min_fidelity=0.99) is attachment
    with attach(store, llama):
        llama.generate(kit.ids_of(70, 1), max_new_tokens=1, do_sample=False)
        assert store.max_block_error is None
    with pytest.raises(AttachError, match="from 0 to 1"):
        attach(store, llama, min_fidelity=1.5)
    assert "min_fidelity" in describe("fidelity")


def test_a_report_says_what_stays_private() -> None:
    from kvstore_client.blocks import RequestTraffic

    report = HitReport(path="kvstore")
    report.take(RequestTraffic(blocks_not_shared_error=3, local_blocks=1, short_reasons=["late"]))
    assert report.warnings == ["late", "3 blocks over the error bound stay private"]
    assert report.local_blocks == 1


def test_end_to_end(kit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, ids = kit.build("llama"), kit.ids_of(200, 5)

    def spoilt(*given: Any) -> Any:
        found = measure_layers(*given)
        # As if the text that was measured had been ever so quiet.
        return found._replace(noise={name: noise * 1e-3 for name, noise in found.noise.items()})

    with connect("embedded", budget=64 << 20, config=PATIENT) as service:
        with attach(service, model, max_error=0.05):
            expected = model.generate(ids, max_new_tokens=8, do_sample=False)
        # Another bound, and nothing is as quiet as that: each request has the same text, and shares nothing.
        monkeypatch.setattr(MEASURE, spoilt)
        with attach(service, model, max_error=0.0500001) as attachment:
            for _ in range(2):
                assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
                assert service.flush()
                assert service.last_report.reused_tokens == 0
            assert service.stats()["blocks_not_shared_error"] == 6
            report = attachment.prewarm(ids[0], pin=True)
            assert {"3 blocks over the error bound stay private", "not pinned: not all of it is shared"} <= set(
                report.warnings
            )
        # A reader that wants less rounding than there is computes for itself.
        with attach(service, model, max_error=0.05, min_fidelity=1.0):
            model.generate(ids, max_new_tokens=1, do_sample=False)
            assert service.last_report.rows[0].why_no_more == describe("fidelity")
            assert service.last_report.reused_tokens == 0
        with attach(service, model, max_error=0.05, min_fidelity=0.1):
            model.generate(ids, max_new_tokens=1, do_sample=False)
            assert service.last_report.reused_tokens == 192


# Prints how often it measured, the codec, and what was reused.
WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest as kit
from kvstore_client import connect
from kvstore_client.hook import choice
from kvstore_client.testing import PATIENT

calls = []
measure = choice.measure_layers
choice.measure_layers = lambda *given: calls.append(1) or measure(*given)
model = kit.build("llama")
with connect(sys.argv[2], required=True, config=PATIENT) as store:
    attachment = store.attach(model, max_error=0.05)
    model.generate(kit.ids_of(200, 5), max_new_tokens=2, do_sample=False)
    print(len(calls), attachment.codec, store.last_report.reused_tokens, flush=True)
    store.flush()
"""


def test_between_processes(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    with (folder / "log").open("ab") as log:
        service = ServiceProcess.start(folder / "kv.sock", options=("--budget", "64MiB"), stderr=log)
    try:
        said = []
        for number in range(2):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                # No folder in common: the choice comes from the service.
                "XDG_CACHE_HOME": str(tmp_path / str(number)),
            }
            command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(service.address)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout.split())
    finally:
        service.stop()
        shutil.rmtree(folder)
    (first, codec, cold), (second, adopted, warm) = said
    assert (first, second, adopted) == ("1", "0", codec)
    assert (cold, warm) == ("0", "192")
