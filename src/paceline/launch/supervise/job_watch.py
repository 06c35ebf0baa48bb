"""How a job does, while it runs: a panel on a terminal, elsewhere a line now and then, ever more rarely."""

from __future__ import annotations

import os
import time

import msgspec

from paceline.launch.runtime import JobRecord
from paceline.launch.supervise.console import Console
from paceline.observe.job_view import JobView
from paceline.observe.table import duration
from paceline.wire import messages as m

#: Time between two pictures of the panel, time until the first line and between the first two, and the longest.
_PANEL_S, _FIRST_LINE_S, _LONGEST_S = 1.0, 10.0, 60.0

#: Silence of the scheduler that the panel tells.
_SILENT_S = 5.0


class Watch:
    """Asks the scheduler how the job does, and shows it on the console, in its panel if it has one."""

    def __init__(self, job: JobRecord, console: Console, now: float) -> None:
        self._job, self._console, self._began = job, console, now
        self._gap_s = _FIRST_LINE_S if console.panel is None else _PANEL_S
        self._next = now + (_FIRST_LINE_S if console.panel is None else 0.0)
        self._asked_at: float | None = None
        """When the scheduler was asked, if it has not answered."""
        self._view = self._view_of(m.Status([], [], []))
        self._last = ""

    @property
    def due(self) -> float:
        """When :meth:`turn` has to be called."""
        redraw = None if self._console.panel is None else self._console.panel.due
        return self._next if redraw is None else min(self._next, redraw)

    def turn(self, now: float, phase: str) -> bool:
        """Show the last status, if it is time; return whether to ask the scheduler now: ``phase`` says why not."""
        self._console.redraw_panel()
        if now < self._next:
            return False
        self._next = now + self._gap_s
        if self._console.panel is None:
            self._gap_s = min(2 * self._gap_s, _LONGEST_S)
        if not phase and self._asked_at is not None and now > self._asked_at + _SILENT_S:
            phase = f"the scheduler has not answered for {duration(now - self._asked_at)}"
        if self._console.panel is not None:
            self._draw(phase, now)
        elif phase:
            self._say(phase, now)
        if phase or self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def take(self, text: str, now: float) -> None:
        """Take the scheduler's answer: a ``Status`` as JSON; empty, if it is too long to be shown."""
        self._asked_at = None
        if not text:
            return
        self._view = self._view_of(msgspec.json.decode(text, type=m.Status))
        if self._console.panel is None:
            self._say(", ".join(one for one in (*self._view.progress, self._view.slowest) if one), now)
        else:
            self._draw("", now)

    def _view_of(self, status: m.Status) -> JobView:
        return JobView(status, self._job.workers, self._job.servers)

    def _say(self, text: str, now: float) -> None:
        if text != self._last:  # as in jobs that have no rounds
            job = "" if self._last else f"job {self._job.id} (paceline top {self._job.id}), "
            self._console.say(f"{job}{duration(now - self._began)}: {text}")
        self._last = text

    def _draw(self, phase: str, now: float) -> None:
        from paceline.launch.picture import View, painted, picture  # takes rich, on terminals only

        assert self._console.panel is not None
        size, view = self._console.panel.size(), View(is_panel=True, about=(phase,) if phase else ())
        lines = picture(self._view, self._job, time.time(), size, view)
        self._console.show_panel(painted(lines, os.environ))
