"""How speeds travel: with pushes where all workers have made one, else by a gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from paceline.data.speeds import Speeds
from paceline.hetero import Shares, Speed, fastest_split, step_seconds
from paceline.kvstore.dist import DistStore


class Job:
    """Workers that take steps together; stands for their stores, sessions and traffic."""

    def __init__(self, count: int = 2) -> None:
        self.teams = [
            Speeds(cast(DistStore, Member(self, rank)), rank, count, max_batch=8 if rank == 1 and count == 2 else None)
            for rank in range(count)
        ]
        self.told: dict[int, bytes] = {}
        self.pushed: dict[int, bytes] = {}
        self.gathers = 0
        self.gone: set[int] = set()

    def step(
        self,
        seconds: Sequence[float] = (0.1, 0.2),
        pushes: bool = True,
        is_last: bool = False,
        samples: Sequence[int] = (10, 10),
    ) -> list[Any]:
        self.told, self.pushed = {}, {}
        for one in self.teams:
            one.begin_step()
        self.pushed = dict(self.told) if pushes else {}
        for one, count, took in zip(self.teams, samples, seconds, strict=True):
            one.measure(count, 1, took)
        return [one.end_step(range(len(self.teams)), is_last) for one in self.teams]


class Member:
    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self.has_joiners = job, rank, False
        self.traffic = self.session = self

    def tell(self, note: bytes) -> None:
        self._job.told[self._rank] = note

    def heard(self) -> dict[int, bytes]:
        return self._job.pushed

    def gather(self, name: str, note: bytes, *, lets_in: bool, why_shut: str) -> list[bytes]:
        assert (lets_in, why_shut) == (True, "")
        self._job.gathers += 1
        return [b"" if rank in self._job.gone else one._note() for rank, one in enumerate(self._job.teams)]


def test_speeds_travel_with_pushes_alone() -> None:
    job = Job()
    for _ in range(12):
        job.step()
    assert job.gathers == 0
    for one in job.teams:
        assert one.known == {0: Speed(0.0, pytest.approx(0.01)), 1: Speed(0.0, pytest.approx(0.02))}
        assert one.caps == [None, 8]


def test_all_gather_as_soon_as_one_of_them_hears_of_a_process_that_waits_to_join() -> None:
    job = Job()
    job.step()
    cast(Member, job.teams[1]._store).has_joiners = True
    job.step()
    assert job.gathers == 2
    assert [one.present for one in job.teams] == [{0, 1}] * 2


def test_worker_that_joins_knows_what_the_others_know_and_its_own_limit() -> None:
    job = Job()
    for _ in range(4):
        job.step()
    old, new = job.teams[0], Speeds(None, 1, 2, max_batch=5)
    new.stand(old.state())
    assert new.told == old.told
    assert (new.caps, new.state()["steps"]) == ([None, 5], 4)
    assert not new.are_exchanged


def test_change_of_speed_is_known_to_all_within_six_steps() -> None:
    job = Job()
    for _ in range(20):
        job.step()
    for _ in range(6):
        job.step((0.1, 0.4))
    assert job.teams[0].told[1].seconds(10) == pytest.approx(0.4)
    assert job.teams[0].told == job.teams[1].told


def test_steps_without_a_push_gather() -> None:
    job = Job()
    assert job.step(pushes=False) == [[], []]
    assert job.gathers == 2


def test_last_step_gathers_as_somebody_may_be_gone() -> None:
    job = Job()
    job.step()
    job.step(is_last=True)
    assert job.gathers == 2


def test_worker_that_is_missing_in_the_notes_makes_the_others_gather() -> None:
    job = Job()
    job.step()
    job.pushed = {0: job.told[0]}
    job.teams[0].end_step([0, 1], is_last=False)
    assert job.gathers == 1


def test_notes_of_unlike_steps_are_not_used() -> None:
    job = Job()
    job.teams[1].begin_step()
    job.step()
    assert job.gathers == 2


def test_nothing_is_exchanged_between_two_exchanges() -> None:
    job = Job()
    for _ in range(6):
        job.step()
    assert job.step() == [None, None]
    assert job.told == {}


def test_worker_alone_knows_itself() -> None:
    alone = Speeds(None, 0, 1, None)
    for _ in range(3):
        alone.begin_step()
        alone.measure(10, 1, 0.1)
        assert alone.end_step([0], is_last=False) is None
    assert alone.known == {0: Speed(0.0, pytest.approx(0.01))}


def test_samples_done_travel_with_pushes_and_come_once() -> None:
    job = Job()
    for one, samples in zip(job.teams, (3, 5), strict=True):
        one.begin_step()
        one.note_done(samples)
    job.pushed = dict(job.told)
    first, second = job.teams
    assert first.done() == {0: 3, 1: 5}, "at once after the push, for a state"
    for one in job.teams:
        one.end_step([0, 1], is_last=False)
    assert job.gathers == 0
    assert first.done() == {}
    assert second.done() == {0: 3, 1: 5}


def test_samples_done_of_a_worker_that_has_gone_since_its_push_are_known_from_that() -> None:
    job = Job()
    for one in job.teams:
        one.begin_step()
        one.note_done(4)
    job.pushed, job.gone = dict(job.told), {1}
    assert job.teams[0].end_step([0, 1], is_last=True) == [1]
    assert job.teams[0].done() == {0: 4, 1: 4}


def test_samples_done_come_by_a_gather_where_a_note_is_missing() -> None:
    job = Job()
    for one, samples in zip(job.teams, (3, 5), strict=True):
        one.begin_step()
        one.note_done(samples)
    job.pushed = {0: job.told[0]}
    job.teams[0].end_step([0, 1], is_last=False)
    assert job.gathers == 1
    assert job.teams[0].done() == {0: 3, 1: 5}


GLOBAL, STEADY, HALVED = 96, 200, 100


def parts_of_best(noise: float, seed: int) -> list[tuple[float, float]]:
    """Six workers whose shares follow the notes of their pushes, as those of a sampler do; no clock, no socket.

    Batches of 16 take them 60, 60, 120, 120, 240 and 240 ms, a fifth of it fixed, and twice as long the first of them
    after ``STEADY`` steps.

    Returns:
        Seconds of each step that the best whole shares take, and that these shares take, without the noise.
    """
    truth = [Speed(0.2 * seconds, 0.05 * seconds) for seconds in (0.06, 0.06, 0.12, 0.12, 0.24, 0.24)]
    job, shares, rng = Job(len(truth)), Shares(GLOBAL, [1.0] * len(truth)), np.random.default_rng(seed)
    steps = []
    for step in range(STEADY + HALVED):
        if step == STEADY:
            truth[0] = truth[0].times(2)
        samples = list(shares.samples.values())
        steps.append((step_seconds(fastest_split(GLOBAL, truth), truth), step_seconds(samples, truth)))
        took = [one.seconds(n) * float(rng.lognormal(0, noise)) for one, n in zip(truth, samples, strict=True)]
        if job.step(took, samples=samples)[0] is not None:
            shares.revise(job.teams[0].told)
    return steps


def part(steps: Sequence[tuple[float, float]]) -> float:
    best, took = (sum(column) for column in zip(*steps, strict=True))
    return best / took


def test_shares_of_workers_without_noise_become_the_best_ones() -> None:
    steps = parts_of_best(0.0, seed=0)
    assert part(steps[10:STEADY]) == pytest.approx(1.0)
    assert part(steps[STEADY + 10 :]) == pytest.approx(1.0)


def test_shares_are_near_the_best_ones_under_noise_and_after_a_worker_becomes_half_as_fast() -> None:
    runs = [parts_of_best(0.05, seed) for seed in range(8)]
    assert np.mean([part(steps[:STEADY]) for steps in runs]) >= 0.97, "with the equal shares of the first steps"
    assert min(part(steps[STEADY - 50 : STEADY + 50]) for steps in runs) >= 0.95, "with the steps that show the change"
    assert np.mean([part(steps[STEADY + 20 :]) for steps in runs]) >= 0.985
