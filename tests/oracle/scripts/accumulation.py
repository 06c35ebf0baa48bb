"""Several backward passes before one step."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import STEPS, Result, Run
from tests.oracle.scripts.parts import labelled, loss_of, mlp


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.05)


@script("at step", dtype=torch.float64)
def accumulation_untold(run: Run) -> Result:
    """Passes of one step are cut unlike each other, and each counts as the joined pass does."""
    net = mlp()
    optimizer = run.distribute(adam(net), net)
    for index, (inputs, targets) in enumerate(run.batches(labelled, 2 * STEPS)):
        (loss_of(net, inputs, targets) / 2).backward()
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return net


@script("at step", dtype=torch.float64)
def accumulation_in_place(run: Run) -> Result:
    """With gradients zeroed in place, three passes."""
    net = mlp()
    optimizer = run.distribute(adam(net), net)
    for index, (inputs, targets) in enumerate(run.batches(labelled, 3 * STEPS)):
        if index % 3 == 0:
            optimizer.zero_grad(set_to_none=False)
        (loss_of(net, inputs, targets) / 3).backward()
        if index % 3 == 2:
            optimizer.step()
    return net


@script("equal", dtype=torch.float64)
def accumulation_told(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(adam(net), net, backward_passes_per_step=2)
    for index, (inputs, targets) in enumerate(run.batches(labelled, 2 * STEPS, alike=2)):
        (loss_of(net, inputs, targets) / 2).backward()
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return net


@script("equal", dtype=torch.float64)
def accumulation_told_with_a_short_end(run: Run) -> Result:
    """An epoch ends in the middle of a step: what is there is applied."""
    net = mlp()
    optimizer = run.distribute(adam(net), net, backward_passes_per_step=2)
    for index, (inputs, targets) in enumerate(run.batches(labelled, 35, alike=7)):
        (loss_of(net, inputs, targets) / 2).backward()
        if index % 7 in (1, 3, 5, 6):
            optimizer.step()
            optimizer.zero_grad()
    return net


@script("equal", dtype=torch.float64)
def accumulation_told_with_a_rest_forgotten(run: Run) -> Result:
    """An epoch ends in the middle of a step, and the next one forgets what is there."""
    net = mlp()
    optimizer = run.distribute(adam(net), net, backward_passes_per_step=2)
    for _ in range(5):
        optimizer.zero_grad()
        for index, (inputs, targets) in enumerate(run.batches(labelled, 9, alike=2)):
            (loss_of(net, inputs, targets) / 2).backward()
            if index % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    return net


@script("refused in its step", other="refused in its step", dtype=torch.float64)
def accumulation_no_sync(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(adam(net), net)
    batches = run.batches(labelled, 3 * STEPS, alike=3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with run.no_sync(optimizer):
            for _ in range(2):
                (loss_of(net, *next(batches)) / 3).backward()
        (loss_of(net, *next(batches)) / 3).backward()
        optimizer.step()
    return net


@script("equal")
def two_losses_of_one_forward(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        outputs = net(inputs)
        F.cross_entropy(outputs, targets).backward(retain_graph=True)
        (0.01 * outputs.square().mean()).backward()
        optimizer.step()
    return net


@script("at step")
def two_losses_of_two_batches(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    batches = run.batches(labelled, 2 * STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, *next(batches)).backward()
        (0.1 * net(next(batches)[0]).square().mean()).backward()
        optimizer.step()
    return net


@script("equal")
def backward_thrown_away(run: Run) -> Result:
    """A backward whose gradients are forgotten, as of a probe of the loss, before the one that counts."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    batches = run.batches(labelled, 2 * STEPS)
    for _ in range(STEPS):
        loss_of(net, *next(batches)).backward()
        optimizer.zero_grad()
        loss_of(net, *next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@script("at step", dtype=torch.float64)
def sharpness_aware(run: Run) -> Result:
    """SAM (Foret et al. 2021): a second backward at weights moved along the first one's gradient, and back."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in net.parameters()]).norm()
            old = [param.data.clone() for param in net.parameters()]
            for param in net.parameters():
                param.add_(param.grad, alpha=0.05 / (norm.item() + 1e-12))
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param, value in zip(net.parameters(), old, strict=True):
            param.data = value
        optimizer.step()
    return net
