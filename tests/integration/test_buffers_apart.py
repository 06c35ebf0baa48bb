"""Buffers that training reads: each worker has its own, and a line says so; with all-reduce they are rank 0's."""

import logging
import warnings

import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.testing import LocalJob
from tests.hvd.ranks import run as run_ranks

STEPS = 4


class Codebook(nn.Module):
    """Takes away a running mean of its outputs, and has another one that no output depends on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, inputs):
        outputs = self.net(inputs)
        if self.training:
            self.centre.lerp_(outputs.detach().mean(0) + inputs.mean(), 0.5)
        return outputs - self.centre


def batch(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def train(kind, with_codebook):
    """Train; return the lines that warn, the centres that each forward pass of training found, and the last ones."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.optim.buffers").addHandler(handler)
    torch.manual_seed(0)
    net = Codebook() if with_codebook else nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    store = kvstore.create(kind)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store, model=net)
    found = []
    for step in range(STEPS):
        if with_codebook:
            found.append(net.centre.tolist())
        optimizer.zero_grad()
        net(batch(store.rank, step)).square().mean().backward()
        optimizer.step()
    for _ in range(2):
        net.eval()(batch(store.rank, 0))
        net.train()
        net(batch(store.rank, 1)).square().mean().backward()
        optimizer.step()
    store.barrier()
    return lines, found


def test_worker_says_once_that_it_has_trained_with_buffers_of_its_own():
    with LocalJob(2, 1) as job:
        (lines, _), (other_lines, _) = job.run(train, "dist_sync", True)
    assert lines == []
    [line] = other_lines
    assert line.startswith("buffer 'centre' of worker 1 has become another than worker 0's.")
    assert 'kvstore="allreduce"' in line


def test_nothing_is_said_of_running_means():
    with LocalJob(2, 1) as job:
        assert [lines for lines, _ in job.run(train, "dist_sync", False)] == [[], []]


def test_forward_passes_find_the_buffers_of_worker_0_with_all_reduce():
    (lines, found), (other_lines, other_found) = run_ranks(train, 2, "allreduce", True)
    assert lines == other_lines == []
    assert found == other_found
    assert found[1] != found[0]


def test_schedule_of_the_wrapped_optimizer_does_not_miss_its_steps():
    with LocalJob(1, 1) as job:
        assert job.run(schedule) == [[0.1, 0.05, 0.05, 0.025]]


def schedule():
    """Step a scheduler that was made before wrapping, while servers step; return the rates."""
    net = nn.Linear(3, 4)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
    optimizer = DistributedOptimizer(inner, "dist_sync", model=net, update="server")
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            net(batch(0, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(inner.param_groups[0]["lr"])
    return rates
