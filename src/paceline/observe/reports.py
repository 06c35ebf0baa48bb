"""Figures that a worker's script reports: ``paceline.report(loss=..., accuracy=...)``.

They travel to the scheduler with the next heartbeat. A heartbeat has room for :data:`MAX_REPORTS` steps; where there
are more, neighbours are joined to their mean, weighted by samples.

| figure | its value is read |
|---|---|
| a number, of Python or numpy | in the call |
| a tensor in host memory | in the call |
| a tensor on a CUDA device | in the call its copy to host memory is queued; the call does not wait for it |
| a tensor on another accelerator | in the call, which waits for the device |

So a tensor may be changed in place after the call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import re
import sys
import time
from collections import deque
from typing import Any, TypeAlias

from paceline.observe import meter
from paceline.wire import messages as m
from paceline.wire.limits import FIGURE_NAME, MAX_AMOUNT, MAX_FIGURE_NAME, MAX_FIGURES, MAX_NUMEL, MAX_REPORTS

logger = logging.getLogger(__name__)

#: Reports that are kept until a heartbeat takes them; beyond that the oldest are left out.
_MOST = 4096

#: Step, samples and figures; behind the report's number.
_Report: TypeAlias = tuple[int, float, dict[str, Any]]
_Indexed: TypeAlias = tuple[int, int, float, dict[str, float]]

_NAME = re.compile(FIGURE_NAME)


class _OnDevice:
    """A figure that is on its way from a CUDA device."""

    def __init__(self, value: Any) -> None:
        torch = sys.modules["torch"]
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True, device="cpu")
        self._host.copy_(value.detach().reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    @property
    def is_here(self) -> bool:
        """Whether the copy has ended."""
        return bool(self._copied.query())

    def __float__(self) -> float:
        return float(self._host)


class ReportedSteps:
    """The steps that one script has reported with their total: ``paceline.report(step=..., total=...)``.

    A step lasts as long as the mean since the first report, with all that lies between steps: tests, checkpoints. A
    step that is lower than the one before, or another total, begins anew.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        """Step and time of the first report."""
        self._step = self._total = 0
        self._at = 0.0

    def note(self, step: int, total: int, now: float) -> None:
        """Take in that a step is done, of a total."""
        if self._first is None or step < self._step or total != self._total:
            self._first = step, now
        self._step, self._total, self._at = step, total, now

    def at(self, now: float) -> m.StepsLeft | None:
        """Return the last step, the total, and the time that is left; None before the first report."""
        if self._first is None:
            return None
        (began, since), left_s = self._first, None
        if self._step > began:
            step_s = (self._at - since) / (self._step - began)
            left_s = min(MAX_AMOUNT, max(0.0, (self._total - self._step) * step_s - (now - self._at)))
        return m.StepsLeft(self._step, self._total, 0.0 if self._step >= self._total else left_s)


class Reports:
    """The reports of this process that no heartbeat has taken yet."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._open: deque[_Report] = deque(maxlen=_MOST)
        self._joint: list[_Report] = []
        """Older ones that the last heartbeat had no room for."""
        self._warned: set[str] = set()
        self._progress = ReportedSteps()

    def add(self, step: int | None, samples: float | None, figures: dict[str, Any], total: int | None = None) -> None:
        """Take in one report; see :func:`report`."""
        if not self._names.issuperset(figures):
            self._check_names(figures)
        for name, value in figures.items():
            if type(value) is not float:
                figures[name] = _figure(name, value)
        if step is None or samples is None:
            round, usual = meter.active.last
            step, samples = round if step is None else step, usual if samples is None else samples
        if type(step) is not int:
            with contextlib.suppress(TypeError):
                step = operator.index(step)  # of numpy or torch
        if type(step) is not int or not 0 <= step < 2**63:
            raise ValueError(f"step is {step!r}; it is an integer, 0 or more")
        if type(samples) is not float:
            samples = _number("samples", samples)
        if not 0 < samples <= MAX_NUMEL:
            raise ValueError(f"samples is {samples!r}; it is the number of samples behind the figures, above 0")
        if total is not None:
            if type(total) is not int or not 0 < total < 2**63:
                raise ValueError(f"total is {total!r}; it is the number of steps of the whole training, 1 or more")
            self._progress.note(step, total, time.monotonic())
        if figures:
            self._open.append((step, samples, figures))

    def _check_names(self, figures: dict[str, Any]) -> None:
        for name in figures:
            if not _NAME.match(name) or len(name) > MAX_FIGURE_NAME:
                raise ValueError(
                    f"{name!r} cannot name a figure: letters, digits and _ . / - can, up to {MAX_FIGURE_NAME} of them, "
                    "beginning with a letter or _"
                )
        if len(self._names.union(figures)) > MAX_FIGURES:
            raise ValueError(f"a script reports figures of at most {MAX_FIGURES} names; {sorted(figures)} are too many")
        self._names.update(figures)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._open and not self._joint

    def progress(self) -> m.StepsLeft | None:
        """Return how far the script is; None: it has told no total of steps."""
        return self._progress.at(time.monotonic())

    def take(self) -> list[m.ReportedFigures]:
        """Return reports for one heartbeat. Any thread may call it, one at a time."""
        taken = self._joint
        while self._open and all(type(one) is float or one.is_here for one in self._open[0][2].values()):
            taken.append(self._open.popleft())
        found = self._joined(taken)
        self._joint = found[MAX_REPORTS:]
        return [m.ReportedFigures(*one) for one in found[:MAX_REPORTS] if one[2]]

    def _joined(self, reports: list[_Report]) -> list[_Report]:
        """Join neighbours with the same names until a heartbeat has room, or none are left that can be joined."""
        alike: dict[tuple[str, ...], list[_Indexed]] = {}
        for index, (step, samples, figures) in enumerate(reports):
            finite = self._finite(step, figures)
            alike.setdefault(tuple(finite), []).append((index, step, samples, finite))
        count = len(reports)
        while count > MAX_REPORTS:
            longest = max(alike, key=lambda names: len(alike[names]))
            ones = alike[longest]
            if len(ones) < 2:
                break
            pairs = [ones[index : index + 2] for index in range(0, len(ones), 2)]
            alike[longest] = [pair[0] if len(pair) == 1 else _mean(*pair) for pair in pairs]
            count += len(alike[longest]) - len(ones)
        return [one[1:] for one in sorted((one for ones in alike.values() for one in ones), key=lambda one: one[0])]

    def _finite(self, step: int, figures: dict[str, Any]) -> dict[str, float]:
        """Return the figures as numbers, less those that are none. The log names these once."""
        numbers = {name: float(value) for name, value in figures.items()}
        for name, value in numbers.items():
            if not math.isfinite(value) and name not in self._warned:
                self._warned.add(name)
                text = "the reported figure %r is %s at step %d; values that are not finite are left out"
                logger.warning(text, name, value, step)
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _mean(one: _Indexed, two: _Indexed) -> _Indexed:
    whole = one[2] + two[2]
    return (*two[:2], whole, {name: (one[2] * one[3][name] + two[2] * two[3][name]) / whole for name in one[3]})


def _figure(name: str, value: Any) -> Any:
    """Return a float, or a copy that is on its way from a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} has {value.numel()} values; report one number, such as its mean")
        if value.device.type != "cuda":
            return float(value.detach())
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name} is reported while a CUDA graph is captured; replays would not: report after them")
        return _OnDevice(value)
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} is {value!r}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is {value!r}, not a number") from error


_own = Reports()


def report(*, step: int | None = None, samples: float | None = None, total: int | None = None, **figures: Any) -> None:
    """Report figures of this worker: for ``paceline status``, for metrics, and for the tools of ``--report-to``.

    Of the job, each figure is the mean over the workers that reported it for that step, weighted by samples. It takes
    about a microsecond and waits for nothing; outside of a job it does nothing. A figure that is NaN or infinite is
    left out, and the log names it once.

    Args:
        step: number of the step, or of the epoch: figures of one step belong together. By default the number of
            rounds that this worker has pushed.
        samples: samples behind the figures; by default those of the last push.
        total: steps of the whole training, in the same count as ``step``: the panel, ``paceline top`` and ``paceline
            status`` tell how long it still takes.
        **figures: numbers, or tensors of one element, by name. Names with other characters:
            ``report(**{"val/loss": 0.3})``.

    Raises:
        TypeError: a value is no number.
        ValueError: a name cannot be, there are more than 64 names, a tensor has several elements, ``step`` or
            ``samples`` is negative, ``total`` is no number of steps, or a CUDA graph is captured.
    """
    _own.add(step, samples, figures, total)


def own() -> Reports:
    """Return the reports of this process."""
    return _own
