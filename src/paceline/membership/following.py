"""Groups of ``dist_gsync``, or the choice of ``dist_auto``, follow the workers' speeds in a running job. Pure.

Both compare when every live worker has made ``regroup_rounds`` more rounds, and send workers to groups of a new
*generation*, which all workers learn with their next news. Each moves there between two of its rounds, and says so to
the servers (:mod:`paceline.consistency.units`). A worker that leaves or dies is left out.

| | compares | where others fit |
|---|---|---|
| :class:`Drift` | speeds with the groups (:class:`~paceline.hetero.Regrouping`) | new groups |
| :class:`Revising` | the choice with that of now (:class:`~paceline.hetero.Revision`) | new groups; else advice |

A job has one of them: once rank 0 has published the keys of a ``dist_auto`` store, its choice follows.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

from paceline.config import Settings
from paceline.consistency import parse_groups
from paceline.hetero import Choice, Measured, Regrouping, Revision, StepTime, group_by_speed
from paceline.hetero.files import parse_choice, parse_measured
from paceline.hetero.step_noise import Counted
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m

#: Rounds of the slowest worker before the first check: medians of fewer are too noisy.
FIRST_CHECK = 25


class Comparison(abc.ABC):
    """Compares the present groups, or the present choice, with those that fit the workers' speeds, now and then.

    Args:
        interval: rounds of the slowest worker between two comparisons; 0: there are none.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._next = interval, FIRST_CHECK
        self._problem = ""
        """Why there are none, to be said once."""

    def check(self, workers: Sequence[MemberRecord]) -> str:
        """Compare, if it is time to; returns a sentence if the job has changed, if it should, or cannot."""
        if self._problem:
            problem, self._problem = self._problem, ""
            return problem
        if not self._can_compare or not self._interval:
            return ""
        live = [one for one in workers if one.live]
        if not live or min(one.round for one in live) < self._next:
            return ""
        if not all(0 < number < math.inf for one in live for number in (one.usual_s, one.usual_samples)):
            return ""
        self._next = min(one.round for one in live) + self._interval
        return self._compare(live)

    @property
    @abc.abstractmethod
    def _can_compare(self) -> bool:
        """Whether there is something to compare."""

    @abc.abstractmethod
    def _compare(self, live: Sequence[MemberRecord]) -> str:
        """Compare with the speeds of the workers that have neither left nor died."""


class Drift(Comparison):
    """The groups that fit the measured speeds.

    Attributes:
        generation: number of the groups; 0: those of the start.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.regroup_rounds)
        self.generation = 0
        groups = parse_groups(settings.groups.replace(";", "\n")) if settings.regroup_rounds and settings.groups else []
        by_rank = groups and all(member.isdecimal() for group in groups for member in group)
        self._groups: Regrouping | None = None
        if by_rank and settings.staleness is None:
            try:
                group_by_speed([1.0, 2.0])  # loads scikit-learn, which takes seconds, before the job begins
                self._groups = Regrouping(tuple(tuple(map(int, group)) for group in groups))
            except ImportError as error:
                self._problem = f"the groups stay as they are: {error}"

    @property
    def groups(self) -> list[list[int]]:
        """The groups from generation 1 on."""
        return [list(group) for group in self._groups.groups] if self._groups is not None and self.generation else []

    @property
    def _can_compare(self) -> bool:
        return self._groups is not None

    def _compare(self, live: Sequence[MemberRecord]) -> str:
        assert self._groups is not None
        known = {rank for group in self._groups.groups for rank in group}
        for rank in known - {one.member.rank for one in live}:
            self._groups.leave(rank)
        changed = self._groups.check_speeds({one.member.rank: one.usual_s for one in live})
        self.generation += changed
        texts = [" ".join(map(str, group)) for group in self.groups]
        return f"the workers' speeds have changed; groups from now on: {', '.join(texts)}" if changed else ""


class Revising(Comparison):
    """The choice that fits the measured speeds.

    Attributes:
        has_started: a ``dist_auto`` store has keys, and its choice follows the speeds, or cannot.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.regroup_rounds)
        self._start: tuple[Choice, Measured] | None = None
        self._revision: Revision | None = None
        self._change = ""
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

    @property
    def _can_compare(self) -> bool:
        return self._revision is not None

    def _compare(self, live: Sequence[MemberRecord]) -> str:
        assert self._revision is not None
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


class Following:
    """The groups that fit the measured speeds, and sentences about them."""

    def __init__(self, settings: Settings) -> None:
        self._drift, self._revising = Drift(settings), Revising(settings)

    def note_keys(self, published: m.Publish) -> None:
        """Note that rank 0 has published the keys of a store."""
        if published.auto and not self._drift.generation:
            self._revising.start(published.auto == "free")

    @property
    def _what_follows(self) -> Drift | Revising:
        return self._revising if self._revising.has_started else self._drift

    @property
    def groups(self) -> tuple[int, list[list[int]]]:
        """The generation, 0 for that of the start, and its groups, from 1 on."""
        return self._what_follows.generation, self._what_follows.groups

    @property
    def sentences(self) -> list[str]:
        """The present choice of ``dist_auto`` since it changed, and a better one."""
        return self._revising.sentences

    def check(self, workers: Sequence[MemberRecord]) -> str:
        """Compare speeds with the groups, if it is time to; returns a sentence if these have changed or should."""
        return self._what_follows.check(workers)
