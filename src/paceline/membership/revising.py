"""``dist_auto`` of a running job: its choice follows the workers' speeds. Pure.

====================================================  ============================================================
event                                                 effect
====================================================  ============================================================
rank 0 publishes keys of a ``dist_auto`` store        checks begin; of a *free* one, workers can change groups
every live worker has made ``regroup_rounds`` more    :class:`~paceline.hetero.Revision` repeats the choice with the
rounds                                                speeds of now
another choice is better, and the job is free         a new generation of groups, which all workers learn with
                                                      their next news
another choice is better, and takes a new start       advice, once in the log, and in ``paceline status``
a worker leaves or dies                               it is left out
====================================================  ============================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.config import Settings
from paceline.hetero import Choice, Measured, Revision, StepTime, group_by_speed
from paceline.hetero.files import parse_choice, parse_measured
from paceline.hetero.step_noise import Counted
from paceline.membership.checks import Checks
from paceline.membership.roster import MemberRecord


class Revising:
    """The choice that fits the measured speeds.

    Args:
        settings: have the choice, and the measurements behind it.

    Attributes:
        has_started: a ``dist_auto`` store has keys, and its choice follows the speeds, or cannot.
    """

    def __init__(self, settings: Settings) -> None:
        self._checks = Checks(settings.regroup_rounds)
        self._start: tuple[Choice, Measured] | None = None
        self._revision: Revision | None = None
        self._problem = self._change = ""
        self.has_started = False
        if not (settings.regroup_rounds and settings.choice and settings.measured):
            return
        try:
            group_by_speed([1.0, 2.0])  # loads scikit-learn, which takes seconds, before the job begins
            choice = parse_choice(settings.choice, settings.num_workers)
            self._start = choice, parse_measured(settings.measured, settings.num_workers)
        except (ImportError, ValueError) as error:
            self._problem = f"dist_auto stays as it is: {error}"

    def start(self, is_free: bool) -> None:
        """Note that a ``dist_auto`` store has keys.

        Args:
            is_free: its workers can change groups. If two stores say otherwise, the free one counts.
        """
        if self._start is not None and (self._revision is None or (is_free and not self._revision.groups)):
            self._revision = Revision(*self._start, is_free)
        self.has_started = self._start is not None or bool(self._problem)

    @property
    def generation(self) -> int:
        """Number of the groups; 0: those of the start."""
        return 0 if self._revision is None else self._revision.changes

    @property
    def groups(self) -> list[list[int]]:
        """The groups from generation 1 on."""
        if self._revision is None or not self.generation:
            return []
        return [list(group) for group in self._revision.groups]

    @property
    def sentences(self) -> list[str]:
        """The present choice since it changed, and a better one."""
        advice = "" if self._revision is None else self._revision.advice
        return [text for text in (self._change, advice) if text]

    def check(self, workers: Iterable[MemberRecord]) -> str:
        """Repeat the choice, if it is time to; returns a sentence if it has changed, if it should, or cannot."""
        if self._problem:
            problem, self._problem = self._problem, ""
            return problem
        live = [one for one in workers if one.live]
        if self._revision is None or not self._checks.is_due(live):
            return ""
        steps = {one.member.rank: _step_time(one) for one in live}
        changes, text = self._revision.changes, self._revision.check(steps)
        if self._revision.changes > changes:
            self._change = text
        return f"dist_auto: {text}" if text else ""


def _step_time(one: MemberRecord) -> StepTime:
    """Return a worker's report of its steps, without impossible figures."""
    spread = one.spread
    can_be = spread.spikes <= spread.steps and 1 <= spread.spike_factor < math.inf and 0 <= spread.jitter < math.inf
    counted = Counted(spread.steps, spread.spikes, spread.spike_factor, spread.jitter) if can_be else Counted()
    return StepTime(one.usual_samples, one.usual_s, counted)
