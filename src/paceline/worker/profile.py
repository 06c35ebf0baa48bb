"""How long this worker computes in a round, and the end of a job that only measures that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.hetero import SpeedMeter
from paceline.wire import messages as m
from paceline.worker.stores import Stores

#: Rounds that are not measured: the first ones load libraries and make memory.
WARM_UP = 3

#: Rounds whose median is shown: few, so that it is that of now.
_RECENT = 9


class Pace:
    """Measures rounds: the time from the first push of one to that of the next, less the waits for answers.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._meter = clock, SpeedMeter()
        self._round, self._since, self._waited = 0, 0.0, 0.0
        self.rounds = 0
        """Rounds that were measured."""
        self._recent: tuple[float, ...] = ()
        self.usual_s = 0.0
        """Median computation of the last rounds; 0: not known. Any thread may read it."""

    def push(self, round: int, waited_s: float) -> None:
        """Note a push of a round; only the first one counts.

        Args:
            round: of the push.
            waited_s: how long this worker has waited for answers so far.
        """
        if round <= self._round:
            return
        now = self._clock()
        seconds = now - self._since - (waited_s - self._waited)
        if self._round >= WARM_UP and seconds > 0:
            self._meter.add(1, seconds)
            self._recent = (*self._recent[1 - _RECENT :], seconds)  # replaced, as another thread reads it
            self.rounds += 1
            self.usual_s = self.seconds or 0.0
        self._round, self._since, self._waited = round, now, waited_s

    def step_seconds(self, waited_s: float | None) -> float:
        """Return how long this worker computes in a step: the median of the last ones, or this one if it takes longer.

        So a worker that becomes slow shows it in the step in which it does. 0 before the first step that is measured.
        Any thread may call it.

        Args:
            waited_s: how long this worker has waited for answers so far; None: it is waiting now.
        """
        usual = statistics.median(self._recent) if self._recent else 0.0
        if not self._recent or waited_s is None:
            return usual
        return max(usual, self._clock() - self._since - (waited_s - self._waited))

    @property
    def seconds(self) -> float | None:
        """Median computation of the last rounds; None before the first one that is measured."""
        speed = self._meter.speed()
        return None if speed is None else speed.seconds(1)


class Team(Protocol):
    """What a profile needs of a worker's session."""

    pace: Pace
    stores: Stores

    @property
    def rank(self) -> int:
        """This worker's rank."""
        ...

    @property
    def workers(self) -> list[m.Member]:
        """All workers, in rank order."""
        ...

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        """Return the payloads of all workers, by rank."""
        ...


class Profile:
    """Ends a worker when enough rounds are measured; worker 0 writes the speeds of all (``paceline profile``).

    Args:
        path: of the speeds file, on worker 0's machine.
        rounds: to measure.
    """

    def __init__(self, path: str, rounds: int) -> None:
        self._path, self._rounds = Path(path), rounds
        self._is_over = False

    def check(self, session: Team) -> None:
        """End the process, with exit code 0, when enough rounds are measured. Called before every wait.

        Raises:
            SystemExit: this worker has measured enough, and so have all others.
        """
        if self._is_over or session.pace.rounds < self._rounds:
            return
        self._is_over = True
        session.stores.pause()
        me = session.workers[session.rank]
        line = f"{me.host}:{me.local_rank} {session.pace.seconds:.6g}\n"
        lines = [said.decode() for said in session.gather("paceline/profile", line.encode())]
        if session.rank == 0 and all(lines):  # not if the script has ended on a worker before
            self._path.write_text("".join(lines))
        raise SystemExit(0)
