"""Real jobs in which one worker is slow: the log names it, and why."""

from __future__ import annotations

import gc
import re
import time

import pytest
import torch

import paceline
from paceline.testing import LocalJob

#: Pauses are far longer than what a step takes beside other tests.
SLOW, ROUNDS, FROM, PAUSE_S = 1, 30, 12, 0.25


class Samples(torch.utils.data.Dataset):
    """Samples that one worker reads slowly, after a while."""

    def __init__(self, is_slow):
        self.is_slow, self.read = is_slow, 0

    def __len__(self):
        return ROUNDS

    def __getitem__(self, index):
        self.read += 1
        if self.is_slow and self.read > FROM:
            time.sleep(PAUSE_S)
        return torch.ones(16)


class Pause(torch.autograd.Function):
    """Takes long in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


def collect(phase, info):
    """Take as long in a garbage collection as a large heap does."""
    if phase == "start":
        time.sleep(PAUSE_S)


def train(cause):
    store = paceline.kvstore.create("dist_sync")
    model = torch.nn.Linear(16, 4)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    is_slow = store.rank == SLOW
    if is_slow and cause == "gc":
        gc.callbacks.append(collect)
    loader = torch.utils.data.DataLoader(Samples(is_slow and cause == "data"), batch_size=1)
    gc.disable()
    for number, batch in enumerate(loader):
        time.sleep(0.01)
        seconds = PAUSE_S if is_slow and cause == "compute" and number >= FROM else 0.0
        optimizer.zero_grad()
        Pause.apply(model(batch), seconds).sum().backward()
        optimizer.step()
        if is_slow and cause == "gc" and number >= FROM and number % 3 == 0:
            gc.collect()


@pytest.mark.parametrize(
    ("cause", "subject"),
    [("data", "its data loader"), ("compute", "computation"), ("gc", "Python's garbage collection")],
)
def test_slow_worker_is_named_with_the_reason(cause: str, subject: str) -> None:
    with LocalJob(num_workers=3, num_servers=1, heartbeat_interval_s=0.2) as job:
        job.run(train, cause)
        job.scheduler.wait(60.0)
        said = job.scheduler.output
    (first, *_) = re.findall(r"worker (\d+) on \S+ takes .* since round (\d+): (.*); it costs", said)
    assert first[0] == str(SLOW), said
    assert subject in first[2], said
    assert FROM <= int(first[1]) <= FROM + 8, said
    assert f"slow workers of this job, and the time that they cost: worker {SLOW} on" in said
