"""How long this worker computes in a round, and the end of a job that only measures that."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from paceline.hetero import WorkerRound
from paceline.hetero.files import report_text, steps_line, steps_text
from paceline.hetero.measured import speed_of
from paceline.hetero.step_noise import WINDOW, Counted, count
from paceline.observe.account import WAIT, Steps
from paceline.text_files import write_text
from paceline.wire import messages as m
from paceline.worker.stores import WorkerStores

#: Rounds that are not measured: the first ones load libraries and make memory.
WARM_UP = 3

#: Last rounds that tell a worker's speed.
_USUAL = 25

#: Rounds whose median is shown: few, so that it is that of now.
_RECENT = 9


class RoundTimes:
    """The computation of rounds, of their accounts: all of a round but the waits for answers.

    Args:
        keep: keep all steps, not only the last ones.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.rounds = 0
        """Rounds that were measured."""
        self._last: tuple[WorkerRound, ...] = ()
        """The last rounds. Their statistics are worked out on request, not with every push."""
        self._all: list[WorkerRound] | None = [] if keep else None
        self.samples = 1.0
        """Samples of the largest batch so far."""

    def add(self, steps: Steps) -> None:
        """Take in the account of one round."""
        waited_s = steps.seconds[WAIT]
        seconds = steps.wall_s - waited_s
        if steps.round > WARM_UP and seconds > 0 and steps.samples > 0:
            self.samples = max(self.samples, steps.samples)
            step = WorkerRound(steps.samples, seconds, waited_s)
            self._last = (*self._last[1 - WINDOW :], step)  # replaced, as another thread reads it
            if self._all is not None:
                self._all.append(step)
            self.rounds += 1

    def step_seconds(self, open_own_s: float | None) -> float:
        """Return how long this worker computes in a step: the median of the last ones, or this one if it takes longer.

        So a worker that becomes slow shows it in the step in which it does. 0 before the first step that is measured.
        Any thread may call it.

        Args:
            open_own_s: computation of the present round so far; None: it is waiting now.
        """
        recent = [one.seconds for one in self._last[-_RECENT:]]
        usual = statistics.median(recent) if recent else 0.0
        return usual if not recent or open_own_s is None else max(usual, open_own_s)

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


class Team(Protocol):
    """The part of a worker's session that a profile needs."""

    pace: RoundTimes
    stores: WorkerStores
    hands_out: bool
    store_type: str

    @property
    def servers(self) -> list[m.Member]:
        """All servers, in rank order."""
        ...

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
        path: path of the speeds file, on worker 0's machine; ``-``: it prints all that is known (``paceline up``).
        rounds: number of rounds to measure.
        steps: path of a file of all steps there; empty: none.
    """

    def __init__(self, path: str, rounds: int, steps: str = "") -> None:
        self._path, self._rounds, self._steps, self._prints = path, rounds, steps, path == "-"
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
        steps = steps_line(session.pace.steps) if self._steps or self._prints else ""
        said = [one.decode() for one in session.gather("paceline/profile", (line + steps).encode())]
        if session.rank == 0 and all(said) and self._prints:
            print(report_text(said, _update_s(session), session.stores.elements, session.store_type), flush=True)
        elif session.rank == 0 and all(said):  # not if the script has ended on a worker before
            write_text(self._path, "".join(one.partition("\n")[0] + "\n" for one in said))
            if self._steps:
                lines = [one.partition("\n")[2] for one in said]
                write_text(self._steps, steps_text(lines, _update_s(session), hands_out=session.hands_out))
        raise SystemExit(0)


def _update_s(session: Team) -> float:
    """Return how long servers that have measured themselves take to apply an update of all keys; 0: not known.

    This is the time of plain SGD on one thread of each. Other optimizers take a few times as long.
    """
    rate = sum(server.speed for server in session.servers)
    return session.stores.elements / rate if rate > 0 else 0.0
