from __future__ import annotations

import pytest

from paceline.launch import JobPlan, Late, ProcessSpec


def process(role: str, rank: int) -> ProcessSpec:
    return ProcessSpec(role, rank, ("true",), {"KEY": Late.JOB_KEY, "NAME": "x"})


def test_late_values_are_filled_in() -> None:
    assert process("worker", 0).environment({Late.JOB_KEY: "secret"}) == {"KEY": "secret", "NAME": "x"}


def test_late_value_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        process("worker", 0).environment({})


def test_plan_knows_which_late_values_it_needs() -> None:
    plan = JobPlan((process("worker", 0),))
    assert plan.needs(Late.JOB_KEY)
    assert not plan.needs(Late.MASTER_PORT)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([("server", 0)], "at least one worker"),
        ([("scheduler", 0), ("scheduler", 1), ("worker", 0)], "one scheduler, not 2"),
        ([("worker", 0), ("worker", 0)], "worker 0 is in the plan 2 times"),
    ],
)
def test_impossible_plan_is_refused(processes: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobPlan(tuple(process(*one) for one in processes))
