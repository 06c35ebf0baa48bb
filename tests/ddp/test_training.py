"""The rounds of an unchanged DDP script: samples, and waits of the fast rank for the slow one."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.testing import LocalJob
from paceline.worker.current import current_session
from tests.ddp.test_backend import open_group

ROUNDS, SLOW_S = 10, 0.06


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S * dist.get_rank())
        return gradient


def train() -> list[Any]:
    open_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    model.eval().module.train()  # as Lightning's Trainer leaves it after a validation
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(ROUNDS):
        for part in (torch.ones(4, 5), torch.ones(3, 5)):
            if len(part) == 4:
                with model.no_sync():
                    model(part).sum().backward()
            else:
                model(Slow.apply(part.requires_grad_())).sum().backward()
        with torch.no_grad():
            model(torch.ones(50, 5))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    session = current_session()
    steps = session.pace.steps
    return [session.round, session.kind.is_ddp, *map(list, zip(*steps, strict=True))]


def test_rounds_samples_and_waits_of_a_ddp_script_are_in_the_account() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        fast, slow = job.run(train)
    for rounds, is_ddp, samples, *_ in (fast, slow):
        assert (rounds, is_ddp, set(samples)) == (ROUNDS, True, {7.0})
    usual = [sorted(times)[len(times) // 2] for one in (fast, slow) for times in one[3:]]
    fast_s, fast_waited_s, slow_s, slow_waited_s = usual
    assert slow_s > 0.9 * SLOW_S  # the exchange may run beside its backward pass, and counts as a wait
    assert fast_waited_s > SLOW_S / 2 > slow_waited_s
    assert fast_s < slow_s - SLOW_S / 2


def unfreeze() -> None:
    open_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    model(torch.ones(2, 3)).sum().backward()
    net[0].requires_grad_(True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    dist.barrier()


def test_parameters_that_are_unfrozen_after_wrapping_are_named_once() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        job.run(unfreeze)
        assert job.report().count("0.weight, 0.bias took no gradient when DistributedDataParallel took the model") == 1
