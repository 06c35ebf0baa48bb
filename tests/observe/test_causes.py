"""Which worker and which cause, where several figures grow at once: busy hosts, and workers that wait for others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.observe.account import BUSY, COMPUTE, FIGURES, GC, INTERVAL, OTHER, QUEUED, WAIT, WORKER_PARTS, Steps
from paceline.observe.detector import Detector
from paceline.observe.verdicts import Verdict

SLOW, ONSET, BATCH = 1, 12, 32.0

#: Seconds of a usual round in which a worker sleeps, and in which it computes.
SLEEP_S, COMPUTE_S = 0.01, 0.003


def figures_of(wall_s: float, busy_s: float = 0.0, queued_s: float = 0.0) -> list[int]:
    figures = [0] * len(FIGURES)
    for figure, seconds in ((INTERVAL, wall_s), (BUSY, busy_s), (QUEUED, queued_s)):
        figures[figure] = round(1e6 * seconds)
    return figures


class BusyHost:
    """Workers in lock step on one host: whoever computes waits for a processor many times as long.

    A heartbeat has three rounds, and figures of all of them together.

    Args:
        load: that multiple.
        seed: of the random numbers.
    """

    def __init__(self, load: float, seed: int, workers: int = 3) -> None:
        self.chance, self.load = random.Random(seed), load
        self.detector, self.said = Detector(), list[Verdict]()
        self.windows: list[list[Steps]] = [[] for _ in range(workers)]
        self.times = [[0.0, 0.0, 0.0] for _ in range(workers)]
        """Of each worker since its last heartbeat: all, on a processor, waiting for one."""

    def queue_s(self, busy_s: float) -> float:
        return busy_s * self.load * self.chance.expovariate(1)

    def step(self, round: int, part: int = COMPUTE, sleep_s: float = 0.0, busy_s: float = 0.0) -> None:
        """Let all workers do a round; the slow one sleeps and computes longer in a part of it."""
        told = []
        for worker, times in enumerate(self.times):
            parts, more_s = [0.0] * len(WORKER_PARTS), busy_s if worker == SLOW else 0.0
            usual_s, longer_s = self.queue_s(COMPUTE_S), self.queue_s(more_s)
            parts[OTHER], parts[COMPUTE] = SLEEP_S, COMPUTE_S + usual_s
            parts[part] += more_s + longer_s + (sleep_s if worker == SLOW else 0.0)
            times[1] += COMPUTE_S + more_s
            times[2] += usual_s + longer_s
            told.append(parts)
        came = sorted(range(len(told)), key=lambda worker: sum(told[worker]))
        whole_s = sum(told[came[-1]]) + 0.005
        self.detector.note_late([(came[-1], 1, whole_s - 0.005 - sum(told[came[-2]]))])
        for worker, parts in enumerate(told):
            parts[WAIT] = whole_s - sum(parts)
            self.times[worker][0] += whole_s
            self.windows[worker].append(Steps(round, 1, BATCH, parts))
            if round % 3 == 2:
                windows, figures = self.windows[worker], figures_of(*self.times[worker])
                self.said += self.detector.note_worker(worker, "node", windows, figures)
                self.windows[worker], self.times[worker] = [], [0.0, 0.0, 0.0]

    @property
    def names(self) -> list[tuple[int, str]]:
        return [(one.rank, one.cause) for one in self.said]


@pytest.mark.parametrize("load", [0.0, 5.0, 10.0])
def test_collections_are_the_cause_although_most_of_their_time_is_waiting_for_a_processor(load: float) -> None:
    for seed in range(20):
        host = BusyHost(load, seed)
        for round in range(1, 60):
            if round >= ONSET and round % 3 == 0:
                host.step(round, GC, 0.1, 0.15)
            else:
                host.step(round)
        assert host.names == [(SLOW, "gc")]
        assert ONSET <= host.said[0].round <= ONSET + 9


@pytest.mark.parametrize("load", [5.0, 10.0])
def test_more_computation_is_the_cause_and_not_the_queue_that_it_waits_in(load: float) -> None:
    for seed in range(20):
        host = BusyHost(load, seed)
        for round in range(1, 120):
            host.step(round, COMPUTE, 0.0, 0.02 if round >= ONSET else 0.0)
        assert set(host.names) <= {(SLOW, "compute"), (SLOW, "")}
        assert host.names


@pytest.mark.parametrize("load", [5.0, 10.0, 30.0])
def test_nobody_is_named_for_a_queue_that_all_wait_in(load: float) -> None:
    for seed in range(10):
        host = BusyHost(load, seed)
        for round in range(1, 200):
            host.step(round)
        assert host.names == []


def test_worker_whose_heartbeat_is_the_first_one_of_a_slow_time_is_not_named() -> None:
    detector, said = Detector(), []
    for beat in range(20):
        for worker in range(3):
            parts = [0.0] * len(WORKER_PARTS)
            parts[COMPUTE] = 0.4 if beat >= 10 else 0.05
            windows = [Steps(1 + 8 * beat + index, 1, BATCH, parts) for index in range(8)]
            said += detector.note_worker(worker, "node", windows, figures_of(8 * parts[COMPUTE]))
    assert said == []


def ahead(own_s: Sequence[float], link_s: Sequence[float], rounds: int, bound: int) -> list[list[tuple[float, float]]]:
    """Return the end of each round and its wait, by worker; none is further ahead of the slowest than the bound.

    Args:
        own_s: seconds of a round without waits, by worker.
        link_s: seconds of an exchange, by worker.
        rounds: how many.
        bound: rounds that a worker may be ahead.
    """
    pushed = [[0.0] * len(own_s)]
    found: list[list[tuple[float, float]]] = [[] for _ in own_s]
    now = [0.0] * len(own_s)
    for round in range(1, rounds + 1):
        before = now
        pushed.append([now[worker] + own_s[worker] + link_s[worker] for worker in range(len(own_s))])
        slowest = max(pushed[max(0, round - bound)])
        now = [max(one, slowest) for one in pushed[round]]
        for worker in range(len(own_s)):
            found[worker].append((now[worker], now[worker] - before[worker] - own_s[worker]))
    return found


def heard(
    own_s: Sequence[float], link_s: Sequence[float], bound: int, rounds: int = 200, before: int = 10
) -> list[tuple[int, str]]:
    """Return the verdicts about workers of which no server has told who waits for whom; one heartbeat each 0.5 s."""
    usual = ahead([0.05] * len(own_s), [0.005] * len(own_s), before, bound)
    start = max(one[-1][0] for one in usual)
    then = ahead(own_s, link_s, rounds, bound)
    detector, said = Detector(), []
    done = [0] * len(own_s)
    every = [one + [(start + end, wait) for end, wait in two] for one, two in zip(usual, then, strict=True)]
    for beat in range(1, int(2 * max(one[-1][0] for one in every)) + 2):
        for worker, times in enumerate(every):
            first = done[worker]
            while done[worker] < len(times) and times[done[worker]][0] <= 0.5 * beat + 0.1 * worker:
                done[worker] += 1
            windows = []
            for index in range(first, done[worker]):
                parts = [0.0] * len(WORKER_PARTS)
                parts[COMPUTE], parts[WAIT] = 0.05 if index < before else own_s[worker], times[index][1]
                windows.append(Steps(index + 1, 1, BATCH, parts))
            said += detector.note_worker(worker, f"node{worker}", windows, figures_of(0.5))
    return [(one.rank, one.cause) for one in said]


@pytest.mark.parametrize("bound", [0, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_fast_workers_that_wait_for_the_slow_one_have_no_slow_link(bound: int, workers: int, slow: int) -> None:
    own_s = [0.25 if worker == slow else 0.05 for worker in range(workers)]
    assert heard(own_s, [0.005] * workers, bound) == [(slow, "compute")]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_slow_link_is_told_where_nobody_waits_for_others(workers: int) -> None:
    link_s = [0.2 if worker == SLOW else 0.005 for worker in range(workers)]
    assert heard([0.05] * workers, link_s, bound=1000) == [(SLOW, "link")]


@pytest.mark.parametrize("bound", [0, 3])
def test_no_other_worker_is_blamed_for_a_slow_link(bound: int) -> None:
    """Before a server tells who came last, rounds of workers that wait for each other are all as long."""
    for workers in (2, 3, 4):
        link_s = [0.2 if worker == SLOW else 0.005 for worker in range(workers)]
        assert {rank for rank, _ in heard([0.05] * workers, link_s, bound)} <= {SLOW}
