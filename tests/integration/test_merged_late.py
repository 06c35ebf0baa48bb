"""Gradients that are merged in ``step``: what a loop did to them before concerned this worker's own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer
from paceline.errors import PacelineError
from paceline.testing import LocalJob
from paceline.testing.one_process import OneProcess

LINE = "gradients were changed before they were merged"


def train(clips: bool, passes: int, update: Literal["worker", "server"]) -> int:
    """Accumulate 4 passes in a step and then, twice, fewer; returns how many steps were made."""
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(
        inner, "dist_sync", model=model, samples=2, backward_passes_per_step=4, update=update
    )
    for count in (4, passes, passes):
        for _ in range(count):
            model(torch.ones(2, 4)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.round


@pytest.mark.parametrize(
    ("clips", "passes", "update", "lines"),
    [
        (True, 3, "worker", 1),
        (True, 4, "worker", 0),
        (False, 3, "worker", 0),
        (True, 4, "server", 1),
        (False, 3, "server", 0),
    ],
)
def test_gradients_clipped_before_they_are_merged_are_named_once(
    clips: bool, passes: int, update: Literal["worker", "server"], lines: int
) -> None:
    with LocalJob(2, 1) as job:
        assert job.run(train, clips, passes, update) == [3, 3]
        assert [worker.output.count(LINE) for worker in job.workers] == [lines, lines]


def test_gradient_that_two_optimizers_would_sum_is_refused() -> None:
    [store] = OneProcess("a").stores()
    model = nn.Linear(4, 1)
    first, _second = (
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), one, model=model, reduction="sum")
        for one in (store, store.sibling("other"))
    )
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(PacelineError, match=r"parameter 'weight' has a later DistributedOptimizer.* summed twice"):
        first.step()
