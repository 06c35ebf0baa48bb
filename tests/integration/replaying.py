"""A job whose log one process replays: its data, its network, its loop, and the replay.

Run as a program it is the script of a worker of ``paceline launch``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import paceline
from paceline.config import variable
from paceline.data.replay import Replay
from paceline.observe import ring
from paceline.server.merge import Accumulator, Contribution, Scratch
from paceline.worker.current import current_session

LENGTH, EPOCHS, LEAVES_AT = 96, 3, 4


def data():
    return torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gradient_of(model, batch):
    model.zero_grad()
    (model(batch).square().mean() + model(batch).tanh().sum() / len(batch)).backward()


def await_joiner():
    """Wait until this worker hears of a process that takes over from one that has died."""
    end = time.monotonic() + 120
    while not current_session().has_joiners:
        assert time.monotonic() < end, "nobody takes over"
        time.sleep(0.01)


def train(kind, update, leaver=-1, dies=-1, dies_in=1, is_replaced=False):
    """Train; one worker leaves in the first epoch, in its own time, and another one is killed in a later one."""
    store = paceline.kvstore.create("dist_sync")
    model, sgd = network()
    optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=model, update=update)
    if kind == "shares":
        sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=16, shares="measured")
        loader = DataLoader(data(), batch_sampler=sampler)
    else:
        sampler = paceline.data.ShardedSampler(LENGTH, global_batch_size=9)
        loader = DataLoader(data(), sampler=sampler, batch_size=sampler.batch_size)
    number, is_first = 0, variable("incarnation") not in os.environ
    for epoch in range(sampler.epoch, EPOCHS):
        for row, batch in enumerate(loader):
            number += 1
            if store.rank == leaver and number == LEAVES_AT:
                paceline.notice("the night is over")
            if store.rank == dies and is_first and epoch == dies_in and row == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_replaced and is_first and epoch == dies_in and row == 3:
                await_joiner()
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


def weighted(log):
    """Yield the rounds with the samples of each worker, and their weight: none if they only fill up a batch."""
    epoch, seen = -1, set()
    for step in log.steps():
        epoch, seen = step.epoch, seen if step.epoch == epoch else set()
        parts = {}
        for rank, part in step.parts.items():
            parts[rank] = part, len(part) if "sharded" in log.samplers[0] or not seen.issuperset(part) else 0
            seen.update(part)
        yield step, parts


def replayed(log):
    """Train in this process as the log says."""
    model, sgd = network()
    samples = data()
    for _, parts in weighted(log):
        found = {}
        for rank, (part, weight) in parts.items():
            gradient_of(model, samples[part])
            found[rank] = [one.grad.clone() for one in model.parameters()], weight
        for index, param in enumerate(model.parameters()):
            mean = merged({rank: (grads[index], count) for rank, (grads, count) in found.items()})
            param.grad = mean.reshape(param.shape)
        sgd.step()
    return [one.tolist() for one in model.parameters()]


def check_weights(folder, update, weights):
    """Check that all workers that have ended have the weights of one process that replays the log; return that."""
    log = Replay.of(folder)
    assert all(one == weights[0] for one in weights)
    if update == "worker":
        assert replayed(log) == weights[0]
    for one, other in zip(replayed(log), weights[0], strict=True):  # servers divide and step in one formula
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)
    return log


def times_trained(log):
    """Return how often each sample was trained on, by epoch."""
    counts = [Counter() for _ in range(EPOCHS)]
    for step, parts in weighted(log):
        for part, weight in parts.values():
            counts[step.epoch].update(part if weight else ())
    return counts


if __name__ == "__main__":
    told, *arguments = sys.argv[1:]
    weights = train(*map(json.loads, arguments))
    settings = current_session().settings
    folder = str(ring.folder_of(settings.job_id, settings.job_key))
    Path(told, f"{settings.rank}.json").write_text(json.dumps([folder, weights]))
