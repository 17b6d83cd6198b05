"""`kvstore doctor` and what it is made from."""

import json
import os
from pathlib import Path

import pytest
from kvstore_client import cuda as cuda_module
from kvstore_client.diagnosis import diagnose
from kvstore_client.testing import FAST, FakeService
from kvstore_client.testing_cuda import FakeCuda, FakeDriver, LegacyService

from kvstore.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_what_works_and_why_the_rest_does_not(fake: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--address", fake.address)
    assert code == 0
    assert "bytes      works" in out
    assert "fd         no: " in out
    assert "cuda-ipc   no: the service's slabs are memfd" in out
    assert f"pid {os.getpid()}" in out
    assert "not watched" in out


def test_json_and_exit_code_when_nothing_answers(short_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--address", str(short_folder / "none.sock"), "--json")
    found = json.loads(out)
    assert code == 1
    assert not found["works"]
    assert "kvstore serve" in found["error"]
    with pytest.raises(SystemExit):
        main(["doctor", "--address", "nonsense"])
    assert "expected" in capsys.readouterr().err


def test_the_pid_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    cuda = FakeCuda(driver)
    monkeypatch.setattr(cuda_module, "get", lambda: cuda)
    service = LegacyService(driver)
    service.start()
    try:
        found = diagnose(service.address, FAST)
        assert {c.transport: c.works for c in found.candidates} == {"fd": False, "cuda-ipc": True, "bytes": True}
        assert (found.chosen, found.device_here, found.memory) == ("cuda-ipc", "cuda:1", "cuda-legacy")
        assert any("equal pid" in remark for remark in found.remarks)
        service.pid = os.getpid()
        found = diagnose(service.address, FAST)
        assert found.chosen == "bytes"
        assert "pid namespace" in next(c.reason for c in found.candidates if c.transport == "cuda-ipc")
    finally:
        service.stop()
