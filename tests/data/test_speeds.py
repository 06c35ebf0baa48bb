"""How speeds travel: with pushes where all workers have made one, else by a gather."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.data.speeds import Speeds
from paceline.hetero import Speed
from paceline.kvstore.dist import DistStore


class Job:
    """Two workers that take steps together; stands for their stores, sessions and traffic."""

    def __init__(self) -> None:
        self.teams = [
            Speeds(cast(DistStore, Member(self, rank)), rank, 2, max_batch=8 * rank or None) for rank in (0, 1)
        ]
        self.told: dict[int, bytes] = {}
        self.pushed: dict[int, bytes] = {}
        self.gathers = 0

    def step(self, seconds: tuple[float, float] = (0.1, 0.2), pushes: bool = True, is_last: bool = False) -> list[Any]:
        self.told, self.pushed = {}, {}
        for one in self.teams:
            one.begin_step()
        self.pushed = dict(self.told) if pushes else {}
        for one, took in zip(self.teams, seconds, strict=True):
            one.measure(10, 1, took)
        return [one.end_step([0, 1], is_last) for one in self.teams]


class Member:
    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self.traffic = self.session = self

    def tell(self, note: bytes) -> None:
        self._job.told[self._rank] = note

    def heard(self) -> dict[int, bytes]:
        return self._job.pushed

    def gather(self, name: str, note: bytes) -> list[bytes]:
        self._job.gathers += 1
        return [one._note() for one in self._job.teams]


def test_speeds_travel_with_pushes_alone() -> None:
    job = Job()
    for _ in range(12):
        job.step()
    assert job.gathers == 0
    for one in job.teams:
        assert one.known == {0: Speed(0.0, pytest.approx(0.01)), 1: Speed(0.0, pytest.approx(0.02))}
        assert one.caps == [None, 8]


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
