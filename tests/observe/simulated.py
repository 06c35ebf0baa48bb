"""Simulated jobs in which one process is slow: the accounts of their heartbeats, through the true detector. Pure.

A round is that of ``tests.observe.matrix``: a sleep, computation that waits for processors, a push and its answer.
Heartbeats come every half a second, of each process at another time, and at once after rounds that are far longer than
usual, as those of real processes.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.observe.account import (
    APPLY,
    BUSY,
    COMPUTE,
    COPY,
    DATA,
    FAULTS,
    FIGURES,
    GC,
    INTERVAL,
    QUEUED,
    RECEIVE,
    SEND,
    SERVER_PARTS,
    STALLED,
    STOPPED,
    THROTTLED,
    UPDATE,
    WAIT,
    WORKER_PARTS,
    Steps,
    in_windows,
)
from paceline.observe.detector import Detector
from paceline.observe.meter import MAX_WINDOWS
from paceline.observe.urgency import Urgency
from paceline.observe.verdicts import Verdict

WORKERS, SLOW, ONSET, BATCH, BEAT_S, TURN_S = 4, 1, 30, 32.0, 0.5, 0.1

#: By fault: role, rank and cause that are right.
RIGHT: dict[str, tuple[str, int, str]] = {
    "backward": ("worker", SLOW, "compute"),
    "loader": ("worker", SLOW, "data"),
    "quota": ("worker", SLOW, "throttled"),
    "neighbour": ("worker", SLOW, "busy"),
    "memory": ("worker", SLOW, "memory"),
    "gc": ("worker", SLOW, "gc"),
    "stops": ("worker", SLOW, "stopped"),
    "link": ("worker", SLOW, "link"),
    "delay": ("worker", SLOW, "link"),
    "server": ("server", 0, "throttled"),
    "placement": ("server", 0, "apply"),
}

#: Seconds by which the push and the answer of the slow worker take longer.
_WAY_S = {"link": (0.03, 0.03), "delay": (0.04, 0.04)}

#: Seconds that a server needs for a round, and whether its quota is the reason.
_SERVER_S = {"server": (0.1, True), "placement": (0.1, False)}
_USUAL_SERVER_S = 0.002


@dataclass(frozen=True)
class Scene:
    """What a job is like.

    Attributes:
        fault: one of :data:`RIGHT`, or ``none``.
        jitter: standard deviation of the logarithm of computation.
        groups: workers step in two groups; otherwise all together.
        shares: half of the workers are half as fast, and have half of the samples: all take as long.
        queue: seconds that computation waits for processors, as a multiple of it.
    """

    fault: str
    jitter: float = 0.0
    groups: bool = False
    shares: bool = False
    queue: float = 0.5


@dataclass
class _Process:
    """What a process has told, and what it has not."""

    rank: int
    phase_s: float
    role: str = "worker"
    rounds: list[tuple[float, float, Steps, list[float]]] = field(default_factory=list)
    """Begin, end, account, and figures of the host."""
    told: int = 0
    beat_s: float = 0.0
    """Time of its last heartbeat."""
    urgent: list[float] = field(default_factory=list)
    """Times of heartbeats beside the regular ones."""
    urgency: Urgency = field(default_factory=lambda: Urgency(3))


class Simulation:
    """A job.

    Args:
        scene: what it is like.
        seed: of the random numbers.
    """

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.chance = scene, random.Random(f"{scene} {seed}")
        self.detector = Detector()
        self.said: list[tuple[int, Verdict]] = []
        """Rounds that the slow worker has begun when a verdict was made, and the verdict."""
        self.late: list[tuple[float, float, float]] = []
        self.workers = [_Process(rank, self.chance.random() * BEAT_S) for rank in range(WORKERS)]
        self.servers = [
            _Process(rank, self.chance.random() * BEAT_S, "server", urgency=Urgency(2)) for rank in range(2)
        ]
        self.onset_s = 0.0

    def run(self, rounds: int) -> list[tuple[int, Verdict]]:
        """Return the verdicts of so many rounds, with the rounds from the onset to each."""
        for ranks in [[0, 1], [2, 3]] if self.scene.groups else [list(range(WORKERS))]:
            self._run_group(ranks, rounds)
        end_s = min(one.rounds[-1][1] for one in self.workers)
        self.late.sort()
        beats = []
        for index, one in enumerate((*self.workers, *self.servers)):
            beats += [(at, index, one) for at in _beats(one.phase_s, one.urgent, end_s)]
        for now, _, one in sorted(beats, key=lambda beat: beat[:2]):
            found = self._worker_beat(one, now) if one.role == "worker" else self._server_beat(one, now)
            if found:
                done = sum(end <= now for _, end, _, _ in self.workers[SLOW].rounds)
                self.said += [(1 + done - ONSET, verdict) for verdict in found]
        return self.said

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def _run_group(self, ranks: Sequence[int], rounds: int) -> None:
        pushed = [0.01 * self.chance.random() for _ in ranks]
        for number in range(1, rounds):
            is_on = number >= ONSET
            way = [self._way_s(rank, is_on) for rank in ranks]
            arrived = [at + up for at, (up, _) in zip(pushed, way, strict=True)]
            order = sorted(range(len(ranks)), key=lambda index: arrived[index])
            last_s = arrived[order[-1]]
            self.late.append((last_s, ranks[order[-1]], last_s - arrived[order[-2]]))
            took_s = _SERVER_S.get(self.scene.fault, (_USUAL_SERVER_S,))[0] if is_on else _USUAL_SERVER_S
            released = last_s + took_s
            for server in self.servers:
                busy_s = took_s if server.rank == 0 else _USUAL_SERVER_S
                if server.urgency.note(released, busy_s, self.late[-1][2]):
                    server.urgent.append(released)
            if SLOW in ranks and number == ONSET:
                self.onset_s = released
            for index, rank in enumerate(ranks):
                parts, figures, samples = self._own(rank, number, released)
                parts[WAIT] = released + way[index][1] - pushed[index]
                begin, pushed[index] = pushed[index], pushed[index] + sum(parts)
                steps = Steps(number, 1, samples, parts, sum(way[index]))
                one = self.workers[rank]
                one.rounds.append((begin, pushed[index], steps, figures))
                if one.urgency.note(pushed[index], steps.wall_s, steps.way_s, parts[GC]):
                    one.urgent.append(pushed[index])

    def _noise(self) -> float:
        return self.chance.lognormvariate(0, self.scene.jitter) if self.scene.jitter else 1.0

    def _way_s(self, rank: int, is_on: bool) -> tuple[float, float]:
        more = _WAY_S.get(self.scene.fault, (0.0, 0.0)) if is_on and rank == SLOW else (0.0, 0.0)
        up, down = (0.001 * self.chance.lognormvariate(0, 0.5) + one for one in more)
        return up, down

    def _own(self, rank: int, number: int, now: float) -> tuple[list[float], list[float], float]:
        """Return the parts, the figures and the samples of a round."""
        longer, fault = self._noise(), self.scene.fault if number >= ONSET and rank == SLOW else ""
        share = (2 if rank % 2 else 1) / 1.5 if self.scene.shares else 1.0
        busy_s = 0.02 * longer
        queued_s = busy_s * self.scene.queue * self.chance.expovariate(1) + (8 * busy_s if fault == "neighbour" else 0)
        parts, figures = [0.0] * len(WORKER_PARTS), [0.0] * len(FIGURES)
        for part, usual in ((DATA, 0.0025), (SEND, 0.0006), (COPY, 0.0001), (UPDATE, 0.001)):
            parts[part] = usual * self.chance.lognormvariate(0, 0.2)
        parts[COMPUTE] = 0.05 * longer + busy_s + queued_s
        figures[BUSY], figures[QUEUED] = busy_s, queued_s
        if fault == "backward":
            parts[COMPUTE] += 0.2
        elif fault == "loader":
            parts[DATA] += 0.15
        elif fault == "quota":
            parts[COMPUTE] += 0.08
            figures[THROTTLED] = 0.08
        elif fault == "memory":
            parts[COMPUTE] += 0.15 * self._noise()
            figures[FAULTS], figures[STALLED] = 40e-6, 0.08
        elif fault == "gc" and number % 10 == 0:
            parts[GC] = 0.1
        elif fault == "stops" and int(now / 3) != int((now + sum(parts) + 0.005) / 3):
            parts[COMPUTE] += 1.0
            figures[STOPPED] = 0.95
        return parts, figures, BATCH * share

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def _worker_beat(self, one: _Process, now: float) -> list[Verdict]:
        first = one.told
        while one.told < len(one.rounds) and one.rounds[one.told][1] <= now:
            one.told += 1
        done = [steps for _, _, steps, _ in one.rounds[first : one.told]]
        figures = [round(1e6 * amount) for amount in self._figures(one, first, one.beat_s, now)]
        figures[INTERVAL], one.beat_s = round(1e6 * (now - one.beat_s)), now
        group = 1 + one.rank // 2 if self.scene.groups else 0
        return self.detector.note_worker(one.rank, f"node{one.rank}", in_windows(done, MAX_WINDOWS), figures, group)

    def _figures(self, one: _Process, first: int, start: float, stop: float) -> list[float]:
        """Return the figures of the time between, those of each round from the first one on as far as it is in it."""
        sums = [0.0] * len(FIGURES)
        for begin, end, steps, figures in one.rounds[first : one.told + 1]:
            waited = begin + steps.seconds[WAIT]
            inside = max(0.0, min(end, stop) - max(waited, start)) / (end - waited)
            if inside:
                sums = [had + inside * more for had, more in zip(sums, figures, strict=True)]
        return sums

    def _server_beat(self, one: _Process, now: float) -> list[Verdict]:
        since_s, one.beat_s = now - one.beat_s, now
        first, stop = (bisect_right(self.late, (at, math.inf, 0.0)) for at in (now - since_s, now))
        told = self.late[first:stop]
        late = [
            (rank, len(times), sum(times))
            for rank in range(WORKERS)
            if (times := [late_s for _, who, late_s in told if who == rank])
        ]
        self.detector.note_late(late if one.rank == 0 else [])
        figures = [0] * len(FIGURES)
        figures[INTERVAL] = round(1e6 * since_s)
        is_slow = now > self.onset_s and one.rank == 0 and self.scene.fault in _SERVER_S
        took_s, is_short = _SERVER_S[self.scene.fault] if is_slow else (_USUAL_SERVER_S, False)
        busy = min(0.95, len(told) * took_s / since_s)
        figures[THROTTLED] = round(1e6 * since_s * busy) if is_short else 0
        parts = [0.0] * len(SERVER_PARTS)
        parts[APPLY], parts[RECEIVE] = TURN_S * busy, TURN_S * (1 - busy)
        return self.detector.note_server(one.rank, f"node{one.rank}", [parts] * round(since_s / TURN_S), figures)


def _beats(phase_s: float, urgent: Sequence[float], end_s: float) -> Iterator[float]:
    """Yield the times of a process's heartbeats: each is half a second after the last one, or an urgent one."""
    now, waiting = phase_s, sorted(urgent)
    while now < end_s:
        yield now
        while waiting and waiting[0] <= now:
            waiting.pop(0)
        now = min([now + BEAT_S, *waiting[:1]])


def scenes(faults: Sequence[str], queue: float = 0.5) -> Iterator[Scene]:
    """Return every fault with every noise, in lock step and in groups, with equal and with measured shares."""
    for fault in faults:
        for jitter in (0.0, 0.1, 0.3):
            for groups in (False, True):
                for shares in (False, True):
                    yield Scene(fault, jitter, groups, shares, queue)


def outcome(scene: Scene, said: Sequence[tuple[int, Verdict]]) -> tuple[str, int]:
    """Return ``right``, ``wrong`` or ``silent``, and the rounds from the onset to the first verdict."""
    if not said:
        return ("right" if scene.fault == "none" else "silent"), 0
    after, first = said[0]
    is_right = (first.role, first.rank, first.cause) == RIGHT.get(scene.fault) and after > 0
    return ("right" if is_right else "wrong"), after
