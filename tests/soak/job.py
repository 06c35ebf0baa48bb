"""One job that trains for long, and what became of its processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

from paceline.testing import LocalJob, Process, Worker
from paceline.testing.process import start_program
from tests.soak import role, worker
from tests.soak.census import Census, grown
from tests.soak.samples import Growth, Sample, growth, sample, slope

ROOT = str(Path(__file__).parents[2])
#: Jobs of several modes may start side by side, on a busy host.
START_TIMEOUT_S = 900.0
#: How long a phase may take, beyond its seconds.
_PHASE_TIMEOUT_S = 540.0


class SoakJob(LocalJob):
    """A job of programs (a forked process shares memory with the one that forked it), whose roles can be counted."""

    start_process = staticmethod(start_program)

    def __init__(self, transports: Sequence[str], servers: int, folder: Path, **settings: Any) -> None:
        path = os.pathsep.join(one for one in (ROOT, os.environ.get("PYTHONPATH", "")) if one)
        environment = {role.VARIABLE: str(folder)}
        super().__init__(len(transports), servers, environment=environment, **settings)
        self._path, self._transports, self._folder = path, transports, folder

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        return argv if role == "worker" else [sys.executable, "-m", "tests.soak.role", role]

    def _environment(self, role: str, rank: int, scheduler: str) -> dict[str, str]:
        own = worker.TRANSPORTS[self._transports[rank]] if role == "worker" else {}
        env = super()._environment(role, rank, scheduler)
        return env | {"PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], self._path))} | dict(own)

    def start_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Worker]:
        """Start all workers, each with its transport."""
        return self.start_all(function, *arguments)

    def names(self) -> dict[str, Process]:
        """Return all processes by name; of workers with their transport."""
        named: dict[str, Process] = {"scheduler": self.scheduler}
        named |= {f"server {rank}": one for rank, one in enumerate(self.servers)}
        return named | {f"worker {rank} {self._transports[rank]}": one for rank, one in enumerate(self.workers)}

    def census(self, timeout_s: float = 60.0) -> dict[str, Census]:
        """Have the scheduler and the servers count what they hold; returns that by name.

        Raises:
            TimeoutError: one did not.
        """
        asked = {name: one for name, one in self.names().items() if not name.startswith("worker")}
        files = {name: self._folder / f"{one.pid}.json" for name, one in asked.items()}
        for name, one in asked.items():
            files[name].unlink(missing_ok=True)
            one.kill(signal.SIGUSR1)
        deadline = time.monotonic() + timeout_s
        while not all(file.exists() for file in files.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a role did not count what it holds within {timeout_s:g} s\n{self.report()}")
            time.sleep(0.02)
        return {name: loads(file.read_text()) for name, file in files.items()}


@dataclass(frozen=True)
class Outcome:
    """What became of one process.

    Attributes:
        growth: of its memory, descriptors and threads.
        bytes_per_step: of its memory.
        grown: what it held more of at the end, by name.
        samples: all of them.
    """

    growth: Growth
    bytes_per_step: float
    grown: Mapping[str, int]
    samples: Sequence[Sample]


@dataclass
class Trial:
    """A job to be watched.

    Attributes:
        modes: types of stores.
        fronts: ways to train.
        transports: one worker for each.
        servers: of the job.
        warm_up: steps, and seconds, before anything is measured.
        measured: steps, and seconds, that are measured.
        interval_s: between two samples.
    """

    modes: Sequence[str]
    fronts: Sequence[str]
    transports: Sequence[str]
    servers: int = 2
    warm_up: tuple[int, float] = (500, 60.0)
    measured: tuple[int, float] = (5000, 540.0)
    interval_s: float = 1.0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    steps: int = 0

    def run(
        self, function: Callable[..., Any] = worker.work, *more: Any, then: Callable[[SoakJob], None] | None = None
    ) -> dict[str, Outcome]:
        """Run the job; returns what became of each process.

        Args:
            function: of the workers: :func:`~tests.soak.worker.work`, or one that begins with it.
            *more: arguments for that function.
            then: called with the job when the steps are done.
        """
        with tempfile.TemporaryDirectory() as folder:
            # Servers leave it to workers whether tensors are encrypted, so that one job has both.
            settings = {"encrypt": False, "check_rules": False, "start_timeout_s": START_TIMEOUT_S}
            with SoakJob(self.transports, self.servers, Path(folder), **settings) as job:
                job.start_workers(function, self.modes, self.fronts, [self.warm_up, self.measured], *more)
                before = self._phase(job, self.warm_up)
                self.samples.clear()
                after = self._phase(job, self.measured)
                if then is not None:
                    then(job)
                for one in job.workers:
                    one.result(60.0)
        return {name: self._outcome(name, before[name], after[name]) for name in after}

    def _phase(self, job: SoakJob, phase: tuple[int, float]) -> dict[str, Census]:
        """Sample until all workers are through; returns what every process holds then. The next phase begins."""
        deadline = time.monotonic() + phase[1] + _PHASE_TIMEOUT_S
        counted: dict[str, Census] = {}
        names = {id(one): name for name, one in job.names().items()}
        waiting = list(job.workers)
        while waiting:
            for name, one in job.names().items():
                try:
                    self.samples.setdefault(name, []).append(sample(one.pid, time.monotonic()))
                except OSError:
                    raise RuntimeError(f"{name} has ended\n{job.report()}") from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"workers still run\n{job.report()}")
            try:
                said = waiting[0].heard(self.interval_s)
            except TimeoutError:
                continue
            counted[names[id(waiting.pop(0))]] = said["census"]
            self.steps = said["steps"]
        counted |= job.census()
        for one in job.workers:
            one.tell("go on")
        return counted

    def _outcome(self, name: str, before: Census, after: Census) -> Outcome:
        samples = self.samples[name]
        elapsed = samples[-1].at_s - samples[0].at_s
        line = slope([(one.at_s, float(one.memory_bytes)) for one in samples])
        more = grown(before, after, max(20, self.steps // 50))
        return Outcome(growth(samples), line * elapsed / max(1, self.steps), more, samples)
