"""A worker under notice ends its step and leaves; the others train on its samples in the same epoch."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.testing import LocalJob, tell
from paceline.worker.current import current_session

LENGTH, LEAVER, LEAVES_AT = 96, 1, 3


def trained_on(indices):
    counts = torch.zeros(LENGTH)
    counts[indices] += 1
    return counts


def be_told(how):
    """Give this worker notice, and wait until it knows that it is to leave: a batch of real data takes longer."""
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        paceline.notice("the machine is needed")
    end = time.monotonic() + 60
    while not current_session().notice.why:
        assert time.monotonic() < end, "the scheduler says nothing"
        time.sleep(0.01)


def walk(store, batches, how, await_leave_at=0):
    """Train for two epochs; a batch counts its samples on the servers. One worker leaves in the first epoch."""
    out, epochs, number = torch.empty(LENGTH), [], 0
    for _ in range(2):
        for indices in batches:
            number += 1
            if store.rank == LEAVER and number == LEAVES_AT:
                be_told(how)
                assert store.leaving
                tell(number)
            if store.rank != LEAVER and number == await_leave_at:
                await_leave()
            store.push("ledger", trained_on(indices))
            store.pull("ledger", out)
        store.barrier()
        store.pull("ledger", out)
        epochs.append(out.tolist())
        store.barrier()
    assert store.rank != LEAVER, "its loop has not ended"
    return epochs


def await_leave():
    """Wait until the leaver has left: else the others may take all samples of the pool before that."""
    end = time.monotonic() + 60
    while LEAVER not in current_session()._lifeline.left:
        assert time.monotonic() < end, "the leaver stays"
        time.sleep(0.01)


def ledger_store(kind):
    store = paceline.kvstore.create(kind)
    store.set_optimizer("add")
    store.init("ledger", torch.zeros(LENGTH))
    return store


def with_pool(how):
    store = ledger_store("dist_async")
    return walk(store, paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4), how, 8)


def with_measured_shares(how):
    store = ledger_store("dist_sync")
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=6, shares="measured")
    return walk(store, sampler, how)


def with_a_loader(how):
    store = ledger_store("dist_sync")
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=6, shares="measured")
    return walk(store, DataLoader(range(LENGTH), batch_sampler=sampler), how)


def with_parts(how, workers=0):
    store = ledger_store("dist_sync")
    sampler = paceline.data.ShardedSampler(LENGTH, global_batch_size=6)
    loader = DataLoader(range(LENGTH), sampler=sampler, batch_size=sampler.batch_size, num_workers=workers)
    return walk(store, loader, how)


def with_parts_fetched_ahead(how):
    return with_parts(how, workers=1)


@pytest.mark.parametrize(
    ("train", "how"),
    [
        (with_pool, "SIGTERM"),
        (with_measured_shares, "notice"),
        (with_a_loader, "SIGTERM"),
        (with_parts, "notice"),
        (with_parts_fetched_ahead, "SIGTERM"),
    ],
)
def test_others_train_on_the_samples_of_a_worker_that_leaves_in_the_same_epoch(train, how):
    with LocalJob(num_workers=3, num_servers=2) as job:
        workers = job.start_all(train, how)
        assert workers[LEAVER].heard(60) == LEAVES_AT
        assert workers[LEAVER].wait(60) == 0, workers[LEAVER].output
        first, second = (workers[rank].result(60) for rank in (0, 2))
        assert "has left after round 3: " in job.scheduler.output
    assert first == second
    once, twice = first
    assert min(once) == 1
    assert sum(once) <= LENGTH + 1, "a last batch of one sample begins the order again by one"
    assert [after - before for before, after in zip(once, twice, strict=True)] == [1.0] * LENGTH


def save_and_load(folder):
    """Worker 0 leaves; the others save and load without it, and set weights for all."""
    store = paceline.kvstore.create("dist_sync")
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store, model=model)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if store.rank == 0 and step == 1:
            be_told("notice")
        optimizer.step()
    with torch.no_grad():
        model.weight.fill_(store.rank)
    optimizer.broadcast_weights()
    paceline.save(f"{folder}/checkpoint", model, optimizer, step=3, extra=store.rank)
    with torch.no_grad():
        model.weight.fill_(7)
    loaded = paceline.load(f"{folder}/checkpoint", model, optimizer)
    return loaded.extra, loaded.step, model.weight.flatten().tolist()


def test_others_save_and_load_without_worker_0_whose_loop_took_its_batches_from_elsewhere(tmp_path):
    with LocalJob(num_workers=3, num_servers=1) as job:
        workers = job.start_all(save_and_load, str(tmp_path))
        assert workers[0].wait(60) == 0
        assert "worker 0 leaves a loop that takes its batches from elsewhere" in workers[0].output
        assert [workers[rank].result(60) for rank in (1, 2)] == [[1, 3, 4 * [1.0]], [2, 3, 4 * [1.0]]]
    assert len(list(tmp_path.iterdir())) == 2
