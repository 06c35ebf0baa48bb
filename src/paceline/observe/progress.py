"""How far a script is on the way to its last step, and how long it still takes. Pure."""

from __future__ import annotations

from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT


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
