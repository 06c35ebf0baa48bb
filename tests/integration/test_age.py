"""The age limit in real processes: what is too old is dropped, told in the counters, and training goes on."""

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob

#: Who pushes, turn by turn.
RINGMASTER, RENNALA = [0, 0, 1, 1, 0, 1, 0, 0, 1], [0, 0, 1, 0, 1, 1]
KEYS, ROUNDS = ["a", "b"], 60


# ---- what runs in the workers --------------------------------------------------------------------------------------


def new_store(kind, **options):
    store = kvstore.create(kind, **options)
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(KEYS, [torch.zeros(500), torch.zeros(300)])
    store.barrier()
    return store


def outcome(store, values):
    """Return the counters when everybody has come, and what the first element of every key is then."""
    store.barrier()
    store.pull(KEYS, values)
    assert all(bool((value == value[0]).all()) for value in values)
    return {"stats": store.stats(), "values": [value[0].item() for value in values]}


def take_turns(kind, order, **options):
    """Push the number of the turn, one worker after the other."""
    store, clock = new_store(kind, **options), kvstore.create("dist_sync")
    values = [torch.zeros(500), torch.zeros(300)]
    for turn, worker in enumerate(order, start=1):
        if store.rank == worker:
            store.pushpull(KEYS, [torch.full_like(value, turn) for value in values], values)
        clock.barrier()
    return outcome(store, values)


def descend():
    """Walk to 1 as fast as everybody can, by gradients of a quadratic function."""
    store, values = new_store("dist_async", age=1), [torch.zeros(500), torch.zeros(300)]
    for _ in range(ROUNDS):
        store.pushpull(KEYS, [0.1 * (value - 1.0) for value in values], values)
    return outcome(store, values)


def run_all():
    return {
        "ringmaster": take_turns("dist_async", RINGMASTER),
        "rennala": take_turns("dist_ksync", RENNALA, k=3),
        "no limit in lock step": kvstore.create("dist_sync").policy.age,
        "descend": descend(),
    }


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    with LocalJob(2, 2, timeout_s=60, age=0) as job:
        return job.run(run_all)


def test_pushes_that_missed_an_update_are_dropped_and_told_by_worker(found):
    for worker in found:
        stats = worker["ringmaster"]["stats"]
        assert (stats["updates"], stats["dropped"]) == (5, 4)
        assert stats["dropped_by_worker"] == {"0": 2, "1": 2}
        assert stats["data_mass"] == {"0": 3, "1": 2}
        assert worker["ringmaster"]["values"] == [-(1 + 2 + 4 + 6 + 8)] * 2


def test_more_fresh_gradients_than_workers_make_an_update_and_a_barrier_applies_the_rest(found):
    for worker in found:
        stats = worker["rennala"]["stats"]
        assert (stats["updates"], stats["dropped"]) == (2, 1)
        assert stats["dropped_by_worker"] == {"0": 1}
        assert stats["data_mass"] == {"0": 2, "1": 3}
        assert worker["rennala"]["values"] == [-(1 + 2 + 3) - (5 + 6)] * 2


def test_age_of_the_job_means_the_stores_that_have_one(found):
    assert [worker["no limit in lock step"] for worker in found] == [None, None]


def test_training_goes_on_while_pushes_are_dropped(found):
    for worker in found:
        stats = worker["descend"]["stats"]
        assert stats["updates"] + stats["dropped"] == 2 * ROUNDS
        assert set(stats["staleness"]) <= {"1", "2"}
        assert worker["descend"]["values"] == pytest.approx([1.0, 1.0], abs=0.01)
