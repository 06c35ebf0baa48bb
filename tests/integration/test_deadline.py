"""A worker pushes what it has done by a deadline; nothing of the rest is lost, and nothing comes twice."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter

import pytest
import torch

import paceline
from paceline.testing import LocalJob

LENGTH, GLOBAL, PART, DEADLINE_S = 150, 24, 2, 0.5
VICTIM, DIES_AT = 1, 3


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LENGTH, 4, generator=generator), torch.randn(LENGTH, 1, generator=generator)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(shares):
    """Train on machines of a simulated clock: one part in ten takes twenty times as long."""
    store = paceline.kvstore.create("dist_sync")
    x, y = data()
    model, inner = model_and_optimizer()
    optimizer = paceline.DistributedOptimizer(inner, kvstore=store, model=model)
    sampler = paceline.data.SharedBatchSampler(
        LENGTH, store, global_batch_size=GLOBAL, shares=shares, max_batch=PART, deadline_s=DEADLINE_S
    )
    computed, noise = 0.0, random.Random(store.rank)
    sampler._now = sampler._deadline._clock = lambda: computed + store.session.waited_s
    epochs, seconds, left, before_all = [], [], [], Counter(store.session._gathers)
    for _ in range(2):
        steps = []
        for indices in sampler:
            before, done = computed, []
            optimizer.zero_grad()
            for part_x, part_y, which in sampler.parts_in_time(
                optimizer, x[indices], y[indices], torch.tensor(indices)
            ):
                computed += 0.05 * (20 if noise.random() < 0.1 else 1)
                torch.nn.functional.mse_loss(model(part_x), part_y).backward()
                done += which.tolist()
            if not optimizer.samples:
                done = []  # of a last batch with fewer samples than workers
            optimizer.step()
            steps.append(done)
            left.append(left_of(sampler.state_dict()) if store.rank == 0 else 0)
            seconds.append(computed - before)
        epochs.append(steps)
    gathers = (store.session._gathers - before_all).total()
    return epochs, seconds, torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(), gathers, left


def left_of(state) -> int:
    """Return how many samples are left of the epoch of a state."""
    return LENGTH - state.get("first", state["batch"] * GLOBAL) + len(state.get("again", ()))


def in_one_process(epochs) -> torch.Tensor:
    """Train on the samples that all workers have really done in each step."""
    x, y = data()
    model, optimizer = model_and_optimizer()
    for workers in epochs:
        for step in zip(*workers, strict=True):
            together = [index for done in step for index in done]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[together]), y[together]).backward()
            optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("shares", ["equal", "measured"])
def test_result_is_that_of_one_process_with_the_samples_that_were_done(shares):
    with LocalJob(num_workers=3, num_servers=2) as job:
        results = job.run(train, shares)
    epochs = [[one[0][epoch] for one in results] for epoch in range(2)]
    assert len(epochs[0][0]) > -(-LENGTH // GLOBAL), "some samples have come later"
    for workers in epochs:
        seen = [index for steps in workers for done in steps for index in done]
        assert sorted(seen) == list(range(LENGTH))
    done = [sum(map(len, step)) for step in zip(*epochs[0], strict=True)]
    states = results[0][4][: len(done) - 1]
    assert states == [LENGTH - one for one in itertools.accumulate(done)][:-1], "one worker's state has what all left"
    # Without the deadline, four parts of which one in ten is slow took longer in every third step.
    assert all(step <= DEADLINE_S + 20 * 0.05 for one in results for step in one[1])
    for one in results:
        torch.testing.assert_close(torch.tensor(one[2]), in_one_process(epochs))
        assert one[3] <= 8 < sum(map(len, one[0])), "what is done travels with pushes, but for the ends of epochs"


def count_what_is_merged(dies, dies_at):
    """Train with one weight per sample: the merged gradient tells which samples of all workers a step was made of."""
    store = paceline.kvstore.create("dist_sync")
    weight = torch.nn.Parameter(torch.zeros(LENGTH))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), kvstore=store)
    sampler = paceline.data.SharedBatchSampler(
        LENGTH, store, global_batch_size=GLOBAL, max_batch=PART, deadline_s=DEADLINE_S
    )
    computed, ledger, steps = 0.0, torch.zeros(LENGTH), 0
    sampler._now = sampler._deadline._clock = lambda: computed
    for indices in sampler:
        steps += 1
        optimizer.zero_grad()
        for number, (part,) in enumerate(sampler.parts_in_time(optimizer, torch.tensor(indices))):
            computed += 0.21 if store.rank == VICTIM else 0.05  # the victim does two parts of four
            weight[part].mean().backward()
            if (store.rank, steps, number, dies) == (VICTIM, dies_at, 1, "in a part"):
                os.kill(os.getpid(), signal.SIGKILL)
        if (store.rank, steps, dies) == (VICTIM, dies_at, "before its push"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        ledger += weight.grad > 0
        if (store.rank, steps, dies) == (VICTIM, dies_at, "after its push"):
            os.kill(os.getpid(), signal.SIGKILL)
    return ledger.tolist(), steps


@pytest.mark.parametrize(
    ("dies", "dies_at"),
    [
        ("in a part", DIES_AT),
        ("before its push", DIES_AT),
        ("after its push", DIES_AT),
        ("after its push", -(-LENGTH // GLOBAL)),  # the workers gather at its end: it may be the last one of the epoch
    ],
)
def test_each_sample_counts_once_when_a_worker_is_killed(dies, dies_at):
    with LocalJob(num_workers=3, num_servers=2, on_worker_death="continue") as job:
        workers = job.start_all(count_what_is_merged, dies, dies_at)
        assert workers[VICTIM].wait(60) == -signal.SIGKILL
        (ledger, steps), other = (workers[rank].result(60) for rank in (0, 2))
    assert other == [ledger, steps]
    assert ledger == [1.0] * LENGTH


def take_from_a_pool():
    """Every sample of worker 0 takes long: it does two of four in time, and gives the others back."""
    store = paceline.kvstore.create("dist_async")
    weight = torch.nn.Parameter(torch.zeros(LENGTH))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), kvstore=store)
    sampler = paceline.data.PooledBatchSampler(LENGTH, store, batch_size=8, max_batch=1, deadline_s=0.05)
    epochs, sizes = [], []
    for _ in range(2):
        trained = []
        for indices in sampler:
            before = len(trained)
            optimizer.zero_grad()
            for (part,) in sampler.parts_in_time(optimizer, torch.tensor(indices)):
                time.sleep(0.02 if store.rank == 0 else 0.001)
                weight[part].mean().backward()
                trained += part.tolist()
            optimizer.step()
            sizes.append((len(indices), len(trained) - before))
        epochs.append(trained)
    return epochs, sizes


def test_pool_gets_back_what_was_not_done_in_time():
    with LocalJob(num_workers=3, num_servers=1) as job:
        results = job.run(take_from_a_pool)
    for epoch in range(2):
        assert sorted(index for one in results for index in one[0][epoch]) == list(range(LENGTH))
    given, done = (sum(one) for one in zip(*results[0][1], strict=True))
    assert done < given
