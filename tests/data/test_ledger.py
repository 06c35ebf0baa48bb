"""The ledger of an epoch: what workers leave over who are gone, and where samplers go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.data.ledger import DealingLog, Indices, LeftOver, epoch_order, left_of, place_of
from paceline.wire import messages as m
from paceline.worker.to_tell import ToTell
from tests.data.test_shares import samplers

#: Four workers with two samples of each global batch of 8; an epoch has 40 samples, 10 each.
WIDTHS, PART = [2, 2, 2, 2], 10


def part(worker: int, epoch: int) -> Indices:
    return np.arange(PART) + 100 * epoch + PART * worker


class Job:
    """The scheduler's answers, by worker that asks."""

    failure: Exception | None = None
    has_left = False

    def __init__(self, gone: Sequence[m.GoneWorker]) -> None:
        self.gone, self.points, self.rank, self.round = list(gone), list[str](), 0, 0
        self.to_tell = ToTell(lambda: None)

    def call_scheduler(self, body: m.AskGone, what: str) -> m.Gone:
        self.points.append(body.point)
        return m.Gone(list(self.gone))


def shares(job: Job, sides: dict[int, LeftOver], epoch: int) -> dict[int, list[int]]:
    """Return the share of each worker that is there."""
    found = {}
    for job.rank, side in sides.items():
        found[job.rank] = side.share(epoch)
    return found


def sides_of(job: Job, ranks: Sequence[int], drop_last: bool = False) -> dict[int, LeftOver]:
    log = DealingLog(job, "s", {"length": 40, "seed": 0, "shuffle": False})  # type: ignore[arg-type]
    made = {rank: LeftOver(job, "s", WIDTHS, part, log, drop_last) for rank in ranks}  # type: ignore[arg-type]
    for one in made.values():
        one.begin(5)
    return made


def test_rest_of_a_worker_that_has_given_back_is_divided_once_and_its_part_in_later_epochs() -> None:
    job = Job([])
    sides = sides_of(job, [0, 1, 3])
    assert shares(job, sides, 0) == {0: [], 1: [], 3: []}
    job.gone = [m.GoneWorker(2, 9, m.GiveBack("s", 0, 4, [7]))]
    assert shares(job, sides, 0) == {0: [24, 25, 7], 1: [26, 27, 24], 3: [28, 29, 25]}
    assert shares(job, sides, 0) == {0: [], 1: [], 3: []}
    assert job.points[::3] == ["s/0/0", "s/0/1", "s/0/2"]
    for side in sides.values():
        side.begin(5)
    found = shares(job, sides, 1)
    assert sorted(index for one in found.values() for index in one) == list(range(120, 130))
    assert max(map(len, found.values())) - min(map(len, found.values())) <= 1


def test_rest_of_an_earlier_epoch_comes_later_if_others_had_ended_that_one() -> None:
    job = Job([m.GoneWorker(3, 9, m.GiveBack("s", 0, 8))])
    sides = sides_of(job, [0, 1, 2])
    found = shares(job, sides, 1)
    assert sorted(index for one in found.values() for index in one) == [38, 39, *range(130, 140)]


def test_worker_that_has_left_in_a_later_epoch_has_left_nothing_over_yet() -> None:
    job = Job([m.GoneWorker(3, 9, m.GiveBack("s", 2, 8))])
    assert shares(job, sides_of(job, [0, 1, 2]), 1) == {0: [], 1: [], 2: []}


def test_worker_that_died_has_trained_on_a_batch_for_each_round() -> None:
    job = Job([m.GoneWorker(1, 103)])
    job.round = 100
    sides = sides_of(job, [0, 2, 3])
    assert shares(job, sides, 0) == {0: [16, 17], 2: [18], 3: [19]}
    job.round = 200
    for side in sides.values():
        side.begin(5)
    found = shares(job, sides, 1)
    assert sorted(index for one in found.values() for index in one) == list(range(110, 120))


def test_last_batch_that_is_not_whole_is_left_out_if_asked_for() -> None:
    job = Job([m.GoneWorker(1, 0)])
    found = shares(job, sides_of(job, [0, 2, 3], drop_last=True), 0)
    assert {rank: len(one) for rank, one in found.items()} == {0: 2, 2: 2, 3: 2}


def test_nobody_is_asked_after_a_failure() -> None:
    job = Job([m.GoneWorker(1, 0)])
    job.failure = RuntimeError()
    assert shares(job, sides_of(job, [0, 2, 3]), 0) == {0: [], 2: [], 3: []}
    assert not job.points


# ---- states: of a pool for shares, and the other way round -----------------------------------------------------------

SETTINGS = {"length": 60, "seed": 0, "shuffle": True}


def pooled(left: list[list[int]], epoch: int = 2) -> dict[str, Any]:
    return {"epoch": epoch, "left": left} | SETTINGS


def test_shares_go_on_where_a_pool_was_stopped_and_a_pool_where_they_are_stopped() -> None:
    left = [[10, 20], [41, 60]]
    order = epoch_order(60, 0, 2)
    team = samplers(2, 60, 12)
    for one in team:
        one.load_state_dict(pooled(left))
        one.set_epoch(2)
    walks = [iter(one) for one in team]
    seen = [index for walk in walks for index in next(walk)]
    state = json.loads(json.dumps(team[0].state_dict()))
    epoch, rest = left_of(state, SETTINGS)
    assert epoch == 2
    assert rest == ((43, 60),)
    seen += [int(order[position]) for start, stop in rest for position in range(start, stop)]
    assert sorted(seen) == sorted(int(order[position]) for start, stop in left for position in range(start, stop))


def test_whole_epoch_may_be_of_other_data() -> None:
    assert left_of(pooled([[0, 60]]), SETTINGS | {"length": 9}) == (2, ())
    assert place_of(pooled([[0, 60]]), SETTINGS | {"seed": 4}).first == 0
    (sampler,) = samplers(1, 60, 12)
    assert left_of(sampler.state_dict(), SETTINGS | {"seed": 7}) == (0, ())


def test_shares_go_on_with_another_global_batch() -> None:
    before, after = samplers(2, 60, 12), samplers(3, 60, 9)
    walks = [iter(one) for one in before]
    seen = [index for walk in walks for index in next(walk)]
    for one in after:
        one.load_state_dict(before[0].state_dict())
    seen += [index for one in after for batch in one for index in batch]
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (pooled([[0, 61]]), "the state names positions"),
        ({"epoch": 1, "position": 3}, "it has no length, .*but epoch, position"),
        (pooled([]), "the state names positions"),
        (pooled([[3, 2]]), "the state names positions"),
        (pooled([[1, 2]], epoch=-1), "of epoch -1 of 60 samples"),
        (
            pooled([[1, 2]]) | {"seed": 3},
            r"in the middle of epoch 2 with \{'seed': 3\}, this sampler has \{'seed': 0\}",
        ),
    ],
)
def test_state_that_makes_no_sense_is_refused(state: dict[str, Any], why: str) -> None:
    for load in (left_of, place_of):
        with pytest.raises(ValueError, match=why):
            load(state, SETTINGS)


def test_repeated_samples_beyond_the_data_are_refused() -> None:
    (sampler,) = samplers(1, 60, 12)
    with pytest.raises(ValueError, match="samples beyond the 60"):
        sampler.load_state_dict(sampler.state_dict() | {"again": [60]})
