"""Runs trackers: each in a thread of its own, which may wait and fail without a consequence for the job."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from paceline import extensions
from paceline.host.plain_text import described
from paceline.observe.account import WORKER_PARTS
from paceline.observe.job_figures import JobFigure
from paceline.observe.job_view import JobView
from paceline.observe.trackers import Tracker

logger = logging.getLogger(__name__)

#: Steps that wait for a tracker; further ones are left out.
_MOST_WAITING = 1024


def make(spec: str) -> Tracker:
    """Return the tracker of ``NAME`` or ``NAME:TARGET``.

    Raises:
        ValueError: the name is unknown, or its class raises.
        MissingExtraError: its package is not installed.
    """
    name, _, target = spec.partition(":")
    kind = extensions.find("tracker", name, what="tool of --report-to")
    tracker: Tracker = extensions.made(f"tracker {name!r}", kind, target)
    return tracker


class TrackerThread:
    """Runs a tracker in a thread of its own. Failures are named once, and end nothing.

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
            self._warn(f"{described(error)}; figures are missing there")
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


def overview(job: JobView) -> tuple[int, dict[str, float]]:
    """Return the last round, and figures of the job and of each worker.

    The rate of the job is the sum of its workers' rates.
    """
    found = {
        f"worker/{one.member.rank}/{name}": value
        for one in job.workers
        for name, (_, value) in one.state.figures.items()
    }
    timed = [one for one in job.workers if one.is_there and any(one.shares.values())]
    found |= {f"worker/{one.member.rank}/samples_per_sec": one.samples_per_s for one in timed}
    if timed:
        found["throughput/samples_per_sec"] = sum(one.samples_per_s for one in timed)
        parts = [sum(column) for column in zip(*(one.state.recent[0].parts for one in timed), strict=True)]
        found |= {f"time/{name}_ratio": part / sum(parts) for name, part in zip(WORKER_PARTS, parts, strict=True)}
    return job.round, found
