"""Another process takes the rank of a worker that is killed, while the others train."""

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
from paceline.testing import LocalJob

LENGTH, EPOCHS, VICTIM, DIES_AT = 96, 3, 1, 3


def network():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(update, first):
    store = paceline.kvstore.create("dist_sync")
    model, sgd = network()
    optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=model, update=update)
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=12, shares="measured")
    data = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    number = 0
    for epoch in range(sampler.epoch, EPOCHS):
        for batch in DataLoader(data, batch_sampler=sampler):
            number += 1
            if first and store.rank == VICTIM and number == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            optimizer.zero_grad()
            (model(batch).square().mean() + model(batch).tanh().sum() / len(batch)).backward()
            optimizer.step()
    return [one.tolist() for one in model.parameters()]


@pytest.mark.parametrize("update", ["worker", "server"])
def test_another_process_takes_over_from_a_worker_that_is_killed(update):
    with LocalJob(num_workers=3, num_servers=2, on_worker_death="continue") as job:
        workers = job.start_all(train, update, True)
        assert workers[VICTIM].wait(60) == -signal.SIGKILL
        workers[VICTIM] = job.start(VICTIM, train, update, False, environment={"PACELINE_INCARNATION": "1"})
        try:
            weights = [one.result(60) for one in workers]
        finally:
            print(job.report())
        assert all(one == weights[0] for one in weights)
        job.scheduler.wait(60)
        log = Replay.of(ring.folder_of("test", job.job_key))
    print([one for _, one in log.changes])
    print([(one.round, one.epoch, {k: len(v) for k, v in one.parts.items()}) for one in log.steps()])
