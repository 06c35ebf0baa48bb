"""What a training loop writes to weights and gradients is seen by its own process alone."""

from __future__ import annotations

import os

import pytest
import torch

import paceline
from paceline.testing import LocalJob


def digest(net):
    return [
        part for param in net.parameters() for part in (param.detach().sum().item(), param.grad.detach().sum().item())
    ]


def write_in_rank_0(update):
    """Train two steps; worker 0 zeroes its weights and gradients. Return what this worker holds before and after."""
    torch.manual_seed(0)
    net = torch.nn.Linear(300, 300)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = paceline.DistributedOptimizer(inner, "dist_sync", model=net, update=update)
    for _ in range(2):
        net(torch.ones(3, 300)).square().mean().backward()
        optimizer.step()
    before = digest(net)
    optimizer.kvstore.barrier()
    if optimizer.kvstore.rank == 0:
        for param in net.parameters():
            param.data.zero_()
            param.grad.zero_()
    optimizer.kvstore.barrier()
    return before, digest(net)


def write_in_child(update):
    """Train a step; a forked child zeroes weights and gradients. Return what the parent holds before and after."""
    net = torch.nn.Linear(300, 300)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = paceline.DistributedOptimizer(inner, "dist_sync", model=net, update=update)
    net(torch.ones(3, 300)).square().mean().backward()
    optimizer.step()
    before = digest(net)
    child = os.fork()
    if child == 0:
        for param in net.parameters():
            param.data.zero_()
            param.grad.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    return before, digest(net)


def stand_still(kind):
    """While this worker is between forward and backward, the other one takes five steps. Return what it has seen."""
    torch.manual_seed(0)
    net = torch.nn.Linear(30, 30)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), kind, model=net)
    session = optimizer.kvstore.session
    loss = net(torch.ones(3, 30)).square().mean()
    before = net.weight.detach().clone()
    session.barrier("forward")
    if optimizer.kvstore.rank == 1:
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(3, 30)).square().mean().backward()
            optimizer.step()
    session.barrier("the other has stepped")
    same = torch.equal(net.weight, before)
    if optimizer.kvstore.rank == 0:
        loss.backward()
        optimizer.step()
    return same, torch.equal(net.weight, before)


def run_all():
    """Do everything in one job, also in a forked child of each worker."""
    found = {f"writes, {update}": write_in_rank_0(update) for update in UPDATES}
    found |= {f"child, {update}": write_in_child(update) for update in UPDATES}
    return found | {kind: stand_still(kind) for kind in KINDS}


UPDATES, KINDS = ("worker", "server"), ("dist_async", "dist_ksync")


@pytest.fixture(scope="module")
def found():
    with LocalJob(2, 1) as job:
        return job.run(run_all, timeout_s=60)


@pytest.mark.parametrize("update", UPDATES)
def test_writes_of_one_worker_reach_no_other(found, update: str) -> None:
    writer, other = (worker[f"writes, {update}"] for worker in found)
    assert writer[1] == [0.0] * 4
    assert other[0] == other[1]
    assert 0.0 not in other[1]


@pytest.mark.parametrize("update", UPDATES)
def test_writes_of_a_forked_child_do_not_reach_its_parent(found, update: str) -> None:
    for worker in found:
        before, after = worker[f"child, {update}"]
        assert before == after
        assert 0.0 not in after


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stand_still_from_forward_to_step_while_servers_step_for_others(found, kind: str) -> None:
    (same, after), (moved, _) = (worker[kind] for worker in found)
    assert same
    assert not after
    assert not moved
