"""Groups by measured speed, and when they change."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from paceline.hetero import Groups, Regrouping, SpeedMeter, group_by_speed


def labels(groups: Groups) -> list[int]:
    table = {worker: number for number, group in enumerate(groups) for worker in group}
    return [table[worker] for worker in sorted(table)]


def measured(truth: list[float], rng: np.random.Generator, steps: int = 25) -> list[float]:
    """Measure every worker over a window of steps, each with 10 % of noise."""
    times = []
    for one in truth:
        meter = SpeedMeter()
        for _ in range(steps):
            meter.add(1, one * float(rng.lognormal(0, 0.1)))
        speed = meter.speed()
        assert speed is not None
        times.append(speed.seconds(1))
    return times


def random_cluster(rng: np.random.Generator) -> tuple[list[float], list[int]]:
    """Two to five classes of one to eight machines; a class takes 1.4 to 3 times as long as the one before it."""
    time, truth, classes = 0.1, [], []
    for number in range(int(rng.integers(2, 6))):
        size = int(rng.integers(1, 9))
        truth += [time] * size
        classes += [number] * size
        time *= float(rng.uniform(1.4, 3))
    order = rng.permutation(len(truth))
    return [truth[i] for i in order], [classes[i] for i in order]


def test_random_clusters_are_found() -> None:
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(80):
        truth, classes = random_cluster(rng)
        scores.append(adjusted_rand_score(classes, labels(group_by_speed(measured(truth, rng)))))
    assert np.mean(scores) >= 0.95
    assert np.mean(np.array(scores) >= 0.95) >= 0.95


def test_machines_that_are_alike_are_one_group() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        size = int(rng.integers(1, 20))
        assert group_by_speed(measured([0.1] * size, rng)) == (tuple(range(size)),)


def test_identical_times_need_no_noise() -> None:
    assert group_by_speed([0.3, 0.15, 0.15, 0.6, 0.3, 0.6]) == ((1, 2), (0, 4), (3, 5))
    assert group_by_speed([1.0, 2.0]) == ((0,), (1,))
    assert group_by_speed([4.0, 2.0, 1.0]) == ((2,), (1,), (0,))
    assert group_by_speed([1.0]) == ((0,),)


def test_lone_straggler_is_a_group() -> None:
    assert group_by_speed([1.0] * 11 + [8.0]) == (tuple(range(11)), (11,))


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, math.nan], [math.inf]])
def test_times_that_are_no_times_are_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be grouped"):
        group_by_speed(times)


def test_lack_of_scikit_learn_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"pip install 'paceline\[hetero\]'"):
        group_by_speed([1.0, 2.0])


# ---- drift -----------------------------------------------------------------------------------------------------------


class Machines:
    """Workers measured round by round; groups are checked every five rounds."""

    def __init__(self, truth: list[float], seed: int) -> None:
        self.truth, self.rng = truth, np.random.default_rng(seed)
        self.meters = [SpeedMeter() for _ in truth]
        self.rounds(25)
        self.regrouping = Regrouping(group_by_speed(self.times()))

    def times(self) -> list[float]:
        return [meter.speed().seconds(1) for meter in self.meters]  # type: ignore[union-attr]

    def rounds(self, count: int) -> None:
        for meter, one in zip(self.meters, self.truth, strict=True):
            for noise in self.rng.lognormal(0, 0.1, count):
                meter.add(1, one * float(noise))

    def check(self) -> bool:
        self.rounds(5)
        return self.regrouping.check_speeds(dict(enumerate(self.times())))


@pytest.mark.parametrize("seed", range(10))
def test_worker_that_becomes_slower_changes_its_group_within_fifty_rounds(seed: int) -> None:
    machines = Machines([0.1] * 4 + [0.2] * 4 + [0.4] * 4, seed)
    assert machines.regrouping.groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    machines.truth[1] = 0.4
    checks = next(number for number in range(1, 50) if machines.check())
    assert checks * 5 <= 50
    assert machines.regrouping.groups == ((0, 2, 3), (4, 5, 6, 7), (1, 8, 9, 10, 11))


def test_groups_that_become_alike_are_joined() -> None:
    machines = Machines([0.1] * 3 + [0.2] * 3, 0)
    machines.truth[3:] = [0.1] * 3
    assert any(machines.check() for _ in range(10))
    assert machines.regrouping.groups == ((0, 1, 2, 3, 4, 5),)


@pytest.mark.parametrize(("truth", "checks"), [([0.1] * 12, 2000), ([0.1] * 4 + [0.2] * 4 + [0.4] * 4, 400)])
def test_steady_machines_are_left_alone(truth: list[float], checks: int) -> None:
    """No false alarm in 10,000 and 2,000 rounds."""
    machines = Machines(truth, 1)
    assert not any(machines.check() for _ in range(checks))


def test_one_check_is_not_enough() -> None:
    regrouping = Regrouping(((0, 1, 2),))
    assert not regrouping.check_speeds({0: 1, 1: 1, 2: 2})
    assert not regrouping.check_speeds({0: 1, 1: 1, 2: 1})
    assert not regrouping.check_speeds({0: 1, 1: 1, 2: 2})
    assert not regrouping.check_speeds({0: 2, 1: 1, 2: 1})
    assert regrouping.check_speeds({0: 2, 1: 1, 2: 1})
    assert regrouping.groups == ((1, 2), (0,))


def test_group_of_a_dead_worker_shrinks() -> None:
    regrouping = Regrouping(((0, 1), (2,), (3,)))
    regrouping.leave(2)
    regrouping.leave(0)
    assert regrouping.groups == ((1,), (3,))
    assert not regrouping.check_speeds({1: 1.0, 3: 2.0})
