"""How long this worker computes in a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.hetero import WorkerRound
from paceline.hetero.measured import speed_of
from paceline.hetero.step_noise import WINDOW, Counted, count
from paceline.observe.account import WAIT, Steps

#: Rounds that are not measured: the first ones load libraries and make memory.
WARM_UP = 3

#: Last rounds that tell a worker's speed.
_USUAL = 25

#: Rounds whose median is shown: few, so that it is that of now.
_RECENT = 9


class RoundTimes:
    """The computation of rounds, of their accounts: all of a round but the waits for answers.

    With ``keep`` all of them are kept, not only the last ones.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.rounds = 0
        """Rounds that were measured."""
        self._last: tuple[WorkerRound, ...] = ()
        """The last rounds. Their statistics are worked out on request, not with every push."""
        self._all: list[WorkerRound] | None = [] if keep else None
        self._is_local = False
        self.samples = 1.0
        """Samples of the largest batch so far."""

    def add(self, steps: Steps) -> None:
        """Take in the account of one round: of one step, or of a period, whose mean step counts."""
        taken, self._is_local = max(1, steps.steps), steps.steps > 0
        waited_s, samples = steps.seconds[WAIT] / taken, steps.samples / taken
        seconds = steps.wall_s / taken - waited_s
        if max(steps.round, steps.steps) > WARM_UP and seconds > 0 and samples > 0:
            self.samples = max(self.samples, samples)
            step = WorkerRound(samples, seconds, waited_s)
            self._last = (*self._last[1 - WINDOW :], step)  # replaced, as another thread reads it
            if self._all is not None:
                self._all.append(step)
            self.rounds += 1

    def step_seconds(self, open_own_s: float | None, open_steps: int = 0) -> float:
        """Return how long this worker computes in a step: the median of the last ones, or this one if it takes longer.

        So a worker that becomes slow shows it in the step in which it does. 0 before the first step that is measured.
        Of local steps, those of the last period count. Any thread may call it.

        Args:
            open_own_s: the computation of the present round so far; None: it is waiting now.
            open_steps: local steps of it so far.
        """
        recent = [one.seconds for one in self._last[-1 if self._is_local else -_RECENT :]]
        usual = statistics.median(recent) if recent else 0.0
        if open_own_s is None or not (recent or open_steps > WARM_UP):
            return usual
        return max(usual, open_own_s / (open_steps + 1)) if recent else open_own_s / open_steps

    @property
    def steps(self) -> Sequence[WorkerRound]:
        """The rounds that were measured: all of them, or the last ones."""
        return self._last[-_USUAL:] if self._all is None else self._all

    @property
    def seconds(self) -> float | None:
        """Median computation of the last rounds, of the largest batch; None before the first one that is measured.

        Any thread may read it.
        """
        return speed_of(self.steps).seconds(self.samples) if self.steps else None

    @property
    def counted(self) -> Counted:
        """How much the times of the last rounds vary. Any thread may read it."""
        return count([one.seconds for one in self._last])
