"""Child processes: every wait has a deadline, every failure shows the log, nothing is left."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.demo.errors import DemoError
from kvstore.demo.processes import Child, Service, Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    started = Worker("worker-t", tmp_path)
    yield started
    started.stop()
    assert not started.alive


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_answers_and_reports_its_errors(worker: Worker) -> None:
    assert worker.ask("warnings_so_far", 60) == []
    with pytest.raises(DemoError, match=r"worker-t could not run: KeyError"):
        worker.ask("run", 60, arm="none", tokens=[1], new_tokens=1)
    # It is still there afterwards.
    assert worker.ask("warnings_so_far", 60) == []


def test_a_worker_takes_one_command_at_a_time(worker: Worker) -> None:
    worker.send("warnings_so_far")
    with pytest.raises(RuntimeError, match="still busy"):
        worker.send("warnings_so_far")
    assert worker.receive(60) == []


def test_a_stopped_worker_meets_the_deadline(worker: Worker) -> None:
    assert worker.ask("warnings_so_far", 60) == []
    worker.signal_group(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(DemoError, match=r"did not finish 'warnings_so_far' in time \(still running\)"):
        worker.ask("warnings_so_far", 0.3)
    assert time.monotonic() - start < 5


def test_a_killed_worker_is_named(worker: Worker) -> None:
    assert worker.ask("warnings_so_far", 60) == []
    worker.kill()
    with pytest.raises(DemoError, match="worker-t"):
        worker.ask("warnings_so_far", 5)


def test_a_worker_ends_with_its_stdin(worker: Worker) -> None:
    assert worker.ask("warnings_so_far", 60) == []
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0


def test_stop_ends_what_the_child_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    child = Child("parent", ["-c", program], tmp_path)
    deadline = time.monotonic() + 20
    while not child.tail() and time.monotonic() < deadline:
        time.sleep(0.02)
    grandchild = int(child.tail())
    assert is_running(grandchild)
    child.stop(timeout=2)
    deadline = time.monotonic() + 5
    while is_running(grandchild) and time.monotonic() < deadline:
        # A zombie of a re-parented process counts as running until init reaps it.
        if Path(f"/proc/{grandchild}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not is_running(grandchild)


def test_a_service_that_can_not_start_shows_why(tmp_path: Path) -> None:
    service = Service(tmp_path, budget=1)
    try:
        with pytest.raises(DemoError, match=r"service did not start(.|\n)*--budget"):
            service.wait_ready(30)
    finally:
        service.stop()
