"""Where samplers go on: a state of a pool for shares, and the other way round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.sampler import epoch_order
from paceline.data.states import left_of, place_of
from tests.data.test_shares import samplers

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
