"""Groups follow the workers' speeds while a job trains; no step is lost, and none counts twice."""

from __future__ import annotations

import random
import time

import pytest
import torch

import paceline
from paceline.errors import ConfigError
from paceline.testing import LocalJob

#: Seconds of a step on a simulated clock, by rank: before and after workers 1 and 2 change theirs with each other.
BEFORE, AFTER = (0.02, 0.02, 0.05, 0.05), (0.02, 0.05, 0.02, 0.05)

#: Rounds before the change, rounds in which the groups must follow, and rounds that are trained after that.
FIRST, PATIENCE, MORE = 30, 50, 10


def train(options):
    """Train on machines of a simulated clock, so that other load changes no speed. Each gradient counts rounds."""
    store = paceline.kvstore.create("dist_gsync", weighting="none")
    weight = torch.nn.Parameter(torch.zeros(4, 300))
    inner = torch.optim.SGD([weight], lr=1.0)
    optimizer = paceline.DistributedOptimizer(inner, kvstore=store, reduction="sum", **options)
    session, computed, noise = store.session, 0.0, random.Random(store.rank)
    session.meter.now = lambda: computed
    rounds = late = more = 0
    while late < PATIENCE and more < MORE:
        if rounds == FIRST:
            optimizer.kvstore.barrier()
        computed += (BEFORE if rounds < FIRST else AFTER)[store.rank] * noise.lognormvariate(0, 0.05)
        optimizer.zero_grad()
        weight[store.rank].sum().backward()
        time.sleep(0.03)  # the rounds of a real job are longer than a tenth of the interval of heartbeats
        optimizer.step()
        rounds += 1
        generation, groups = session.fitting_groups
        follows = optimizer.kvstore.lifecycle._generation == generation and sorted(groups) == [[0, 2], [1, 3]]
        late, more = late + (rounds > FIRST and not follows), more + follows
    optimizer.kvstore.barrier()
    return rounds, late, more, weight.tolist()


@pytest.mark.parametrize("options", [{}, {"compression": {"type": "fp16", "leg": "both"}}], ids=["plain", "compressed"])
def test_workers_that_change_their_speeds_change_their_groups_and_every_step_counts_once(options):
    settings = {"groups": "0 1; 2 3;", "regroup_rounds": 5, "heartbeat_interval_s": 0.1, "bigarray_bound": 100}
    with LocalJob(num_workers=4, num_servers=2, **settings) as job:
        results = job.run(train, options)
    assert [one[2] for one in results] == [MORE] * 4, "all have followed, within 50 rounds"
    # Who made the last update of a server has seen all of them.
    steps = -torch.tensor([one[3] for one in results]).min(dim=0).values
    assert steps.tolist() == [[one[0]] * 300 for one in results]


def two_stores():
    first, second = (paceline.kvstore.create("dist_gsync") for _ in range(2))
    first.init("a", torch.zeros(1))
    with pytest.raises(ConfigError, match="PACELINE_REGROUP_ROUNDS=0"):
        second.init("a", torch.zeros(1))
    first.close()
    return True


def test_second_store_with_groups_that_change_is_refused():
    with LocalJob(num_workers=1, num_servers=1, groups="0;", regroup_rounds=5) as job:
        assert job.run(two_stores) == [True]
