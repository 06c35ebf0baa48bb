"""Which of worker 0's publications a late worker reads, in every order that lock step allows."""

from __future__ import annotations

import random

import pytest
from torch import nn

from paceline.optim.buffers import Buffers
from paceline.optim.publications import Rounds
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m


class Pair:
    """Worker 0, which changes its running means, and worker 1, which reads them; the rounds since they met last."""

    def __init__(self, seed: int) -> None:
        self.job, self.chance = OneProcess("ab", "ab", seed=seed), random.Random(seed)
        self.nets, self.stores = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)], self.job.stores()
        self.buffers = [Buffers(*one, []) for one in zip(self.stores, [[[net]] for net in self.nets], strict=True)]
        self.published, self.opened, self.settled = [self.mean(0)], [0, 0], [0, 0]

    def mean(self, worker: int) -> float:
        return float(self.nets[worker].running_mean[0])  # type: ignore[index]

    def change(self, worker: int, by: float) -> None:
        self.nets[worker].running_mean.add_(by)  # type: ignore[union-attr]

    def open(self, worker: int) -> None:
        if worker == 0 and self.chance.random() < 0.7:
            self.change(0, 1.0)
        sent = self.buffers[worker].publish()
        if worker == 0:
            assert sent is not None
            sent.wait()
            self.published.append(self.mean(0))
        self.opened[worker] += 1

    def settle(self, worker: int) -> None:
        self.buffers[worker].settled()
        self.settled[worker] += 1

    def meet(self) -> None:
        """Meet after rounds that worker 0 has made while worker 1 was waiting for it."""
        while self.settled[1] < self.opened[1]:
            self.settle(1)
        for _ in range(self.chance.randrange(4)):
            while self.settled[0] < self.opened[0]:
                self.settle(0)
            self.open(0)
        for one in self.stores:
            one.barrier()
        self.published, self.opened, self.settled = [self.published[-1]], [0, 0], [0, 0]

    def advance(self, worker: int) -> None:
        """Take the next step in a worker's life, unless it has to wait for the other."""
        if self.opened[worker] == self.settled[worker]:
            self.open(worker)
        elif self.opened[1 - worker] >= self.opened[worker]:
            self.settle(worker)

    def read(self) -> None:
        if self.chance.random() < 0.5:
            self.change(1, 100.0)  # as its own forward passes do
        self.buffers[1].take()


@pytest.mark.parametrize("seed", range(12))
def test_late_worker_reads_what_worker_0_published_in_its_last_round(seed: int) -> None:
    pair, reads = Pair(seed), 0
    for _ in range(80):
        what = pair.chance.random()
        if what < 0.05 and pair.opened[0] >= pair.opened[1]:
            pair.meet()
        elif what < 0.3:
            pair.buffers[1]._is_old = True  # as after a second settle, so that each read is looked at
            pair.read()
            assert pair.mean(1) == pair.published[pair.settled[1]]
            reads += 1
        else:
            pair.advance(pair.chance.randrange(2))
    assert reads > 5


def test_buffers_that_do_not_change_are_neither_sent_nor_pulled_again() -> None:
    pair = Pair(0)
    pair.change(0, 1.0)
    seen = []
    for _ in range(3):
        before = len(pair.job.requests)
        for worker in (0, 1):
            pair.buffers[worker].publish()
        pair.job.deliver_all()
        for worker in (0, 1):
            pair.settle(worker)
        pair.buffers[1].take()
        seen.append([type(body) for _, _, body in pair.job.requests[before:]])
    assert m.SetValues in seen[0]
    assert seen[1:] == [[m.Pull], [m.Pull]]


def test_values_that_are_set_while_a_round_is_under_way_are_kept() -> None:
    pair = Pair(0)
    pair.change(0, 1.0)
    for worker in (0, 1):
        pair.open(worker)
    pair.buffers[1].keep()
    pair.change(1, 7.0)
    pair.settle(1)
    pair.buffers[1].take()
    assert pair.mean(1) == 7.0


def test_workers_number_rounds_alike_after_one_has_come_back() -> None:
    """While it is away, others make rounds that it does not make."""
    stayed, back = Rounds(), Rounds()
    for rounds, made in ((stayed, 5), (back, 2)):
        for _ in range(made):
            before = rounds.open((1, 0))
            rounds.settle()
        assert rounds.last((1, 1)) == (1, 1, 0) > before
    assert stayed.open((1, 1)) == back.open((1, 1)) == (1, 1, 1)
