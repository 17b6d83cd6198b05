"""What the scenes of the demo share: settings, processes, prompts, rows."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.demo import models, texts
from kvstore.demo.admin import Admin
from kvstore.demo.claims import Row
from kvstore.demo.compare import Comparison, compare_tokens
from kvstore.demo.errors import DemoError
from kvstore.demo.processes import Child, Service, Worker

BLOCK_TOKENS = 64
LOAD_S = 180.0
RUN_S = 300.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. `folder` is the converted model's, None for models made on the spot."""

    model: str
    folder: Path | None
    document_tokens: int
    new_tokens: int
    codec: str
    device: str
    full: bool
    keep_going: bool

    @property
    def short_tokens(self) -> int:
        """Document length of the measurements that need not be long."""
        return min(1000, self.document_tokens)


class Stage:
    """The running demo. Leaving the `with` block ends every process it started and removes its folder.

    `workers` holds the living workers by name. `prompts` are the demo's prompts: one a question about one document.
    `answers` are the shared codec's answers to them, by prompt; `native` is the native cache's to the first, cold.
    `written` collects, for each (model, codec), every whole block's chain of tokens that was computed under a commit:
    what the service should hold, once each.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = say
        self.rows: list[Row] = []
        self.workers: dict[str, Worker] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.prompts: list[list[int]] = []
        self.title = ""
        self.answers: dict[int, dict[str, Any]] = {}
        self.native: dict[str, Any] = {}
        self.written: dict[tuple[str, str], set[int]] = {}
        self._children: list[Child] = []
        self._admins: list[Admin] = []
        # The socket's path must be short: a Unix address holds 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="kvdemo-"))
        self.service: Service
        self.admin: Admin

    def start_service(self, name: str = "service", *, budget: int, namespace_budget: int = 0) -> tuple[Service, Admin]:
        """Starts a service and waits until it answers."""
        service = Service(
            self.folder, budget=budget, namespace_budget=namespace_budget, name=name, device=self.settings.device
        )
        self._children.append(service)
        service.wait_ready()
        admin = Admin(service.address)
        self._admins.append(admin)
        return service, admin

    def launch(
        self, name: str, arms: Sequence[str], *, model: str | None = None, address: Path | None = None
    ) -> Worker:
        """Starts a worker and lets it load; `await_worker` waits for it."""
        worker = Worker(name, self.folder)
        self._children.append(worker)
        self.workers[name] = worker
        where = self.service.address if address is None else address
        worker.send(
            "load",
            name=name,
            model=model or self.settings.model,
            folder=str(self.settings.folder) if self.settings.folder else None,
            address=str(where),
            arms=list(arms),
            device=self.settings.device,
        )
        return worker

    def await_worker(self, name: str, arms: Sequence[str]) -> Worker:
        """Waits until a worker has loaded, and warms each arm up on another prompt: that is not measured."""
        worker = self.workers[name]
        self.loaded[name] = worker.receive(LOAD_S)
        prompt = worker.ask("prompts", document_tokens=0, start=0, questions=[texts.WARM_UP])["prompts"][0]
        for arm in arms:
            self.run(name, arm, prompt, 4)
        return worker

    def start_worker(self, name: str, arms: Sequence[str], **options: Any) -> Worker:
        """`launch` and `await_worker`."""
        self.launch(name, arms, **options)
        return self.await_worker(name, arms)

    def run(self, worker: str, arm: str, tokens: Sequence[int], new_tokens: int, **options: Any) -> dict[str, Any]:
        """Runs one prompt and returns the worker's answer."""
        self.note_written(worker, arm, tokens)
        answer: dict[str, Any] = self.workers[worker].ask(
            "run", RUN_S, arm=arm, tokens=list(tokens), new_tokens=new_tokens, **options
        )
        return answer

    def note_written(self, worker: str, arm: str, tokens: Sequence[int]) -> None:
        """Remembers which whole blocks a prompt makes the service hold."""
        if arm == "native":
            return
        chains = self.written.setdefault((self.model_of(worker), arm), set())
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            chains.add(hash(tuple(tokens[:end])))

    def model_of(self, worker: str) -> str:
        """Name of the model a worker serves."""
        second = models.SECOND.get(self.settings.model, "")
        return second if worker == "worker-q" else self.settings.model

    def documents(self, worker: str, tokens: int, start: int, questions: Sequence[str]) -> list[list[int]]:
        """Prompts about another part of the text: nothing in them was seen before."""
        answer = self.workers[worker].ask("prompts", document_tokens=tokens, start=start, questions=list(questions))
        prompts: list[list[int]] = answer["prompts"]
        return prompts

    def flush(self, worker: str) -> None:
        """Waits until a worker's commits and releases have arrived."""
        if not self.workers[worker].ask("flush", 30.0, timeout=20.0):
            raise DemoError(f"{worker}: commits did not reach the service within 20 s")

    def add(self, measure: str, **fields: Any) -> None:
        """Keeps one raw row."""
        self.rows.append({"measure": measure, **fields})

    def add_stored(self, worker: str, codec: str, case: str) -> None:
        """Keeps how many blocks the service holds against how many different ones there are."""
        space = self.admin.namespace(self.model_of(worker), codec)
        distinct = len(self.written[self.model_of(worker), codec])
        if distinct:
            self.add("stored", codec=codec, case=case, blocks_stored=space.committed, blocks_distinct=distinct)

    def compare(
        self, reference: dict[str, Any], other: dict[str, Any], *, measure: str = "text", **fields: Any
    ) -> Comparison:
        """Compares two texts and keeps the row: "text" where they must be equal, "drift" where they need not."""
        found = compare_tokens(reference["tokens"], other["tokens"], reference["gaps"])
        self.add(
            measure,
            equal=found.equal,
            first_difference=found.first_difference,
            gap=found.gap,
            tokens=len(reference["tokens"]),
            **fields,
        )
        return found

    def run_script(self, name: str, arguments: Sequence[str], timeout: float) -> None:
        """Runs a Python program to its end. DemoError when it fails or takes longer than `timeout` seconds."""
        child = Child(name, arguments, self.folder)
        self._children.append(child)
        try:
            code = child.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise child.failed(f"did not end within {timeout:.0f} s") from None
        if code:
            raise child.failed("failed")

    def end_worker(self, name: str) -> None:
        """Ends a worker that is no longer needed."""
        self.workers.pop(name).stop()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for admin in self._admins:
            admin.close()
        # Workers before services: a service waits for its workers' last calls.
        for child in reversed(self._children):
            child.stop(timeout=3.0)
        shutil.rmtree(self.folder, ignore_errors=True)


def budget_for(slots: int, block_bytes: int) -> int:
    """About the smallest budget in bytes that holds `slots` slots: slabs of 2 MiB (or of one slot) and their ledger."""
    slab = max(2 * MIB, -(-block_bytes // (2 * MIB)) * 2 * MIB)
    return -(-slots // (slab // block_bytes)) * slab + MIB


def tokens_per_second(answer: dict[str, Any]) -> float:
    """Decode speed: from the first new token to the last. 0 for a single token."""
    times = answer["times_s"]
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
