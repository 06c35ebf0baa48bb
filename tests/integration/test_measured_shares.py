"""Workers of unlike speed divide each global batch so that all finish at the same time."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter

import pytest
import torch

import paceline
from paceline.hetero import Speed, fastest_split, step_seconds
from paceline.testing import LocalJob
from paceline.worker.current import current_session

#: Seconds of a batch of 16, of which a fifth does not depend on the samples.
BATCH_S = (0.06, 0.06, 0.12, 0.12, 0.24, 0.24)
GLOBAL, SLOWED, HALVED = 96, 0, 20


def truth(rank: int, round: int) -> Speed:
    seconds = BATCH_S[rank] * (2 if rank == SLOWED and round >= HALVED else 1)
    return Speed(0.2 * seconds, 0.8 * seconds / 16)


def train():
    """Train on machines of a simulated clock: a step takes what the machine would, with 5 % of noise, on any host."""
    store = paceline.kvstore.create("dist_sync")
    data = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(8, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    sampler = paceline.data.SharedBatchSampler(data, store, global_batch_size=GLOBAL, shares="measured")
    computed, noise, before = 0.0, random.Random(store.rank), Counter(store.session._gathers)
    sampler._now = lambda: computed + store.session.waited_s
    shares, sizes = [], []
    for round, indices in enumerate(sampler):
        if round == 40:
            break
        computed += truth(store.rank, round).seconds(len(indices)) * noise.lognormvariate(0, 0.05)
        optimizer.zero_grad()
        model(data[indices]).square().mean().backward()
        optimizer.step()
        shares.append([sampler.shares[rank] for rank in range(6)])
        sizes.append(len(indices))
    gathers = (store.session._gathers - before).total()
    weights = [one for parameter in model.parameters() for one in parameter.flatten().tolist()]
    return shares, sizes, weights, gathers


def part_of_limit(shares: list[int], round: int) -> float:
    speeds = [truth(rank, round) for rank in range(6)]
    return step_seconds(fastest_split(GLOBAL, speeds), speeds) / step_seconds(shares, speeds)


def test_shares_reach_the_limit_and_follow_a_worker_that_becomes_slower():
    with LocalJob(num_workers=6, num_servers=1) as job:
        results = job.run(train)
    shares = results[0][0]
    assert all(one[0] == shares for one in results), "all workers agree in every round"
    assert [sum(one) for one in zip(*(result[1] for result in results), strict=True)] == [GLOBAL] * 40
    assert all(one[2] == results[0][2] for one in results)
    assert [one[3] for one in results] == [1] * 6, "speeds travel with pushes, but for the beginning of the epoch"
    assert part_of_limit([16] * 6, 0) < 0.6
    assert part_of_limit(shares[10], 10) >= 0.95
    assert part_of_limit(shares[HALVED - 1], HALVED) < 0.8
    assert part_of_limit(shares[HALVED + 10], HALVED + 10) >= 0.95


def take_real_time():
    """Each sample takes worker 1 four times as long as worker 0."""
    store = paceline.kvstore.create("dist_sync")
    sampler = paceline.data.SharedBatchSampler(80, store, global_batch_size=8, shares="measured")
    for indices in sampler:
        time.sleep(len(indices) * (0.04 if store.rank == 1 else 0.01))
    return sampler.shares


def test_slower_worker_gets_less():
    with LocalJob(num_workers=2, num_servers=1) as job:
        first, second = job.run(take_real_time)
    assert first == second
    assert first["0"] > first["1"]
    assert first["0"] + first["1"] == 8


def leave_early():
    """Worker 1 leaves after its first epoch; the other one takes the whole batch."""
    store = paceline.kvstore.create("dist_sync")
    sampler = paceline.data.SharedBatchSampler(48, store, global_batch_size=8, shares="measured")
    first = [index for batch in sampler for index in batch]
    if store.rank == 1:
        current_session().close()
        return first, []
    return first, [index for batch in sampler for index in batch]


def test_share_of_a_worker_that_has_left_goes_to_the_others():
    with LocalJob(num_workers=2, num_servers=1) as job:
        (first, alone), (second, _) = job.run(leave_early)
    assert sorted(first + second) == list(range(48))
    assert sorted(alone) == list(range(48))


def accumulate(max_batch):
    """Train with unequal shares; worker 1 computes its own in parts if it has a limit."""
    store = paceline.kvstore.create("dist_sync")
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store, model=model)
    cap = max_batch if store.rank == 1 else None
    sampler = paceline.data.SharedBatchSampler(64, store, global_batch_size=16, shares=[1, 3], max_batch=cap)
    passes = 0
    for indices in sampler:
        optimizer.zero_grad()
        parts = sampler.parts(data[indices])
        for number, (weight, (x,)) in enumerate(parts, start=1):
            with optimizer.no_sync() if number < len(parts) else contextlib.nullcontext():
                (weight * model(x).square().mean()).backward()
        optimizer.step()
        passes += len(parts)
    return passes, torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def test_parts_make_the_same_steps_as_the_whole_share():
    with LocalJob(num_workers=2, num_servers=1) as job:
        whole = job.run(accumulate, None)
    with LocalJob(num_workers=2, num_servers=1) as job:
        cut = job.run(accumulate, 5)
    assert [one[0] for one in whole] == [4, 4]
    assert [one[0] for one in cut] == [4, 12]
    for rank in range(2):
        torch.testing.assert_close(torch.tensor(cut[rank][1]), torch.tensor(whole[0][1]))


class Table(torch.nn.Module):
    """Has a weight for each sample: the merged gradient tells what part of a step each sample was."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.weights[samples]


def train_on_few():
    """Train on 7 samples in global batches of 3: the last one has a sample for one of three workers."""
    store, found = paceline.kvstore.create("dist_sync"), []
    for choices in ({}, {"batch_dim": 0}, {"update": "server"}):
        net = Table()
        optimizer = paceline.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), store, model=net, **choices
        )
        sampler = paceline.data.SharedBatchSampler(7, store, global_batch_size=3, shares="measured")
        loader = torch.utils.data.DataLoader(range(7), batch_sampler=sampler)
        for batch in loader:
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()
        found.append(sorted((-net.weights.detach()).tolist()))
    return found


def test_worker_without_a_sample_of_the_last_batch_changes_nothing():
    with LocalJob(num_workers=3, num_servers=1) as job:
        results = job.run(train_on_few)
    for found in results:
        for parts in found:
            assert parts == pytest.approx([1 / 3] * 6 + [1.0]), "two whole batches, and one of a single sample"
