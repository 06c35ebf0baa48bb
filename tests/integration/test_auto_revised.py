"""``dist_auto`` changes from ``dist_async`` to groups and back while a job trains, and every sample counts once."""

from __future__ import annotations

import random
import time

import torch

import paceline
from paceline.hetero import Measured, Speed, StepNoise, choose
from paceline.hetero.files import choice_text, measured_text
from paceline.testing import LocalJob
from paceline.wire import messages as m

#: Seconds of a step on a simulated clock, by rank, and the groups that fit. A straggler needs no lock step; when steps
#: are short, the servers' optimizer is what all wait for.
STRAGGLER, SHORT = (0.6, 0.6, 0.6, 4.8), (0.02, 0.05, 0.02, 0.05)
ALONE, BY_SPEED = [[0], [1], [2], [3]], [[0, 2], [1, 3]]

#: Samples of an epoch, one per step.
SAMPLES = 240

MEASURED = Measured(tuple(Speed(0.2 * one, 0.8 * one) for one in STRAGGLER), 1, StepNoise(0.05), 0.04, 0.02)
CHOICE = choose(MEASURED)


def train(epochs):
    """Train on machines of a simulated clock, so that other load changes no speed. Each sample's gradient counts it."""
    store = paceline.kvstore.create("dist_auto")
    weight = torch.nn.Parameter(torch.zeros(SAMPLES, 3))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD([weight], lr=4.0), kvstore=store)
    sampler = paceline.data.batch_sampler(SAMPLES, store, batch_size=1)
    session, computed, noise = store.session, 0.0, random.Random(store.rank)
    session.meter.now = lambda: computed
    moved = []
    for seconds in epochs:
        for index in sampler:
            computed += seconds[store.rank] * noise.lognormvariate(0, 0.05)
            optimizer.zero_grad()
            weight[index].sum().backward()
            time.sleep(0.03)  # the rounds of a real job are longer than a tenth of the interval of heartbeats
            optimizer.step()
        generation, groups = session.fitting_groups
        moved.append((optimizer.kvstore.lifecycle._generation == generation, sorted(groups)))
        optimizer.kvstore.barrier()
    status = session.call_scheduler(m.AskStatus(), "asking for the status")
    return moved, weight.tolist(), status.auto, optimizer.kvstore.policy.merge, store.policy.merge


def test_dist_auto_changes_to_groups_and_back_and_every_sample_counts_once():
    assert (CHOICE.store_type, CHOICE.shares, CHOICE.policy.lr_scale) == ("dist_async", "pool", "sample")
    settings = {"choice": choice_text(CHOICE), "measured": measured_text(MEASURED), "regroup_rounds": 5}
    settings |= {"groups": "0 1 2; 3;", "heartbeat_interval_s": 0.1, "bigarray_bound": 100}
    with LocalJob(num_workers=4, num_servers=2, **settings) as job:
        results = job.run(train, [SHORT, STRAGGLER])
    assert [one[0] for one in results] == [[[True, BY_SPEED], [True, ALONE]]] * 4
    assert [one[3:] for one in results] == [["groups", "each"]] * 4
    assert all(one[2][0].startswith("dist_async with a pool of samples from now on: ") for one in results)
    # An update steps by its part of one batch of every worker, whatever the groups. Who made the last update of a
    # server has seen all of them.
    steps = -torch.tensor([one[1] for one in results]).min(dim=0).values
    assert steps.tolist() == [[2.0] * 3] * SAMPLES


def forms():
    store = paceline.kvstore.create("dist_auto")

    def optimizer(**options):
        inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        return paceline.DistributedOptimizer(inner, kvstore=store, **options)

    summing, clipping = optimizer(reduction="sum"), optimizer(clip_grad_norm=1.0)
    first = optimizer(compression="fp16")
    second = optimizer()
    first.close()
    third = optimizer()
    found = [one.kvstore.policy.merge for one in (summing, clipping, first, second, third)]
    return found, list(first.kvstore.traffic.codecs), store.session.kind.auto


def test_one_optimizer_at_a_time_whose_updates_are_means_can_change_groups():
    settings = {"choice": choice_text(CHOICE), "measured": measured_text(MEASURED), "regroup_rounds": 5}
    with LocalJob(num_workers=4, num_servers=1, **settings) as job:
        assert job.run(forms) == [[["each", "each", "groups", "each", "groups"], ["push"], "free"]] * 4
