"""Models on a CUDA device with the real service, its memory there or on the host."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client import connect

from kvstore.launch import ServiceProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Triton compiles kernels at the first use of each shape.
    pytest.mark.timeout(300),
]
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def model(kit: Any) -> Any:
    return kit.build("llama").to(DEVICE)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kv-"))
    yield made
    log = made / "log"
    if log.exists():
        # Shown when the test failed.
        sys.stdout.write(log.read_text())
    shutil.rmtree(made)


def _serve(folder: Path, device: str, budget: str) -> ServiceProcess:
    with (folder / "log").open("ab") as log:
        options = ("--device", device, "--budget", budget)
        return ServiceProcess.start(folder / "kv.sock", options=options, stderr=log)


@pytest.mark.parametrize("device", [DEVICE, "cpu"])
@pytest.mark.parametrize("codec", ["int8", "passthrough"])
def test_a_second_worker_reads_what_the_first_wrote(
    kit: Any, model: Any, folder: Path, device: str, codec: str
) -> None:
    ids = kit.ids_of(500, 31).to(DEVICE)
    options = {"max_new_tokens": 40, "do_sample": False}
    native = model.generate(ids, **options)
    service = _serve(folder, device, "256MiB")
    try:
        texts = []
        for name in ("first", "second", "third"):
            with connect(str(service.address), name=name) as store:
                with store.attach(model, codec=codec):
                    texts.append(model.generate(ids, **options))
                report = store.last_report
                assert store.flush()
            assert report.path == "kvstore", report
            assert report.reused_tokens == (0 if name == "first" else 448), report
            assert report.warnings == []
        assert report.rows[0].written_by == [("first", 448)]
        if codec == "passthrough":
            for text in texts:
                kit.same_text(model, ids, native, text)
        else:
            assert torch.equal(texts[1], texts[2])
    finally:
        service.stop()


def test_generation_goes_on_locally_when_the_service_is_full(kit: Any, model: Any, folder: Path) -> None:
    ids = torch.cat([kit.ids_of(560, 100 + row) for row in range(24)]).to(DEVICE)
    options = {"max_new_tokens": 200, "do_sample": False}
    native = model.generate(ids, **options)
    # A block has 2 layers x 2 heads x 64 tokens of float32, 128 KiB: 256 blocks for 216 of prompts and 72 of answers.
    service = _serve(folder, DEVICE, "32MiB")
    try:
        with connect(str(service.address), name="alone") as store:
            with store.attach(model, codec="passthrough"):
                text = model.generate(ids, **options)
            report = store.last_report
        kit.same_text(model, ids, native, text)
        assert report.local_blocks
        assert report.warnings
    finally:
        service.stop()
