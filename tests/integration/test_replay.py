"""One process replays the log of a job whose members come and go, and ends with the same weights, bit for bit."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.data.replay import Replay
from paceline.observe import ring
from paceline.server.merge import Accumulator, Contribution, Scratch
from paceline.testing import LocalJob

LENGTH, EPOCHS, LEAVER, LEAVES_AT, DIES = 96, 3, 1, 4, 2


def data():
    return torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gradient_of(model, batch):
    model.zero_grad()
    (model(batch).square().mean() + model(batch).tanh().sum() / len(batch)).backward()


def train(kind, update, how):
    """Train; one worker leaves in the first epoch, in its own time, or is killed in the second one."""
    store = paceline.kvstore.create("dist_sync")
    model, sgd = network()
    optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=model, update=update)
    if kind == "shares":
        sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=16, shares="measured")
        loader = DataLoader(data(), batch_sampler=sampler)
    else:
        sampler = paceline.data.ShardedSampler(LENGTH, global_batch_size=9)
        loader = DataLoader(data(), sampler=sampler, batch_size=sampler.batch_size)
    number = 0
    for epoch in range(EPOCHS):
        for batch in loader:
            number += 1
            if store.rank == LEAVER and number == LEAVES_AT:
                paceline.notice("the night is over")
            if store.rank == DIES and how == "dies" and epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01 * store.rank)
            gradient_of(model, batch)
            optimizer.step()
    return [one.tolist() for one in model.parameters()]


def merged(gradients):
    """Return the mean as a server makes it: in the order of ranks."""
    ranks = sorted(gradients)
    total = Accumulator([ranks], True, torch.float64, Scratch())
    for rank in ranks:
        values, samples = gradients[rank]
        total.add(rank, Contribution(values.clone().flatten(), float(samples), None, borrowed=False))
    (found, unit) = total.sum()
    return found * (unit / sum(samples for _, samples in gradients.values()))


def replayed(log):
    """Train in this process as the log says."""
    model, sgd = network()
    samples = data()
    for step in log.steps():
        found = {}
        for rank, part in step.parts.items():
            gradient_of(model, samples[part])
            found[rank] = [one.grad.clone() for one in model.parameters()], len(part)
        for index, param in enumerate(model.parameters()):
            mean = merged({rank: (grads[index], count) for rank, (grads, count) in found.items()})
            param.grad = mean.reshape(param.shape)
        sgd.step()
    return [one.tolist() for one in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "update", "how"),
    [
        ("shares", "worker", "leaves"),
        ("parts", "server", "leaves"),
        ("shares", "worker", "dies"),
        ("parts", "worker", "dies"),
    ],
)
def test_weights_are_those_of_one_process_that_replays_the_log(kind, update, how):
    with LocalJob(num_workers=4, num_servers=2, on_worker_death="continue") as job:
        workers = job.start_all(train, kind, update, how)
        assert workers[LEAVER].wait(60) == 0
        left = [0, 3] if how == "dies" else [0, 2, 3]
        weights = [workers[rank].result(60) for rank in left]
        assert all(one == weights[0] for one in weights)
        job.scheduler.wait(60)
        log = Replay.of(ring.folder_of("test", job.job_key))
    kinds = [(one.kind, one.workers) for _, one in log.changes]
    assert kinds[:2] == [("starts", [0, 1, 2, 3]), ("left", [LEAVER])]
    assert (("died", [DIES]) in kinds) == (how == "dies")
    if update == "worker":
        assert replayed(log) == weights[0]
    for one, other in zip(replayed(log), weights[0], strict=True):  # servers divide and step in one formula
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)
