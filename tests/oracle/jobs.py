"""Running scripts in jobs, and comparing them with the joined run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.testing import Faults, LocalJob, Worker, WorkerFailedError
from tests.clusters.hosts import Hosts, HostsJob
from tests.oracle.registry import all_scripts
from tests.oracle.run import Run
from tests.oracle.worker import run_scripts, same_arithmetic

#: The rule for equality: no element differs by more than this part of the largest of its tensor, or of 1.
TOLERANCE = 1e-5

#: How the processes of a job reach each other.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {},
    "tcp": {"shared_memory": False, "unix_sockets": False},
    "hosts": {"encrypt": False},
}

#: For one script; and for the other workers, once one has reported an error.
SCRIPT_S, FOLLOW_S = 60.0, 5.0
MOMENT_S = 0.02

Values = dict[str, list[float]]


@dataclass(frozen=True)
class Way:
    """How scripts are run.

    Attributes:
        workers: how many.
        transport: of :data:`TRANSPORTS`.
        kvstore: type of the store.
        options: of ``DistributedOptimizer``.
        faults: of the network and the processes.
        devices: of the workers' scripts; the last one is that of the workers after it.
    """

    workers: int = 2
    transport: str = "shm"
    kvstore: str = "dist_sync"
    options: dict[str, Any] = field(default_factory=dict)
    faults: Faults | None = None
    devices: tuple[str, ...] = ("cpu",)

    @contextlib.contextmanager
    def job(self) -> Iterator[LocalJob]:
        """Start a job of two servers; on two hosts there is one server on each."""
        settings = TRANSPORTS[self.transport] | {"timeout_s": SCRIPT_S}
        if self.transport != "hosts":
            with LocalJob(self.workers, 2, faults=self.faults, **settings) as job:
                yield job
            return
        with (
            Hosts(2) as hosts,
            HostsJob(hosts, [self.workers - 1, 1], [1, 1], faults=self.faults, **settings) as job,
        ):
            yield job


@dataclass
class Outcome:
    """What became of one script on every worker, by rank.

    Attributes:
        values: what it returned; None where it failed.
        errors: what it raised, "" where it did not.
        steps: in which step that was, counted from 0; -1 before the first, None where there was no error in time.
        traces: where.
    """

    values: list[Values | None]
    errors: list[str]
    steps: list[int | None]
    traces: list[str]
    lines: list[str] = field(default_factory=list)
    """What the scheduler has said of weights that differ."""

    def problems(self, reference: Values, alike: bool = True) -> list[str]:
        """Return what is not as in the joined run, or not the same on all workers.

        Args:
            reference: values of the joined run.
            alike: workers have devices of one type. Others round the outputs of a network unlike.
        """
        failed = [f"worker {rank}: {text}" for rank, text in enumerate(self.errors) if text]
        if failed:
            return failed
        first = self.values[0]
        assert first is not None
        found = []
        for rank, one in enumerate(self.values[1:], 1):
            if one is None or one == first:
                continue
            apart = ["differs from worker 0"] if alike else _differences(one, reference)
            found += [f"worker {rank} {text}" for text in apart]
        return self.lines + found + _differences(first, reference)

    def worst(self, reference: Values) -> float:
        """Return the largest difference, as a part of the tolerance; infinite where it failed."""
        first = self.values[0]
        if first is None or first.keys() != reference.keys():
            return float("inf")
        return max((_apart(first[name], reference[name]) for name in reference), default=0.0) / TOLERANCE


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    mine, reference = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    if not len(mine):
        return 0.0
    apart = (mine - reference).abs().max().item() / max(1.0, reference.abs().max().item())
    return apart if apart == apart else float("inf")


def _differences(ours: Values, theirs: Values) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"other results than the joined run: {sorted(ours.keys() ^ theirs.keys())}"]
    apart = {name: _apart(ours[name], theirs[name]) for name in theirs}
    return [f"{name} is {one:.1e} off" for name, one in apart.items() if one > TOLERANCE]


@functools.cache
def reference(name: str, workers: int, device: str = "cpu") -> Values:
    """Return what one process with joined batches returns."""
    same_arithmetic()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = all_scripts()[name].run(Run(workers, device=device))
    finally:
        torch.set_num_threads(before)
    return {key: one.double().reshape(-1).tolist() for key, one in found.items()}


def outcomes(names: Sequence[str], way: Way) -> Iterator[tuple[str, Outcome]]:
    """Run scripts in as few jobs as possible; after one that fails the others get a new job."""
    left = list(names)
    while left:
        with way.job() as job:
            workers = job.start_all(run_scripts, left, way.workers, way.kvstore, dict(way.options), list(way.devices))
            while left:
                outcome = _heard(workers)
                outcome.lines += [one for one in job.scheduler.output.splitlines() if "other weights" in one]
                yield left.pop(0), outcome
                if any(outcome.errors):
                    break


def _heard(workers: Sequence[Worker]) -> Outcome:
    """Return what all workers say next; once one has reported an error, the others have little time left."""
    heard: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + SCRIPT_S + FOLLOW_S
    while len(heard) < len(workers):
        for rank, worker in enumerate(workers):
            if rank not in heard and (one := _said(worker, deadline)) is not None:
                heard[rank] = one
                if "error" in one:
                    deadline = min(deadline, time.monotonic() + FOLLOW_S)
    said = [heard[rank] for rank in range(len(workers))]
    return Outcome(
        [one.get("values") for one in said],
        [one.get("error", "") for one in said],
        [one.get("step") for one in said],
        [one.get("trace", "") for one in said],
    )


def _said(worker: Worker, deadline: float) -> dict[str, Any] | None:
    """Return what a worker says within a moment, None if nothing; after the deadline, that it says nothing."""
    try:
        said: dict[str, Any] = worker.heard(MOMENT_S)
    except WorkerFailedError as error:
        return {"error": str(error)}
    except TimeoutError as error:
        return {"error": str(error)} if time.monotonic() > deadline else None
    return said
