"""Loops that step another optimizer than the DistributedOptimizer, where servers step: none trains alone unsaid."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.errors import PacelineError
from paceline.testing import LocalJob

LINE = "trains alone. Call step() of the DistributedOptimizer"


def train(store_type: str, stepped: str, steps: int, passes: int = 1) -> str:
    """Train with the optimizer that was wrapped, another one, or the right one; returns the error, if there is one."""
    store = kvstore.create(store_type)
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(inner, store, model=model, samples=2, update="server")
    steppers = {"wrapped": inner, "another": torch.optim.SGD(model.parameters(), lr=0.01), "right": optimizer}
    try:
        for _ in range(steps):
            for _ in range(passes):
                model(torch.ones(2, 4)).square().mean().backward()
            steppers[stepped].step()
            steppers[stepped].zero_grad()
    except PacelineError as error:
        return str(error)
    finally:
        store.barrier()
    return ""


@pytest.mark.parametrize("store_type", ["dist_async", "dist_sync"])
def test_a_step_of_the_wrapped_optimizer_is_an_error_that_names_the_right_one(store_type: str) -> None:
    with LocalJob(2, 1) as job:
        for rank, text in enumerate(job.run(train, store_type, "wrapped", 1)):
            assert text.startswith(f"worker {rank}: SGD.step() of the wrapped optimizer would train this worker alone")
            assert "call step() of the DistributedOptimizer" in text


def test_another_optimizer_of_the_same_parameters_is_named_once() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(train, "dist_async", "another", 80) == [""]
        assert job.workers[0].output.count(LINE) == 1


def test_many_backward_passes_before_each_step_are_no_news() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(train, "dist_async", "right", 2, 40) == [""]
        assert LINE not in job.workers[0].output


def test_an_optimizer_that_was_closed_or_wrapped_again_steps_freely() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(wrap_again) == [2]


def wrap_again() -> int:
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    DistributedOptimizer(inner, "dist_async", model=model, samples=2)
    again = DistributedOptimizer(inner, "dist_sync", model=model, samples=2)
    closed = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        again.step()
    again.close()
    DistributedOptimizer(closed, "dist_async", model=model, samples=2).close()
    model(torch.ones(2, 4)).square().mean().backward()
    closed.step()
    return again.round
