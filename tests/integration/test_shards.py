"""Workers of one job take shards from a pool, and those of a worker that leaves or dies go to others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.errors import ConfigError
from paceline.observe.account import Steps
from paceline.testing import LocalJob

SHARDS, SAMPLES = 9, 4


@pytest.fixture
def archives(tmp_path):
    for shard in range(SHARDS):
        numbers = range(SAMPLES * shard, SAMPLES * (shard + 1))
        (tmp_path / str(shard)).write_text(" ".join(map(str, numbers)))
    return [str(tmp_path / str(shard)) for shard in range(SHARDS)]


def batches(url, processes):
    return DataLoader([int(word) for word in Path(url).read_text().split()], batch_size=3, num_workers=processes)


def new_ledger(store):
    store.set_optimizer("add")
    store.init("ledger", torch.zeros(SHARDS * SAMPLES))


def count(store, numbers):
    """Train on a batch: add one to each of its samples on the servers."""
    ledger = torch.zeros(SHARDS * SAMPLES)
    ledger[numbers] += 1
    store.push("ledger", ledger)
    store.pull("ledger", ledger)


def counted(store):
    ledger = torch.empty(SHARDS * SAMPLES)
    store.barrier()
    store.pull("ledger", ledger)
    store.barrier()
    return ledger.tolist()


def train(archives, processes, leaves):
    """Train for two epochs; worker 2 leaves in the first one, when it has trained on its first shard."""
    store = paceline.kvstore.create("dist_ssync", staleness=2)
    new_ledger(store)
    shards = paceline.data.shards(archives, store, shares="pool", seed=5)
    ledgers, taken = [], 0
    for _ in range(2):
        for url in shards:
            for numbers in batches(url, processes if store.rank == 0 else 0):
                count(store, numbers)
            taken += 1
            if leaves and store.rank == 2:
                shards.done()
                store.close()
                return taken
        ledgers.append(counted(store))
    return ledgers


@pytest.mark.parametrize(("processes", "leaves"), [(2, False), (0, True)])
def test_every_sample_is_trained_on_once_per_epoch(archives, processes, leaves):
    with LocalJob(num_workers=3, num_servers=1) as job:
        results = job.run(train, archives, processes, leaves)
    assert results[0] == [[1.0] * SHARDS * SAMPLES, [2.0] * SHARDS * SAMPLES]
    assert not leaves or results[2] == 1


def die(archives):
    """Train for an epoch; worker 1 is killed when it has trained on a batch of its first shard."""
    store = paceline.kvstore.create("dist_async")
    new_ledger(store)
    shards = paceline.data.shards(archives, store, shares="pool")
    order = []
    for url in shards:
        order.append(archives.index(url))
        for numbers in batches(url, 0):
            count(store, numbers)
            if store.rank == 1:
                store.pull("ledger", torch.empty(SHARDS * SAMPLES))
                os.kill(os.getpid(), signal.SIGKILL)
    return counted(store), order


def test_the_shard_of_a_worker_that_dies_goes_to_another_which_begins_it_again(archives):
    with LocalJob(num_workers=2, num_servers=1, on_worker_death="continue") as job:
        workers = job.start_all(die, archives)
        assert workers[1].wait(60) == -signal.SIGKILL
        ledger, order = workers[0].result(60)
    assert sorted(order) == list(range(SHARDS))
    assert min(ledger) == 1
    again = [sample for sample, times in enumerate(ledger) if times > 1]
    assert len({sample // SAMPLES for sample in again}) == 1
    assert len(again) == 3, "the batch that it had trained on"


def go_on(archives, state, stops):
    """Train on shards from a state on; stop in the middle of the second shard if asked to."""
    store = paceline.kvstore.create("dist_async")
    shards = paceline.data.shards(archives, store, shares="pool")
    if state is not None:
        shards.load_state_dict(state)
        shards.set_epoch(state["epoch"])
    done = []
    for number, url in enumerate(shards):
        if stops and number == 1:
            break
        done.append(url)
    store.barrier()
    return done, shards.state_dict(), shards.epoch


def test_an_epoch_goes_on_in_a_job_with_other_workers(archives):
    with LocalJob(num_workers=1, num_servers=1) as job:
        [(first, state, _)] = job.run(go_on, archives, None, True)
    assert state["epoch"] == 0
    with LocalJob(num_workers=2, num_servers=1) as job:
        results = job.run(go_on, archives, state, False)
    assert sorted(first + [url for done, _, _ in results for url in done]) == archives
    assert {epoch for _, _, epoch in results} == {0}
    assert results[0][1]["epoch"] == 1


def refuse(archives):
    store = paceline.kvstore.create("dist_async")
    with pytest.raises(ConfigError, match=r"shards"):
        paceline.data.shards(archives[store.rank :], store)
    pooled = paceline.data.shards(archives, store, shares="pool")
    for processes in (0, 1):
        with pytest.raises(ValueError, match="make a loader for each: for url in shards"):
            next(iter(DataLoader(pooled, batch_size=None, num_workers=processes)))
    with pytest.raises(ValueError, match="has no pool"):
        paceline.data.shards(archives, paceline.kvstore.create("dist_sync"), shares="pool")


def measure(archives):
    """Worker 0 computes three times as many samples per second."""
    store = paceline.kvstore.create("dist_async")
    shards = paceline.data.shards(archives, store, shares="measured")
    first = list(shards)
    for number in range(10):
        store.session.pace.add(Steps(number + 1, 1, 8.0, [0.1 if store.rank == 0 else 0.3] + [0.0] * 9))
    return first, list(shards), list(shards)


def test_parts_follow_speeds_and_other_lists_are_refused(archives):
    with LocalJob(num_workers=2, num_servers=1) as job:
        job.run(refuse, archives)
    with LocalJob(num_workers=2, num_servers=1) as job:
        results = job.run(measure, archives)
    for epoch, sizes in enumerate([[5, 4], [7, 2], [7, 2]]):
        assert sorted(url for one in results for url in one[epoch]) == archives
        assert [len(one[epoch]) for one in results] == sizes
