"""Trackers: tools that keep the figures of a job, by name (``paceline launch --report-to NAME:TARGET``).

| name | target | default target |
|---|---|---|
| ``jsonl`` | path of a file: a JSON object per step | ``paceline-JOB.jsonl`` |
| ``csv`` | path of a file: a line per figure and step (``time,step,name,value``) | ``paceline-JOB.csv`` |

:mod:`paceline.observe.tools` has those that need a package. Your own class is found by ``paceline.register`` and by an
entry point of the group ``paceline.trackers``.

A tracker runs in the scheduler, in a thread of its own. It may wait and fail: the job does not notice.
"""

from __future__ import annotations

import csv
import json
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import IO, Any, ClassVar

from paceline import extensions
from paceline.observe.account import WORKER_PARTS
from paceline.observe.job_figures import JobFigure
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Steps that wait for a tracker; further ones are left out.
_MOST_WAITING = 1024


class Tracker(ABC):
    """A tool that keeps figures. All methods but the constructor are called by one thread.

    Args:
        target: the text after the name and its colon; empty: the default target.

    Raises:
        MissingExtraError: its package is not installed. The job then does not start.
    """

    name: ClassVar[str] = ""

    def __init__(self, target: str = "") -> None:
        self.target = target

    @abstractmethod
    def start(self, job: str) -> None:
        """Open the tool. ``job`` is the job's id."""

    @abstractmethod
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Keep figures of one step. Steps of one figure rise, unless a script begins to count anew."""

    def flush(self) -> None:  # noqa: B027 - most tools need none
        """Called when no more figures wait: what was logged must not get lost when the process is killed."""

    @abstractmethod
    def finish(self) -> None:
        """Close the tool at the end of the job."""


class _File(Tracker):
    """Writes lines to a file, each with the time in seconds since 1970."""

    _file: IO[str]

    def start(self, job: str) -> None:
        """Open the file, and go on at its end."""
        self._file = open(self.target or f"paceline-{job}.{self.name}", "a", newline="")  # noqa: SIM115

    def flush(self) -> None:
        """Hand the lines over to the kernel."""
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


@extensions.register("tracker")
class Jsonl(_File):
    """A JSON object per step, in a line."""

    name = "jsonl"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write one line."""
        self._file.write(json.dumps({"time": round(time.time(), 3), "step": step, **figures}) + "\n")


@extensions.register("tracker")
class Csv(_File):
    """A line per figure and step."""

    name = "csv"

    def start(self, job: str) -> None:
        """Open the file; a new one begins with the names of the columns."""
        super().start(job)
        self._rows = csv.writer(self._file)
        if self._file.tell() == 0:
            self._rows.writerow(["time", "step", "name", "value"])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write a line for each figure."""
        now = round(time.time(), 3)
        self._rows.writerows([now, step, name, value] for name, value in figures.items())


def make(spec: str) -> Tracker:
    """Return the tracker of ``NAME`` or ``NAME:TARGET``.

    Raises:
        ValueError: the name is unknown.
        MissingExtraError: its package is not installed.
    """
    import paceline.observe.tools  # noqa: F401 - registers its trackers

    name, _, target = spec.partition(":")
    tracker: Tracker = extensions.find("tracker", name, what="tool of --report-to")(target)
    return tracker


class TrackerThread:
    """Runs a tracker in a thread of its own. Failures are named once, and end nothing.

    Args:
        spec: ``NAME`` or ``NAME:TARGET``.
        job: the job's id.

    Raises:
        ValueError: the name is unknown.
        MissingExtraError: its package is not installed.
    """

    def __init__(self, spec: str, job: str) -> None:
        self._spec, self._job, self._tracker = spec, job, make(spec)
        self._waiting: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(_MOST_WAITING)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"paceline-{self._tracker.name}", daemon=True)
        self._thread.start()

    def put(self, figures: Mapping[str, float], step: int) -> None:
        """Hand over the figures of a step. Does not wait."""
        try:
            self._waiting.put_nowait((figures, step))
        except queue.Full:
            self._warn(f"it is too slow: {_MOST_WAITING} steps wait for it, and further ones are left out")

    def close(self, timeout_s: float) -> None:
        """Let it write what waits, and close the tool."""
        try:
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._has_warned = False
            self._warn(f"it was not done {timeout_s:g} s after the end of the job; figures may be missing there")

    def _run(self) -> None:
        is_open = self._try(self._tracker.start, self._job)
        while (one := self._waiting.get()) is not None:
            if is_open:
                self._try(self._tracker.log, *one)
                if self._waiting.empty():
                    self._try(self._tracker.flush)
        if is_open:
            self._try(self._tracker.finish)

    def _try(self, call: Any, *arguments: Any) -> bool:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - a foreign tool may raise anything
            self._warn(f"{type(error).__name__}: {error}; figures are missing there")
            return False
        return True

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("--report-to %s: %s; training goes on", self._spec, text)


def by_step(figures: Iterable[JobFigure]) -> list[tuple[int, dict[str, float]]]:
    """Return the figures of each step, in the order of steps."""
    found: dict[int, dict[str, float]] = {}
    for one in figures:
        found.setdefault(one.step, {})[one.name] = one.value
    return sorted(found.items())


def overview(status: m.Status) -> tuple[int, dict[str, float]]:
    """Return the last round, and figures of the job and of each worker.

    The rate of the job is the sum of its workers' rates.
    """
    workers = [
        (member.rank, state)
        for member, state in zip(status.members, status.states, strict=True)
        if member.role == "worker"
    ]
    found = {f"worker/{rank}/{name}": one[1] for rank, state in workers for name, one in state.figures.items()}
    there = [(rank, state) for rank, state in workers if state.phase in ("live", "silent")]
    windows = {rank: window for rank, state in there for window in state.recent if sum(window.parts)}
    rates = {rank: 1e6 * one.samples / sum(one.parts) for rank, one in windows.items()}
    found |= {f"worker/{rank}/samples_per_sec": rate for rank, rate in rates.items()}
    if windows:
        found["throughput/samples_per_sec"] = sum(rates.values())
        parts = [sum(column) for column in zip(*(one.parts for one in windows.values()), strict=True)]
        found |= {f"time/{name}_ratio": part / sum(parts) for name, part in zip(WORKER_PARTS, parts, strict=True)}
    return max((state.round for _, state in workers), default=0), found
