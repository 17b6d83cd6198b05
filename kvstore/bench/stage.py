"""What the sections of the benchmark share: services, workers, rows."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.bench.memory import MIB, Sampler, children_of, held_bytes
from kvstore.bench.shapes import ModelShape, Run
from kvstore.demo.admin import Admin
from kvstore.demo.claims import Row
from kvstore.demo.driver import gpu_processes
from kvstore.demo.errors import DemoError
from kvstore.demo.processes import Child, Service, Worker

LOAD_S = 240.0
ATTACH_S = 120.0
_FLUSH_S = 60.0
# A small RPC now and then; a short run is over before the second one.
_PAUSE_S = 0.2
_SHORT_PAUSE_S = 0.05
SERVICE_GPU_BUDGET = 32 * 1024 * MIB
SERVICE_HOST_BUDGET = 8 * 1024 * MIB
SERVICE_TINY_BUDGET = 256 * MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for.

    `bound_s` ends a run of an arm that no claim needs; behind `within_s` nothing new is begun; `folder` is a converted
    SmolLM2, or None and why.
    """

    shape: ModelShape
    device: str
    runs: tuple[Run, ...]
    arms: tuple[str, ...]
    repeats: int
    bound_s: float
    within_s: float
    folder: Path | None
    why_no_folder: str

    @property
    def on_gpu(self) -> bool:
        """Whether the models compute on a GPU."""
        return self.device != "cpu"


@dataclass(slots=True)
class Served:
    """A service with its admin API and where workers find it."""

    service: Service | None
    admin: Admin
    address: str


class Stage:
    """The running benchmark. Leaving the `with` block ends every process it started and removes its folder.

    `workers` are the living workers by name; each knows its attached arms in `attached`. No prompt is used twice
    unless a section wants it: `next_seed` makes a fresh one.
    """

    def __init__(
        self, settings: Settings, say: Callable[[str], None], keep: Callable[[list[Row]], None] = lambda _: None
    ) -> None:
        self.settings = settings
        self._keep = keep
        self._deadline = time.monotonic() + settings.within_s
        self.say = say
        self.rows: list[Row] = []
        self.workers: dict[str, Worker] = {}
        self.services: dict[str, Served] = {}
        self.attached: dict[str, dict[str, dict[str, Any]]] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self._children: list[Child] = []
        self._admins: dict[str, Admin] = {}
        self._seeds = itertools.count(int(time.time()) % 1_000_000 * 1000)
        # The socket's path must be short: a Unix address holds 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="kvbench-"))

    # -- processes --------------------------------------------------------------------------------------------

    def service(self, name: str, device: str, *, budget: int = 0, options: Sequence[str] = ()) -> Served:
        """The service of this name; started when it isn't there yet."""
        if name not in self.services:
            if not budget:
                budget = SERVICE_GPU_BUDGET if device != "cpu" else SERVICE_HOST_BUDGET
                budget = budget if self.settings.on_gpu else SERVICE_TINY_BUDGET
            service = Service(self.folder, budget=budget, name=name, device=device, options=options)
            self._children.append(service)
            service.wait_ready()
            self.services[name] = Served(service, self.admin_of(str(service.address)), str(service.address))
        return self.services[name]

    def admin_of(self, address: str) -> Admin:
        """The admin API of the service at `address`."""
        if address not in self._admins:
            self._admins[address] = Admin(Path(address.removeprefix("unix:")))
        return self._admins[address]

    def worker(self, name: str, *, start_only: bool = False, **load: Any) -> Worker:
        """The worker of this name with its model; started when it isn't there (any more). `load` goes to its load
        command (default: the settings' shape and device). `start_only` doesn't wait for the model.
        """
        worker = self.workers.get(name)
        if worker is not None and not worker.alive:
            self.end_worker(name)
            worker = None
        if worker is None:
            env = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
            worker = Worker(name, self.folder, module="kvstore.bench.worker", env=env)
            self._children.append(worker)
            self.workers[name], self.attached[name] = worker, {}
            worker.send("load", **(load or {"device": self.settings.device, "shape": self.settings.shape.name}))
        if worker.pending == "load" and not start_only:
            self.loaded[name] = worker.receive(LOAD_S)
            self.add("start", worker=name, **self.loaded[name])
            self.add_driver(f"{name} loaded")
        return worker

    def attach(self, worker: str, arm: str, codec: str, address: str, *, variant: str = "plain") -> dict[str, Any]:
        """Attaches a copy of the worker's model, or a variant of it, under the name `arm`; once."""
        if arm not in self.attached[worker]:
            found = self.workers[worker].ask(
                "attach", ATTACH_S, arm=arm, codec=codec, address=address, name=worker, budget=SERVICE_GPU_BUDGET,
                variant=variant,
            )  # fmt: skip
            self.attached[worker][arm] = {**found, "codec": codec}
            self.add(
                "attach", worker=worker, arm=arm, codec=codec, **{k: v for k, v in found.items() if k != "address"}
            )
        return self.attached[worker][arm]

    def end_worker(self, name: str) -> None:
        """Ends a worker; the next one of this name starts afresh."""
        worker = self.workers.pop(name, None)
        self.attached.pop(name, None)
        if worker is not None:
            worker.stop()

    def recover(self, name: str, error: DemoError) -> None:
        """After a failure: ends a worker whose device, pipe or process no longer works."""
        worker = self.workers.get(name)
        if worker is None:
            return
        if "in time" in str(error):
            # It may still answer what it was asked then, and we would take that for the next answer.
            self.end_worker(name)
            return
        try:
            worker.ask("healthy", 30.0)
            worker.ask("drop", 30.0)
        except (DemoError, RuntimeError):
            self.end_worker(name)

    # -- runs -------------------------------------------------------------------------------------------------

    def run(
        self, worker: str, arm: str, run: Run, *, seed: int | None = None, bound_s: float = 600.0, room: int = 0
    ) -> dict[str, Any]:
        """One run; its cache is kept until the next one. Adds what the service holds of it: `service_kv` now,
        `service_kv_peak` the most that was seen.
        """
        attached = self.attached[worker].get(arm)
        admin = None if attached is None else self.admin_of(attached["address"])
        codec = "" if attached is None else attached["codec"]
        process = self.workers[worker]
        process.send(
            "run", arm=arm, batch=run.batch, tokens_in=run.tokens_in, tokens_out=run.tokens_out,
            seed=self.next_seed() if seed is None else seed, bound_s=bound_s, room=room,
        )  # fmt: skip
        with Sampler(admin, codec, _PAUSE_S if run.tokens_out > 64 else _SHORT_PAUSE_S) as sampler:
            answer: dict[str, Any] = process.receive(bound_s + 120.0)
        if admin is not None:
            # What the run gave back, it gave back behind its end.
            self.flush(worker, arm)
            sampler.sample()
            answer["service_kv"], answer["service_committed"] = held_bytes(admin, codec)
        else:
            answer["service_kv"] = answer["service_committed"] = 0
        answer["service_kv_peak"] = sampler.peak
        return answer

    def clear(self, worker: str, arm: str) -> None:
        """Lets the last run's cache go and empties its namespace."""
        self.workers[worker].ask("drop", 60.0)
        attached = self.attached[worker].get(arm)
        if attached is not None:
            self.flush(worker, arm)
            admin = self.admin_of(attached["address"])
            for space in admin.namespaces():
                admin.evict(space.namespace_id)

    def flush(self, worker: str, arm: str) -> None:
        """Waits until commits and releases have arrived."""
        if not self.workers[worker].ask("flush", _FLUSH_S + 10, arm=arm, timeout=_FLUSH_S):
            raise DemoError(f"{worker}: commits did not reach the service within {_FLUSH_S:.0f} s")

    def committed_bytes(self, worker: str, arm: str) -> int:
        """Bytes of committed blocks that the service of an arm holds now."""
        attached = self.attached[worker][arm]
        return held_bytes(self.admin_of(attached["address"]), attached["codec"])[1]

    def next_seed(self) -> int:
        """Of a prompt that nobody has seen."""
        return next(self._seeds)

    # -- rows -------------------------------------------------------------------------------------------------

    def add(self, measure: str, **fields: Any) -> None:
        """Keeps one raw row."""
        self.rows.append({"measure": measure, **fields})

    def skip(self, what: str, reason: str) -> None:
        """Keeps and says that something was not measured, and why."""
        self.add("skipped", what=what, reason=reason)
        self.say(f"skipped: {what}: {reason}")

    def fail(self, what: str, error: BaseException) -> None:
        """Keeps and says that something failed."""
        self.add("failed", what=what, error=str(error))
        self.say(f"FAILED: {what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")

    def out_of_time(self, what: str) -> bool:
        """Whether there is no time left to begin `what`; then that is a row."""
        late = time.monotonic() > self._deadline
        if late:
            self.skip(what, f"the {self.settings.within_s:.0f} s of --within are over")
        return late

    def save(self) -> None:
        """Hands all rows so far to whoever keeps them: a benchmark that is killed leaves what it measured."""
        self._keep(self.rows)

    def add_driver(self, when: str) -> None:
        """Keeps the GPU memory of each of our processes, as the driver counts it; for workers beside torch's own
        figure, so that what is left names the context and the mapped slabs.
        """
        if not self.settings.on_gpu:
            return
        try:
            by_pid = gpu_processes()
        except DemoError as error:
            self.add("driver", when=when, error=str(error))
            return
        roles = {worker.process.pid: (name, worker) for name, worker in self.workers.items() if worker.alive}
        for pid, (name, worker) in roles.items():
            memory = worker.ask("memory", 30.0) if worker.pending is None else {}
            self.add("driver", when=when, process=f"worker {name}", driver=by_pid.get(pid), **memory)
        for name, served in self.services.items():
            if served.service is not None:
                pids = [served.service.process.pid, *children_of(served.service.process.pid)]
                held = [by_pid[pid] for pid in pids if by_pid.get(pid) is not None]
                slabs = sum(space.slab_bytes for space in served.admin.namespaces())
                driver = sum(value for value in held if value) if held else None
                self.add("driver", when=when, process=f"service {name}", driver=driver, slabs=slabs)
        self.add("driver", when=when, process="all on the device", listed=len(by_pid))

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for admin in self._admins.values():
            admin.close()
        # Workers before services: a service waits for its workers' last calls.
        for child in reversed(self._children):
            child.stop(timeout=3.0)
        shutil.rmtree(self.folder, ignore_errors=True)
