"""A worker is killed, and the others go on: nobody waits for it, and its samples are trained on by others."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.errors import PacelineError, PeerDiedError
from paceline.testing import LocalJob, listen
from paceline.worker.current import current_session

LENGTH, VICTIM, DIES_AT = 96, 1, 3


def trained_on(indices):
    counts = torch.zeros(LENGTH)
    counts[indices] += 1
    return counts


def await_death():
    """Wait until this worker knows that the victim has died: else the others may take all samples before that."""
    end = time.monotonic() + 60
    while not current_session().deaths():
        assert time.monotonic() < end, "the victim lives"
        time.sleep(0.01)


def walk(store, sampler, dies, dies_at=DIES_AT, wait_at=0):
    """Train for two epochs; what a batch does is to count its samples on the servers. The victim dies in the first."""
    out, epochs, batches = torch.empty(LENGTH), [], 0
    for _ in range(2):
        for indices in sampler:
            batches += 1
            if store.rank != VICTIM and batches == wait_at:
                await_death()
            if store.rank == VICTIM and batches == dies_at and dies == "before its push":
                os.kill(os.getpid(), signal.SIGKILL)
            store.push("ledger", trained_on(indices))
            store.pull("ledger", out)
            if store.rank == VICTIM and batches == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        store.barrier()
        store.pull("ledger", out)
        epochs.append(out.tolist())
        store.barrier()
    return epochs, [(one.rank, one.reason) for one in current_session().deaths()]


def ledger_store(kind, **options):
    store = paceline.kvstore.create(kind, **options)
    store.set_optimizer("add")
    store.init("ledger", torch.zeros(LENGTH))
    return store


def with_pool(kind, options, dies):
    store = ledger_store(kind, **options)
    return walk(store, paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4), dies, wait_at=8)


def with_measured_shares(dies, dies_at):
    store = ledger_store("dist_sync")
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=6, shares="measured")
    return walk(store, sampler, dies, dies_at)


def with_a_loader_that_fetches_ahead():
    store = ledger_store("dist_sync")
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=48, shares="measured")
    loader = DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=1, prefetch_factor=2)
    return walk(store, loader, "before its push", dies_at=2)


def refuse_to_fetch_ahead():
    store = paceline.kvstore.create("dist_async")
    sampler = paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4)
    with pytest.raises(ValueError, match="num_workers=0"):
        next(iter(DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=1)))
    store = paceline.kvstore.create("dist_sync")
    sampler = paceline.data.SharedBatchSampler(LENGTH, store, global_batch_size=8, max_batch=1, deadline_s=1.0)
    with pytest.raises(ValueError, match="num_workers=0"):
        next(iter(DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=1)))
    return next(iter(DataLoader(range(LENGTH), batch_sampler=sampler))).tolist()


def survivors_of(job, function, *arguments):
    workers = job.start_all(function, *arguments)
    assert workers[VICTIM].wait(60) == -signal.SIGKILL
    results = [workers[rank].result(60) for rank in (0, 2)]
    for _, deaths in results:
        assert [rank for rank, _ in deaths] == [VICTIM]
    # Members of a group see the values of their group's last update.
    return [
        [max(both) for both in zip(*epochs, strict=True)] for epochs in zip(*(one[0] for one in results), strict=True)
    ]


@pytest.mark.parametrize("dies", ["before its push", "after its push"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("dist_async", {}), ("dist_gsync", {"groups": [[0], [1, 2]], "weighting": "none"})],
    ids=["dist_async", "dist_gsync"],
)
def test_pool_trains_on_each_sample_once_when_a_worker_is_killed(kind, options, dies):
    with LocalJob(num_workers=3, num_servers=2) as job:
        first, second = survivors_of(job, with_pool, kind, options, dies)
    assert first == [1.0] * LENGTH
    assert second == [2.0] * LENGTH


@pytest.mark.parametrize("dies", ["before its push", "after its push"])
@pytest.mark.parametrize("dies_at", [3, 8, 9])
def test_measured_shares_train_on_each_sample_once_when_a_worker_is_killed(dies, dies_at):
    """Speeds are exchanged in each step, or after every second one: the death shows in notes that lack the victim.

    With two survivors, a last batch of one sample begins the order again by one.
    """
    with LocalJob(num_workers=3, num_servers=2, on_worker_death="continue") as job:
        first, second = survivors_of(job, with_measured_shares, dies, dies_at)
    assert min(first) == 1
    assert sum(first) <= LENGTH + 1
    assert [after - before for before, after in zip(first, second, strict=True)] == [1.0] * LENGTH


def test_samples_that_a_loader_had_fetched_for_the_dead_come_in_the_next_epoch():
    """The victim dies in the last batch of the first epoch, when the others have fetched all of theirs."""
    with LocalJob(num_workers=3, num_servers=2, on_worker_death="continue") as job:
        first, second = survivors_of(job, with_a_loader_that_fetches_ahead)
    assert first.count(0.0) == 16
    assert second == [2.0] * LENGTH


def test_fetching_ahead_is_refused_where_samples_would_be_lost():
    with LocalJob(num_workers=1, num_servers=1) as job:
        [indices] = job.run(refuse_to_fetch_ahead)
    assert len(indices) == 8


def wait_in_vain(kind, options):
    store = ledger_store(kind, **options)
    if store.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError, match="worker 1"):
        store.barrier()
    return True


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("dist_sync", {}), ("dist_async", {"on_worker_death": "stop"})],
    ids=["lock step", "asked to"],
)
def test_death_ends_the_job_in_lock_step_and_where_it_is_asked_to(kind, settings):
    with LocalJob(num_workers=3, num_servers=1, **settings) as job:
        workers = job.start_all(wait_in_vain, kind, {})
        assert all(workers[rank].result(60) for rank in (0, 2))


def save_without_the_victim(folder):
    """Train until the victim is dead, then save and load."""
    store = paceline.kvstore.create("dist_async")
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), kvstore=store, model=model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    store.barrier()
    if store.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    store.barrier()
    paceline.save(f"{folder}/checkpoint", model, optimizer, step=1, extra=store.rank)
    return paceline.load(f"{folder}/checkpoint", model, optimizer).extra


def test_survivors_save_and_load_without_the_dead(tmp_path):
    with LocalJob(num_workers=3, num_servers=1) as job:
        workers = job.start_all(save_without_the_victim, str(tmp_path))
        assert workers[VICTIM].wait(60) == -signal.SIGKILL
        assert [workers[rank].result(60) for rank in (0, 2)] == [0, 2]
    assert len(list(tmp_path.iterdir())) == 2


def with_a_pool_and_a_replacement(kind, first):
    """Count samples on the servers for two epochs. The victim dies, and the others wait for a successor."""
    store = ledger_store(kind)
    sampler = paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4)
    out, batches = torch.empty(LENGTH), 0
    for epoch in range(sampler.epoch, 2):
        for indices in sampler:
            batches += 1
            if first and batches == DIES_AT and store.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            if first and epoch == 0 and batches == DIES_AT + 1:
                await_successor()
            store.push("ledger", trained_on(indices))
            store.pull("ledger", out)
    store.barrier()
    store.pull("ledger", out)
    return out.tolist(), batches


def await_successor():
    """Wait until another process has the rank of the victim, and counts."""
    await_death()
    end = time.monotonic() + 120
    while current_session().deaths():
        assert time.monotonic() < end, "nobody takes over"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssync"])
def test_pool_goes_on_with_a_process_that_takes_over_and_no_sample_is_lost_or_seen_twice(kind):
    with LocalJob(num_workers=3, num_servers=2) as job:
        workers = job.start_all(with_a_pool_and_a_replacement, kind, True)
        assert workers[VICTIM].wait(60) == -signal.SIGKILL
        later = {"PACELINE_INCARNATION": "1"}
        workers[VICTIM] = job.start(VICTIM, with_a_pool_and_a_replacement, kind, False, environment=later)
        found = [one.result(120) for one in workers]
    assert [ledger for ledger, _ in found] == [[2.0] * LENGTH] * 3
    assert found[VICTIM][1] > 0


def push_without_asking(first):
    """The victim dies; its successor pushes, and has not asked where the job is."""
    store = ledger_store("dist_sync")
    if first and store.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if first:
        return listen()
    with pytest.raises(PacelineError) as found:
        store.push("ledger", torch.ones(LENGTH))
    return str(found.value)


def test_loop_that_does_not_ask_where_the_job_is_gets_an_error_that_names_its_form():
    with LocalJob(num_workers=3, num_servers=1, on_worker_death="continue") as job:
        workers = job.start_all(push_without_asking, True)
        assert workers[VICTIM].wait(60) == -signal.SIGKILL
        again = job.start(VICTIM, push_without_asking, False, environment={"PACELINE_INCARNATION": "1"})
        assert "for epoch in range(sampler.epoch, epochs)" in again.result(120)
        for rank in (0, 2):
            workers[rank].tell("go on")
            assert workers[rank].result(60) == "go on"
