"""Weights that a loop writes: honoured where workers hold them, noticed where servers do."""

import pytest
import torch

import paceline
from paceline.testing import LocalJob


def load_state_dict(net):
    net.load_state_dict({name: torch.ones_like(value) for name, value in net.state_dict().items()})


def write_through_data(net):
    for param in net.parameters():
        param.data.fill_(1.0)


def one_element(net):
    net.weight.data[0, 0] = 1.0


WRITES = {"load_state_dict": load_state_dict, "data": write_through_data, "one element": one_element}


def change_weights(update, write, tell):
    """Train a step, write weights, train another step; return the weights of one process and ours, or the error."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = paceline.DistributedOptimizer(optimizer, "dist_sync", model=net, update=update)
    torch.manual_seed(0)
    alone = torch.nn.Linear(4, 2)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    try:
        for each, stepper in ((net, optimizer), (alone, other)):
            for step in range(2):
                each(torch.ones(3, 4)).sum().backward()
                stepper.step()
                stepper.zero_grad()
                if step == 0:
                    WRITES[write](each)
                    if tell and stepper is optimizer:
                        optimizer.broadcast_weights()
    except paceline.errors.PacelineError as error:
        return str(error)
    return [(one - two).abs().max().item() for one, two in zip(net.parameters(), alone.parameters(), strict=True)]


def change_in_all_ways():
    """Change weights in every way, where workers and where servers step, alone and for everybody."""
    found = {f"{update}, {write}": change_weights(update, write, False) for update in UPDATES for write in WRITES}
    return found | {f"{update}, told": change_weights(update, "data", True) for update in UPDATES}


UPDATES = ("worker", "server")


@pytest.fixture(scope="module")
def found():
    with LocalJob(2, 2) as job:
        return job.run(change_in_all_ways, timeout_s=60)


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_in_all_workers_count(found, write: str) -> None:
    assert max(max(worker[f"worker, {write}"]) for worker in found) <= 1e-6


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_where_servers_hold_them_are_an_error_in_the_next_step(found, write: str) -> None:
    for said in (worker[f"server, {write}"] for worker in found):
        assert "parameter 'weight' was changed" in said or "parameter 'bias' was changed" in said
        assert "optimizer.broadcast_weights()" in said
        assert "update='worker'" in said


@pytest.mark.parametrize("update", UPDATES)
def test_broadcast_weights_makes_written_weights_everybodys(found, update: str) -> None:
    assert max(max(worker[f"{update}, told"]) for worker in found) <= 1e-6
