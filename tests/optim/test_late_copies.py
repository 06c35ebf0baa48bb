"""Copies that are late, as those of a busy CUDA device: pushes wait for them, and nothing reads host memory before.

A stand-in for a side stream does its work only when it is waited for, so the order is tested without a device.
``test_device_copies.py`` has the same with one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch

import paceline
from paceline.errors import PacelineError
from paceline.optim import binding, device, exchange
from paceline.optim.device import other_bits
from paceline.testing import LocalJob

Update = Literal["worker", "server"]


class Mark:
    """A place in the work of a late stream, which is reached when it was asked for several times."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._left = run, 3

    def query(self) -> bool:
        self._left -= 1
        if self._left > 0:
            return False
        self._run()
        return True


class LateStream:
    """Does what a side stream does, in order, when somebody waits for it and not before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: deque[Callable[[], object]] = deque()
        self._queued = self._done = 0

    def _later(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)
            self._queued += 1

    def _run(self, until: int) -> None:
        with self._lock, torch.no_grad():
            while self._done < until:
                self._work.popleft()()
                self._done += 1

    def fetch(self, grad: torch.Tensor, into: torch.Tensor) -> None:
        self._later(lambda: into.copy_(grad))

    def unlike(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        found = torch.tensor(False)
        self._later(lambda: found.copy_(other_bits(tensor, host)))
        return found

    def bring(self, values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.join()
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)

    def mark(self) -> Mark:
        until = self._queued
        return Mark(lambda: self._run(until))

    def join(self) -> None:
        self._run(self._queued)


def copy_late() -> LateStream:
    """Have this process's tensors copied late."""
    stream = LateStream()
    for module in (binding, device, exchange):
        module.side_stream = lambda tensor: stream  # type: ignore[attr-defined]
    return stream


def prepared(update: Update) -> tuple[torch.nn.Sequential, paceline.DistributedOptimizer]:
    torch.manual_seed(3)
    first, last = torch.nn.Linear(20, 30), torch.nn.Linear(30, 5)
    net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(30), torch.nn.Tanh(), last)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, paceline.DistributedOptimizer(inner, model=net, update=update)


def loss_of(net: torch.nn.Module, rank: int) -> torch.Tensor:
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    loss: torch.Tensor = net(inputs).square().mean()
    return loss


def train(update: Update, late: bool) -> list[float]:
    """Train a net, and set its gradients to zeros in place as soon as ``step`` has returned; return its weights."""
    if late:
        copy_late()
    net, optimizer = prepared(update)
    for _ in range(5):
        loss_of(net, optimizer.kvstore.rank).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return torch.cat([one.detach().flatten() for one in net.state_dict().values()]).tolist()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_late_copies_change_no_bit(update: Update) -> None:
    found = []
    for late in (True, False):
        with LocalJob(2, 1) as job:
            found.append(job.run(train, update, late))
    assert found[0] == found[1]


def change_weights() -> list[str]:
    """Change a weight behind torch's count of changes, and repair that; return the errors of three steps."""
    copy_late()
    net, optimizer = prepared("server")
    said = []
    for number in range(3):
        if number == 0:
            net[0].weight.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr,operator]
        if number == 1:
            optimizer.broadcast_weights()
        try:
            loss_of(net, optimizer.kvstore.rank).backward()
            optimizer.step()
        except PacelineError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return [*said, f"{len(said)} errors"]


def test_weight_that_a_loop_has_changed_is_an_error_of_the_step_where_copies_are_late() -> None:
    with LocalJob(2, 1) as job:
        for rank, said in enumerate(job.run(change_weights)):
            assert said[0].startswith(f"worker {rank}: parameter '0.weight' was changed after the last step")
            assert said[1:] == ["1 errors"]
