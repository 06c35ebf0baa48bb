"""Periods of local steps: how many steps a period has, and when its fragments are exchanged. Pure.

| period              | steps of this worker                                                          |
|---------------------|-------------------------------------------------------------------------------|
| ``32``              | 32                                                                            |
| ``32 by speed``     | 32 where it is the fastest worker, else as many as fit that one's time        |
| ``30 s``            | as many as fit the time                                                       |
| ``auto``            | as many as the link needs, by speed                                           |
| with ``qsr``        | the more the smaller the learning rate is                                     |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Measured times vary by so much: machines that are alike take as many steps.
_NOISE = 0.03

#: Steps of a period by speed, of the fastest worker.
_BY_SPEED = 100

#: Steps of the first period of ``auto``: the first one loads libraries, and four tell how long a step takes.
FIRST_STEPS = 5

#: Steps of any period at most: learning rates may go to 0.
MOST_STEPS = 10_000


@dataclass(frozen=True)
class Period:
    """How long a worker steps by itself.

    Attributes:
        steps: steps of a worker, or of the fastest one where ``by_speed``; 0: the period is a time.
        seconds: the time.
        by_speed: slower workers take fewer steps: as many as fit the time of the fastest worker's.
        is_auto: the steps follow the measured link and step; those here are the first period's.
    """

    steps: int = 0
    seconds: float = 0.0
    by_speed: bool = False
    is_auto: bool = False

    @property
    def follows_speed(self) -> bool:
        """Whether slower workers take fewer steps."""
        return self.by_speed or not self.steps

    @classmethod
    def parse(cls, local_steps: int | str) -> Period:
        """Return the period of the argument ``local_steps``.

        Raises:
            ValueError: it is none of the forms that the text lists.
        """
        if isinstance(local_steps, int) and not isinstance(local_steps, bool) and local_steps >= 1:
            return cls(steps=local_steps)
        words = local_steps.split() if isinstance(local_steps, str) else []
        if words == ["auto"]:
            return cls(steps=FIRST_STEPS, by_speed=True, is_auto=True)
        if words[-2:] == ["by", "speed"] and len(words) <= 3 and (len(words) == 2 or words[0].isdigit()):
            steps = int(words[0]) if len(words) == 3 else _BY_SPEED
            if steps >= 1:
                return cls(steps=steps, by_speed=True)
        if len(words) == 2 and words[1] == "s":
            try:
                seconds = float(words[0])
            except ValueError:
                seconds = 0.0
            if 0 < seconds < math.inf:
                return cls(seconds=seconds)
        raise ValueError(
            f"local_steps={local_steps!r}: give a number of steps (32), a time ('30 s'), '32 by speed', or 'auto'"
        )

    def __str__(self) -> str:
        """Return it for the log."""
        if self.is_auto:
            return "local steps, as many as the link needs"
        if self.seconds:
            return f"local steps for {self.seconds:g} s"
        return f"{self.steps} local steps{' of the fastest worker, fewer of slower ones' if self.by_speed else ''}"


@dataclass(frozen=True)
class Quadratic:
    """The quadratic synchronisation rule: H = max(H0, (alpha / lr)^2) (Gu et al. 2024, arXiv 2310.14423).

    Attributes:
        alpha: None: so that (alpha / lr)^2 is ``share`` of H0 at the largest learning rate so far.
        share: published values are near 1 for AdamW, and near 1/25 for SGD.
    """

    alpha: float | None = None
    share: float = 1.0

    @classmethod
    def parse(cls, schedule: str, share: float) -> Quadratic:
        """Return the rule of the argument ``schedule``.

        Raises:
            ValueError: it is none of the forms that the text lists.
        """
        words = schedule.split() if isinstance(schedule, str) else []
        if words == ["qsr"]:
            return cls(share=share)
        if len(words) == 2 and words[0] == "qsr":
            try:
                alpha = float(words[1])
            except ValueError:
                alpha = 0.0
            if 0 < alpha < math.inf:
                return cls(alpha)
        raise ValueError(f"schedule={schedule!r}: give 'qsr', or 'qsr 0.2' with an alpha of your own")

    def steps(self, base: int, lr: float, largest_lr: float) -> int:
        """Return the steps of a period that begins at a learning rate."""
        square = base * self.share * largest_lr**2 if self.alpha is None else self.alpha**2
        return MOST_STEPS if square >= MOST_STEPS * lr**2 else max(base, math.floor(square / lr**2 + 1e-9))


@dataclass(frozen=True)
class Pace:
    """What a worker knows when a period begins.

    Attributes:
        step_s: seconds of its step; 0: not known.
        fastest_s: the same of the fastest worker.
        lr: largest learning rate of its optimizer.
    """

    step_s: float = 0.0
    fastest_s: float = 0.0
    lr: float = 0.0


class Progress:
    """How far a worker is in its period.

    Attributes:
        taken: steps of this period.
        pushed: fragments that it has pushed.
        base: steps of the next period, of the fastest worker and before the schedule.
        steps: steps of this period in all; 0: the period is a time.
        largest_lr: largest learning rate at the begin of a period so far.
    """

    def __init__(self, period: Period, fragments: int, schedule: Quadratic | None, now: float) -> None:
        self._period, self._fragments, self._schedule = period, fragments, schedule
        self._began, self.base = now, period.steps
        self.taken = self.pushed = 0
        self.steps, self.largest_lr = period.steps, 0.0
        self._is_whole = period.is_auto
        """All fragments are due at the end of the period: nothing is known before that."""

    def begin(self, now: float) -> None:
        """Begin a period."""
        self._is_whole = False
        self.taken, self.pushed, self._began = 0, 0, now

    def step(self, now: float, pace: Callable[[], Pace]) -> Sequence[int]:
        """Count a step; returns the numbers of the fragments that are due. After the last one a period begins.

        ``pace`` is asked in the first step of a period.
        """
        if self.taken == 0:
            self.steps = self._chosen(pace())
        self.taken += 1
        first = self.pushed
        while self.pushed < self._fragments and self._is_due(self.pushed, now):
            self.pushed += 1
        due = range(first, self.pushed)
        if self.pushed == self._fragments:
            self.begin(now)
        return due

    def _is_due(self, number: int, now: float) -> bool:
        """Return whether the period has come to the end of a fragment's part."""
        part = 1.0 if self._is_whole else (number + 1) / self._fragments
        if self.steps:
            return self.taken >= math.ceil(self.steps * part)
        return now - self._began >= self._period.seconds * part

    def _chosen(self, pace: Pace) -> int:
        """Return the steps of a period that begins now."""
        base, self.largest_lr = self.base, max(self.largest_lr, pace.lr)
        if self._schedule is not None:
            base = self._schedule.steps(base, pace.lr, self.largest_lr)
        if not (self._period.by_speed and pace.step_s > 0 and pace.fastest_s > 0):
            return base
        return min(base, max(1, math.floor((1 + _NOISE) * base * pace.fastest_s / pace.step_s)))

    def state(self) -> list[float]:
        """Return it for a ``state_dict``."""
        return [self.taken, self.pushed, self.steps, self.largest_lr]

    def load(self, state: Sequence[float], now: float) -> None:
        """Go on from a state."""
        taken, pushed, steps, self.largest_lr = state
        self.taken, self.pushed, self.steps, self._began = int(taken), int(pushed), int(steps), now
