"""A pool and measured shares go on in mid-epoch with other workers; a ledger on the servers counts every sample."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

import paceline
from paceline.testing import LocalJob

LENGTH, BATCHES, VICTIM = 97, 4, 1


def new_store(kind):
    store = paceline.kvstore.create(kind)
    store.set_optimizer("add")
    store.init("ledger", torch.zeros(LENGTH))
    return store


def new_sampler(kind, store, **options):
    if kind == "dist_sync":
        return paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=15, shares="measured", **options)
    return paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4, **options)


def count(store, indices):
    """Train on a batch: add one to each of its samples on the servers."""
    ledger = torch.zeros(LENGTH)
    ledger[indices] += 1
    store.push("ledger", ledger)
    store.pull("ledger", ledger)


def counted(store):
    ledger = torch.empty(LENGTH)
    store.barrier()
    store.pull("ledger", ledger)
    store.barrier()
    return ledger.tolist()


def stop_in_the_middle(kind, dies):
    """Train on some batches of the second epoch, and return a state; the victim dies in the last of them."""
    store = new_store(kind)
    sampler = new_sampler(kind, store, seed=3)
    for indices in sampler:
        count(store, indices)
    first = counted(store)
    for number, indices in enumerate(sampler, start=1):
        dies_now = store.rank == VICTIM and number == BATCHES
        if dies_now and dies == "before its push":
            os.kill(os.getpid(), signal.SIGKILL)
        count(store, indices)
        if dies_now and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == BATCHES:
            break
    ledger = counted(store)
    state = sampler.state_dict()
    return first, [after - before for before, after in zip(first, ledger, strict=True)], state


def go_on(kind, state):
    """Train on the rest of the epoch, and on a whole one."""
    store = new_store(kind)
    sampler = new_sampler(kind, store, seed=3)
    sampler.load_state_dict(state)
    sampler.set_epoch(state["epoch"])
    epochs = []
    for _ in range(2):
        for indices in sampler:
            count(store, indices)
        epochs.append(counted(store))
    return [*epochs, sampler.epoch]


@pytest.fixture(
    scope="module",
    params=[
        ("dist_async", ""),
        ("dist_async", "before its push"),
        ("dist_async", "after its push"),
        ("dist_sync", ""),
        ("dist_sync", "before its push"),
    ],
    ids=" dies ".join,
)
def stopped(request):
    """The store's kind, and the ledger and state of a job of three workers that stopped in mid-epoch."""
    kind, dies = request.param
    with LocalJob(num_workers=3, num_servers=2, on_worker_death="continue") as job:
        workers = job.start_all(stop_in_the_middle, kind, dies)
        if dies:
            assert workers[VICTIM].wait(60) == -signal.SIGKILL
        results = [workers[rank].result(60) for rank in range(3) if rank != VICTIM or not dies]
    first, ledger, state = results[0]
    assert first == [1.0] * LENGTH
    assert all(one[2] == state for one in results), "the state is the same on all workers"
    assert json.loads(json.dumps(state)) == state
    return kind, ledger, state


@pytest.mark.parametrize("workers", [2, 5])
def test_each_sample_is_trained_on_once_over_two_jobs_with_other_workers(stopped, workers):
    kind, ledger, state = stopped
    assert 0 < sum(ledger) < LENGTH
    assert state["epoch"] == 1
    with LocalJob(num_workers=workers, num_servers=1) as job:
        [rest, whole, epoch] = job.run(go_on, kind, state)[0]
    both = [before + after for before, after in zip(ledger, rest, strict=True)]
    # In lock step the last batch begins the order again as far as there are fewer samples than workers.
    again = workers - 1 if kind == "dist_sync" else 0
    assert min(both) == 1
    assert sum(both) <= LENGTH + again
    assert sum(whole) - sum(rest) <= LENGTH + again
    assert min(after - before for before, after in zip(rest, whole, strict=True)) == 1
    assert epoch == 2
