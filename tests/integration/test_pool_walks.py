"""How programs use a pool: they look at a batch, leave loops early, make samplers anew, go back, come late."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.data.ledger import epoch_order
from paceline.testing import LocalJob

LENGTH, WORKERS = 60, 3


class Job:
    """One worker's part of every scenario; each returns what the worker trained on, and more."""

    def __init__(self):
        self.store = paceline.kvstore.create("dist_async")
        self.store.set_optimizer("add")
        self.store.init("pushes", torch.zeros(1))
        self.rank = self.store.rank

    def sampler(self, name, length=LENGTH, **options):
        return paceline.data.PooledBatchSampler(length, self.store, batch_size=4, name=name, **options)

    def push(self):
        self.store.push("pushes", torch.ones(1))

    def train(self, batches, stop=None):
        trained = []
        for number, indices in enumerate(batches, start=1):
            self.push()
            trained += torch.as_tensor(indices).tolist()
            if number == stop:
                break
        return trained

    # ---- scenarios -------------------------------------------------------------------------------------------------

    def look_first(self):
        """Look at a batch, as one does to see its shape, then train."""
        loader = DataLoader(range(LENGTH), batch_sampler=self.sampler("look"))
        size = len(next(iter(loader)))
        self.store.barrier()
        return self.train(loader), size, loader.batch_sampler.epoch

    def one_leaves_its_loop(self):
        """Worker 0 leaves each loop after a batch, and waits for the others at a barrier."""
        sampler, epochs = self.sampler("leaves"), []
        for _ in range(2):
            epochs.append(self.train(sampler, stop=1 if self.rank == 0 else None))
            self.store.barrier()
        return epochs

    def one_leaves_before_its_push(self):
        """Worker 0 gives its batch back; the others train on it."""
        sampler = self.sampler("before its push")
        trained = []
        for indices in sampler:
            if self.rank == 0:
                break
            self.push()
            trained += indices
        return trained

    def all_leave_their_loops(self):
        """Each trains on one batch; what comes next is the next epoch, whole."""
        sampler = self.sampler("all leave")
        first = self.train(sampler, stop=1)
        return first, self.train(sampler), sampler.epoch

    def one_comes_to_a_barrier_with_a_batch(self):
        """Worker 0 has trained on a batch, and does not ask for another; the others find the epoch over."""
        walk, trained = iter(self.sampler("barrier")), []
        if self.rank == 0:
            trained += next(walk)
            self.push()
        self.store.barrier()
        if self.rank != 0:
            trained += self.train(walk)
        self.store.barrier()
        return trained + self.train(walk)

    def new_samplers(self):
        """Each epoch has a sampler of its own, without a name."""
        return [self.train(paceline.data.PooledBatchSampler(LENGTH, self.store, batch_size=4)) for _ in range(2)]

    def one_comes_late(self):
        """Worker 2 begins when the others have finished an epoch."""
        sampler, epochs = self.sampler("late"), []
        if self.rank == 2:
            self.store.barrier()
        epochs.append(self.train(sampler))
        if self.rank != 2:
            self.store.barrier()
        self.store.barrier()
        epochs.append(self.train(sampler))
        return epochs

    def stop_now_and_then(self):
        """All loops end after 25 samples; a state is the same on all workers there."""
        sampler, walks = self.sampler("stops", stop_every=25), []
        while sampler.next_epoch < 2:
            trained = self.train(sampler)
            walks.append((trained, sampler.epoch, sampler.state_dict()["left"]))
            self.store.barrier()  # as paceline.save is
        return walks

    def choose_epochs(self):
        """Epochs are chosen, one of them twice."""
        sampler, epochs = self.sampler("chosen", shuffle=True, seed=5), []
        for epoch in (7, 7, 2):
            sampler.set_epoch(epoch)
            epochs.append((sampler.epoch, self.train(sampler)))
        return epochs

    def go_back(self):
        """Take a state in mid-epoch, finish the epoch, and go back to the state."""
        sampler, trained, state = self.sampler("back"), [], None
        walk = iter(sampler)
        for _ in range(2):
            trained += next(walk)
            self.push()
        self.store.barrier()
        state = sampler.state_dict()
        self.store.barrier()
        self.train(walk)
        sampler.load_state_dict(state)
        loaded = sampler.state_dict()
        self.store.barrier()
        return trained + self.train(sampler), sampler.epoch, loaded == state

    def disagree(self):
        """Worker 1 loads another state, is refused, and loads the right one."""
        sampler = self.sampler("disagree")
        state = sampler.state_dict()
        sampler.load_state_dict(state | {"left": [[30, LENGTH]]})
        if self.rank != 1:
            trained = self.train(sampler, stop=1)
            self.store.barrier()
        else:
            sampler.load_state_dict(state | {"left": [[31, LENGTH]]})
            walk = iter(sampler)
            self.store.barrier()
            with pytest.raises(ValueError, match="all workers load the same state"):
                next(walk)
            sampler.load_state_dict(state | {"left": [[30, LENGTH]]})
            trained = self.train(sampler)
        return trained

    def ask_too_early(self):
        """Worker 1 holds a batch that it has not pushed for when worker 0 takes a state."""
        sampler, lines, handler = self.sampler("early"), [], logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("paceline.data.pool").addHandler(handler)
        walk = iter(sampler)
        indices = next(walk)
        if self.rank != 1:
            self.push()
        self.store.barrier()
        left = sampler.state_dict()["left"]
        self.store.barrier()
        return indices, sum(stop - start for start, stop in left), lines

    def refusals(self):
        sampler = self.sampler("refusals")
        with pytest.raises(ValueError, match="give it a name of its own"):
            self.sampler("refusals", length=LENGTH + 1)
        with pytest.raises(ValueError, match="stop_every 0"):
            self.sampler("other", stop_every=0)
        with pytest.raises(TypeError, match="depends on the others"):
            len(DataLoader(range(LENGTH), batch_sampler=sampler))
        assert sampler
        with pytest.raises(ValueError, match="epochs count from 0"):
            sampler.set_epoch(-1)
        state = sampler.state_dict()
        for wrong in ([[0, LENGTH + 1]], [[3, 2]], [], [[2, 4], [3, 6]]):
            with pytest.raises(ValueError, match="the state names positions"):
                sampler.load_state_dict(state | {"left": wrong})
        with pytest.raises(ValueError, match=r"in the middle of epoch 0 with \{'seed': 1\}"):
            sampler.load_state_dict(state | {"left": [[3, LENGTH]], "seed": 1})
        sampler.load_state_dict(state | {"seed": 1, "epoch": 4})
        return sampler.state_dict()


def use():
    job, results = Job(), {}
    for scenario in (one for one in vars(Job) if (getattr(Job, one).__doc__ or one == "refusals") and one[0] != "_"):
        results[scenario] = getattr(job, scenario)()
        job.store.barrier()
    return results


@pytest.fixture(scope="module")
def results():
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        return job.run(use)


def together(parts):
    return sorted(index for one in parts for index in one)


EPOCH = list(range(LENGTH))


def of(results, scenario):
    return [one[scenario] for one in results]


def test_look_at_a_batch_costs_nothing(results):
    trained, sizes, epochs = zip(*of(results, "look_first"), strict=True)
    assert (together(trained), sizes, epochs) == (EPOCH, (4,) * WORKERS, (0,) * WORKERS)


def test_loop_that_one_worker_leaves_is_finished_by_the_others(results):
    for epochs in zip(*of(results, "one_leaves_its_loop"), strict=True):
        assert len(epochs[0]) <= 4
        assert together(epochs) == EPOCH
    nothing, *others = of(results, "one_leaves_before_its_push")
    assert nothing == []
    assert together(others) == EPOCH


def test_epoch_that_all_leave_is_over(results):
    first, second, epochs = zip(*of(results, "all_leave_their_loops"), strict=True)
    assert len(set(together(first))) == 4 * WORKERS
    assert (together(second), epochs) == (EPOCH, (1,) * WORKERS)


def test_worker_at_a_barrier_does_not_hold_up_the_epoch(results):
    assert together(of(results, "one_comes_to_a_barrier_with_a_batch")) == EPOCH


def test_samplers_of_one_name_go_on_with_the_next_epoch(results):
    for epoch in zip(*of(results, "new_samplers"), strict=True):
        assert together(epoch) == EPOCH


def test_worker_that_comes_late_joins_the_next_epoch(results):
    first, second = zip(*of(results, "one_comes_late"), strict=True)
    assert (together(first), first[2]) == (EPOCH, [])
    assert together(second) == EPOCH


def test_loops_end_together_to_save(results):
    walks = list(zip(*of(results, "stop_now_and_then"), strict=True))
    parts = [together(one[0] for one in walk) for walk in walks]
    assert [len(part) for part in parts] == [25, 25, 10] * 2
    assert together(parts[:3]) == together(parts[3:]) == EPOCH
    where = [{(one[1], str(one[2])) for one in walk} for walk in walks]
    lefts = ["[[25, 60]]", "[[50, 60]]", "[[0, 60]]"]
    assert where == [{(epoch, left)} for epoch in range(2) for left in lefts]


def test_epochs_are_those_that_are_chosen(results):
    for number, epoch in enumerate((7, 7, 2)):
        one = [result[number] for result in of(results, "choose_epochs")]
        assert {part[0] for part in one} == {epoch}
        assert together(part[1] for part in one) == EPOCH
        order = epoch_order(LENGTH, 5, epoch).tolist()
        for _, part in one:
            assert [order.index(index) for index in part] == sorted(order.index(index) for index in part)


def test_job_can_go_back_to_a_state(results):
    trained, epochs, same = zip(*of(results, "go_back"), strict=True)
    assert (together(trained), epochs, same) == (EPOCH, (0,) * WORKERS, (True,) * WORKERS)


def test_workers_with_different_states_are_told(results):
    trained = of(results, "disagree")
    order = epoch_order(LENGTH, 0, 0).tolist()
    assert together(trained) == sorted(order[30:])


def test_state_counts_what_others_hold_as_not_trained_on_and_says_so(results):
    indices, left, lines = zip(*of(results, "ask_too_early"), strict=True)
    assert len(set(together(indices))) == 4 * WORKERS
    assert left == (LENGTH - 8,) * WORKERS
    assert [len(one) for one in lines] == [1, 0, 1]
    assert "workers 1 hold" in lines[0][0]
    assert "call store.barrier()" in lines[0][0]


def test_what_makes_no_sense_is_refused(results):
    [one, *_] = of(results, "refusals")
    assert one == {"epoch": 4, "left": [[0, LENGTH]], "length": LENGTH, "seed": 0, "shuffle": True}
