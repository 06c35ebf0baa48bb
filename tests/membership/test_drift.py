"""The scheduler compares measured speeds with the groups, and says which groups fit."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from paceline.config import Settings
from paceline.membership.following import Drift
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m


def drift(**options: object) -> Drift:
    given = {"groups": "0 1; 2 3;", "regroup_rounds": 5} | options
    return Drift(dataclasses.replace(Settings(), **given))  # type: ignore[arg-type]


def roster(*seconds: float) -> list[MemberRecord]:
    return [
        MemberRecord(m.Member("worker", rank, 0, "host", "id", 1, "", b""), b"", 0.0, 0, round=20, usual_s=one)
        for rank, one in enumerate(seconds)
    ]


def checks(one: Drift, workers: list[MemberRecord], count: int) -> list[str]:
    """Let all workers make five rounds before each check; returns what was said."""
    said = []
    for _ in range(count):
        for worker in workers:
            worker.round += 5
        said.append(one.check(workers))
        assert one.check(workers) == "", "only once in five rounds"
    return said


def test_new_groups_have_the_next_generation() -> None:
    one, workers = drift(), roster(1, 1, 2, 2)
    assert checks(one, workers, 3) == ["", "", ""]
    assert (one.generation, one.groups) == (0, [])
    workers[1].usual_s, workers[2].usual_s = 2, 1
    first, second = checks(one, workers, 2)
    assert first == ""
    assert second.endswith("groups from now on: 0 2, 1 3")
    assert (one.generation, one.groups) == (1, [[0, 2], [1, 3]])


def test_nothing_is_compared_before_all_are_measured() -> None:
    one = drift()
    assert checks(one, roster(1, 2, 1, 0.0), 5) == [""] * 5


def test_dead_worker_is_left_out() -> None:
    one, workers = drift(), roster(1, 2, 1, 2)
    workers[2].dead = True
    assert any(checks(one, workers, 2))
    assert one.groups == [[0], [1, 3]]


def test_lack_of_scikit_learn_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    one, workers = drift(), roster(1, 2, 1, 2)
    assert "pip install 'paceline[hetero]'" in one.check(workers)
    assert checks(one, workers, 5) == [""] * 5


@pytest.mark.parametrize(
    "options", [{"regroup_rounds": 0}, {"groups": "fast; slow;"}, {"groups": ""}, {"staleness": 2}]
)
def test_groups_stay_where_they_cannot_change(options: dict[str, object]) -> None:
    one = drift(**options)
    assert checks(one, roster(1, 2, 1, 2), 5) == [""] * 5
    assert one.generation == 0
