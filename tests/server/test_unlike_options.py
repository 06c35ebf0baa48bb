"""Workers whose schedules differ are named, in stores where an update has the options of its own push."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable

import pytest
import torch

from paceline.consistency import Policy
from paceline.server.own import UnlikeOptions
from paceline.testing.one_process import OneProcess
from paceline.updaters import StepOptions


def said(pushes: Iterable[tuple[int, int]], rate_of: Callable[[int, int], float]) -> list[str]:
    """Return what is said of (worker, round) pushes; ``rate_of`` gives their learning rates."""
    watch, made = UnlikeOptions(), dict[float, StepOptions]()
    found = []
    for worker, round in pushes:
        rate = rate_of(worker, round)
        found.append(watch.note(worker, round, made.setdefault(rate, StepOptions([{"lr": rate}]))))
    return [one for one in found if one]


def turns(*paces: int, times: int = 40) -> list[tuple[int, int]]:
    """Return the pushes of workers, each of which makes so many rounds per turn."""
    return [
        (worker, turn * pace + one + 1)
        for turn in range(times)
        for worker, pace in enumerate(paces)
        for one in range(pace)
    ]


@pytest.mark.parametrize("paces", [(1, 1), (3, 1), (1, 3), (1, 1, 2)])
@pytest.mark.parametrize("every", [1, 10, 1000])
def test_one_schedule_on_all_workers_is_fine(paces: tuple[int, ...], every: int) -> None:
    assert not said(turns(*paces), lambda worker, round: 0.9 ** (round // every))


@pytest.mark.parametrize("paces", [(10, 1), (1, 10)])
def test_epochs_that_end_at_the_same_time_are_fine(paces: tuple[int, int]) -> None:
    """A pool deals an epoch's samples: the fast worker makes more rounds of it, and the slow one ends a round later."""
    slow = paces.index(1)

    def rate_of(worker: int, round: int) -> float:
        return 0.1 ** ((round - 1) // 10 if worker == slow else (round - 1 + 10) // 100)

    assert not said(turns(*paces), rate_of)


@pytest.mark.parametrize("paces", [(1, 1), (3, 1), (1, 3), (1, 1, 2)])
@pytest.mark.parametrize("every", [1, 10])
def test_a_schedule_on_worker_0_only_is_named(paces: tuple[int, ...], every: int) -> None:
    found = said(turns(*paces), lambda worker, round: 0.1 if worker else 0.1 * 0.5 ** (round // every))
    assert re.fullmatch(r"lr of param group 0 is \S+ on worker \d and \S+ on worker \d in round \d+", found[0])


def test_pushes_that_come_again_and_old_rounds_say_nothing() -> None:
    """Worker 1 has pushed more often than changes are kept, before worker 0 begins."""
    many = [(1, round) for round in range(1, 1500)]
    assert not said(
        [*many, *many, *((0, round) for round in range(1, 400))], lambda worker, round: float(round + worker)
    )


@pytest.mark.parametrize(
    "policy",
    [Policy(merge="each"), Policy(merge="first", first=2), Policy(merge="groups", groups=((0,), (1,)))],
    ids=str,
)
def test_two_workers_get_one_line(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    stores = OneProcess("ab").stores(policy)
    for store in stores:
        store.set_optimizer("sgd", lr=0.1)
        store.init(["a", "b"], [torch.zeros(2), torch.zeros(3)])
    with caplog.at_level(logging.WARNING, "paceline.server.own"):
        for round in range(8):
            for store in stores:
                store.optimizer.set_options([{"lr": 0.01 if store.rank == 0 and round >= 2 else 0.1}])
                store.push(["a", "b"], [torch.ones(2), torch.ones(3)])
    assert len(caplog.messages) == 1
    assert "0.01 on worker 0" in caplog.messages[0]
    assert "0.1 on worker 1" in caplog.messages[0]
    assert "call it on every worker" in caplog.messages[0]
