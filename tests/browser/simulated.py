"""A job of simulated members under the scheduler's own machine and exports."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from paceline.config import Settings
from paceline.membership import Membership
from paceline.observe.account import APPLY, COMPUTE, DATA, FIGURES, MERGE, RECEIVE, SERVER_PARTS, WAIT, WORKER_PARTS
from paceline.observe.job_view import JobView
from paceline.scheduler.exports import Exports
from paceline.wire import messages as m

#: Seconds of a round, and of the computation of a worker in it.
ROUND_S, COMPUTE_S = 1.0, 0.5
SAMPLES = 32


def window(round: int, is_slow: bool, random_: random.Random) -> m.Window:
    """Return what a worker tells of one round."""
    parts = [0] * len(WORKER_PARTS)
    own = COMPUTE_S * random_.uniform(0.9, 1.1)
    parts[COMPUTE], parts[DATA] = round_(own), round_(0.45 if is_slow else 0.05)
    parts[WAIT] = round_(ROUND_S) - parts[COMPUTE] - parts[DATA]
    return m.Window(round, 1, SAMPLES, parts)


def round_(seconds: float) -> int:
    return round(1e6 * seconds)


class SimulatedMembers:
    """Members whose rounds take a second. One of the workers has a slow data loader.

    Attributes:
        round: the present round.
        members: role and rank of each.
    """

    def __init__(self, workers: int, servers: int, slow: int = 1) -> None:
        self.round, self._slow, self._random = 0, slow, random.Random(3)
        self.members = [("server", rank) for rank in range(servers)] + [("worker", rank) for rank in range(workers)]
        self._sizes = workers, servers

    def hello(self, number: int, job_id: str, host: str = "node{}") -> m.Hello:
        """Return a member's request to join."""
        (role, rank), name = self.members[number], host.format(number)
        return m.Hello(job_id, role, rank, 0, name, name, 9, "", *self._sizes)

    def beat(self, role: str, rank: int, rounds: int = 1) -> m.Heartbeat:
        """Return a member's heartbeat of this round and those before, of so many."""
        told = range(self.round - rounds + 1, self.round + 1)
        return self._worker(rank, told) if role == "worker" else self._server(rank, told)

    def _worker(self, rank: int, rounds: Sequence[int]) -> m.Heartbeat:
        windows = [window(one, rank == self._slow, self._random) for one in rounds]
        told = m.AccountReport(windows, [0] * len(FIGURES))
        step_s = 1e-6 * (windows[-1].parts[COMPUTE] + windows[-1].parts[DATA])
        loss = [m.ReportedFigures(one, SAMPLES, {"loss": 2.0 / (1 + one)}) for one in rounds]
        size = 2**20 * self.round
        return m.Heartbeat(self.round, memory=500 * 2**20, sent=size, received=2 * size, step_s=step_s, account=told,
                           reports=loss)  # fmt: skip

    def _server(self, rank: int, rounds: Sequence[int]) -> m.Heartbeat:
        parts = [0] * len(SERVER_PARTS)
        parts[MERGE], parts[APPLY] = round_(0.1 + 0.02 * rank), round_(0.05)
        parts[RECEIVE] = round_(ROUND_S) - parts[MERGE] - parts[APPLY]
        staleness = [(1, 12), (2, 5), (3, 2), (4, 1)]
        windows = [m.Window(one, 1, 20.0, parts) for one in rounds]
        told = m.AccountReport(windows, [0] * len(FIGURES), [(self._slow, 18, 7_200_000), (0, 2, 20_000)],
                               staleness=staleness, held=(1_000_000, 8))  # fmt: skip
        size = 2**20 * self.round
        return m.Heartbeat(0, memory=700 * 2**20, sent=3 * size, received=3 * size, account=told)


class SimulatedJob:
    """A job whose rounds take a second of a clock of its own. One of its workers has a slow data loader.

    Attributes:
        membership: the scheduler's machine.
        exports: the scheduler's exports.
        now: seconds on the job's clock.
    """

    def __init__(self, workers: int, servers: int, slow: int = 1, host: str = "node{}", **settings: Any) -> None:
        own = Settings(job_id="1a2b3c4d", num_workers=workers, num_servers=servers, **settings)
        self.now, self._simulated = time.monotonic(), SimulatedMembers(workers, servers, slow)
        self.membership = Membership(own, self.now, lambda: b"token")
        self.exports = Exports(own)
        for number, (role, rank) in enumerate(self._simulated.members):
            hello = self._simulated.hello(number, own.job_id, host)
            self.membership.handle(self._peer(role, rank), 1, hello, self.now)

    @staticmethod
    def _peer(role: str, rank: int) -> bytes:
        return f"{role}-{rank}".encode()

    @property
    def round(self) -> int:
        """The present round."""
        return self._simulated.round

    def turn(self) -> None:
        """Carry out a round: every member sends a heartbeat, and the tools get a picture."""
        self._simulated.round += 1
        self.now += ROUND_S
        for role, rank in self._simulated.members:
            beat = self._simulated.beat(role, rank)
            self.membership.handle(self._peer(role, rank), 1 + self.round, beat, self.now)
        self.membership.tick(self.now)
        self.exports.note(self.membership, self.now)

    def rows(self) -> list[dict[str, Any]]:
        """Return what ``paceline status`` has."""
        return JobView(self.membership.status(self.now)).as_json("")["processes"]

    def close(self) -> None:
        """End the job."""
        self.exports.close(self.membership)
