"""Trackers: tools that keep the figures of a job, by name (``paceline launch --report-to NAME:TARGET``).

| name | target | default target |
|---|---|---|
| ``jsonl`` | path of a file: a JSON object per step | ``paceline-JOB.jsonl`` |
| ``csv`` | path of a file: a line per figure and step (``time,step,name,value``) | ``paceline-JOB.csv`` |

:mod:`paceline.observe.tools` has those that need a package. Your own class is found by ``paceline.register`` and by an
entry point of the group ``paceline.trackers``.

:mod:`paceline.observe.tracking` runs them.
"""

from __future__ import annotations

import csv
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import IO, ClassVar

from paceline import extensions


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
        """Called when no more figures wait: logged figures must not get lost when the process is killed."""

    @abstractmethod
    def finish(self) -> None:
        """Close the tool at the end of the job."""


class _File(Tracker):
    """Writes lines to a file, each with the time in seconds since 1970."""

    _file: IO[str]

    def start(self, job: str) -> None:
        self._file = open(self.target or f"paceline-{job}.{self.name}", "a", newline="")  # noqa: SIM115

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


@extensions.register("tracker")
class _Jsonl(_File):
    """A JSON object per step, in a line."""

    name = "jsonl"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        own = {"time": round(time.time(), 3), "step": step}
        named = {f"figure/{name}" if name in own else name: value for name, value in figures.items()}
        self._file.write(json.dumps(own | named) + "\n")


@extensions.register("tracker")
class _Csv(_File):
    """A line per figure and step."""

    name = "csv"

    def start(self, job: str) -> None:
        super().start(job)
        self._rows = csv.writer(self._file)
        if self._file.tell() == 0:
            self._rows.writerow(["time", "step", "name", "value"])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        now = round(time.time(), 3)
        self._rows.writerows([now, step, name, value] for name, value in figures.items())
