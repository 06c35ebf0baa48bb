from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from paceline.errors import NonFiniteError
from paceline.kvstore import create
from paceline.optim import DistributedOptimizer
from tests.hvd.ranks import run as run_ranks

LARGE = 2e38
"""Finite, but the sum of two is not."""


def train(options: dict[str, Any], *odd: list[float]) -> tuple[int, str, int]:
    """Step with gradients of ones, and then with an odd one per worker; returns steps, the error and skipped steps."""
    rank = create("allreduce").rank
    rate = math.nextafter(0.1, rank)  # as on machines that are not alike
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(model.parameters(), lr=rate, fused=rank == 1)
    optimizer = DistributedOptimizer(inner, "allreduce", model=model, **options)
    for step, values in enumerate([[1.0, 1.0], *odd]):
        optimizer.samples = 4
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            param.grad = torch.full_like(param, values[rank] if name == "0.weight" else 1.0)
        try:
            optimizer.step()
        except NonFiniteError as error:
            return step, str(error), optimizer.skipped_steps
    return 1 + len(odd), "", optimizer.skipped_steps


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_worker_whose_gradient_is_not_finite_is_named_on_all(bad: float) -> None:
    for rank, (steps, error, _) in enumerate(run_ranks(train, 2, {}, [LARGE / 4, 1.0], [1.0, bad])):
        assert steps == 2
        assert re.match(rf"worker {rank}: the merged gradient of '0\.weight' is NaN or Inf in round 3: ", error)
        assert "worker 1 pushed that of '0.weight'; " in error


def test_sum_of_finite_gradients_may_be_too_large() -> None:
    for steps, error, _ in run_ranks(train, 2, {"reduction": "sum"}, [LARGE, LARGE]):
        assert steps == 1
        assert "'0.weight' is NaN or Inf in round 2: the sum of finite gradients is too large" in error


def test_steps_with_gradients_that_are_not_finite_are_skipped_by_all() -> None:
    assert run_ranks(train, 2, {"on_nan": "skip"}, [float("nan"), 1.0], [1.0, 1.0]) == [[3, "", 1]] * 2


def sparse_steps() -> list[list[float]]:
    """Step by SparseAdam on rows of a table that is in no module; worker 1 has no gradient in the second step."""
    rank = create("allreduce").rank
    table = torch.nn.Parameter(torch.ones(4, 1))
    inner = torch.optim.SparseAdam([table], lr=0.5)
    optimizer = DistributedOptimizer(inner, "allreduce", named_parameters=[("table", table)], samples=4)
    for step in range(2):
        optimizer.zero_grad()
        if (step, rank) != (1, 1):
            torch.nn.functional.embedding(torch.tensor([rank, 3]), table, sparse=True).sum().backward()
        optimizer.step()
    return table.tolist()


def test_worker_without_a_gradient_of_rows_steps_with_the_others() -> None:
    first, second = run_ranks(sparse_steps, 2)
    assert first == second
    assert first[2] == [1.0]
    assert first[0] != first[1]
