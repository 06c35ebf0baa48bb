"""Checkpoints of earlier releases are read. A file is made once, by the release that wrote its version first.

``job-format-1.ckpt`` is what ``save`` wrote of :func:`trained`'s result, with step 2 and ``{"note": "first"}``.
"""

from pathlib import Path

import torch

import paceline


def fresh():
    """Return a network, and its optimizer with momentum."""
    net = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    return net, paceline.DistributedOptimizer(sgd, kvstore=paceline.kvstore.create("local"), model=net)


def trained(steps):
    """Return a network and its optimizer after steps whose values are exact."""
    net, optimizer = fresh()
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def step(net, optimizer):
    net(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_job_of_format_1_goes_on_as_if_it_had_not_stopped():
    net, optimizer = fresh()
    found, words = paceline.load(Path(__file__).with_name("job-format-1.ckpt"), net, optimizer)
    assert (found, words) == (2, {"note": "first"})
    assert net.weight.tolist() == trained(2)[0].weight.tolist() == [[-1.25, -2.5]]
    step(net, optimizer)
    assert net.weight.tolist() == trained(3)[0].weight.tolist()
    assert net.bias.tolist() == trained(3)[0].bias.tolist()
