"""Losses that are means over labels, of which batches have more or fewer than samples; and sums."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import Result, Run, Tensors
from tests.oracle.scripts.parts import CLASSES, labelled, mlp

#: Labels of padding, of which some batches have far more than others.
IGNORED = -100
WORDS, LENGTH = 11, 6


def padded(count: int, generator: torch.Generator) -> Tensors:
    """Texts of 1 to 6 words, with padding behind them."""
    texts = torch.randint(1, WORDS, (count, LENGTH + 1), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
    texts[:, 1:] = (texts[:, :1] * 3 + torch.arange(LENGTH)) % WORDS
    targets = texts[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    return texts[:, :-1].contiguous(), targets


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


@script("equal")
def labels_left_out(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net, weigh="loss")
    for inputs, targets in run.batches(labelled):
        known = targets.masked_fill(inputs[:, 0] > 0, IGNORED)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), known).backward()
        optimizer.step()
    return net


@script("equal")
def weights_of_classes(run: Run) -> Result:
    net = mlp()
    weights = torch.linspace(0.2, 3.0, CLASSES)
    optimizer = run.distribute(torch.optim.AdamW(net.parameters(), lr=0.01), net, weigh="loss")
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        nn.CrossEntropyLoss(weights)(net(inputs), targets).backward()
        optimizer.step()
    return net


@script("equal")
def texts_with_padding(run: Run) -> Result:
    net = reader()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.5), net, weigh="loss")
    for inputs, targets in run.batches(padded):
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@script("equal")
def masked_losses_by_hand(run: Run) -> Result:
    """The loss is a sum over the labels that count, divided by their number."""
    net = reader()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.5), net, weigh="loss")
    for inputs, targets in run.batches(padded):
        counts = (targets != IGNORED).flatten()
        losses = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
        ((losses * counts).sum() / counts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@script("equal")
def losses_chosen_by_a_mask(run: Run) -> Result:
    """The loss is the mean of the losses that a mask chooses."""
    net = reader()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.5), net, weigh="loss")
    for inputs, targets in run.batches(padded):
        optimizer.zero_grad()
        counts = targets != IGNORED
        F.multi_margin_loss(net(inputs)[counts], targets[counts]).backward()
        optimizer.step()
    return net


@script("equal")
def no_label_on_some_workers(run: Run) -> Result:
    """Where no label counts, the loss and its gradients are NaN."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net, weigh="loss")
    for inputs, targets in run.batches(labelled):
        known = targets.clone()
        known[1:] = IGNORED  # the joined batch has the first worker's label only
        if not run.joined and run.rank > 0:
            known[:] = IGNORED
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), known).backward()
        optimizer.step()
    return net


@script("equal")
def smoothed_labels_with_padding(run: Run) -> Result:
    """Texts are cut to the longest of the worker's batch."""
    net = reader()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=0.01), net, weigh="loss")
    for inputs, targets in run.batches(padded):
        longest = int((targets != IGNORED).sum(1).max())
        loss = F.cross_entropy(
            net(inputs[:, :longest]).transpose(1, 2), targets[:, :longest], label_smoothing=0.1, ignore_index=IGNORED
        )
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@script("equal")
def labels_that_are_told(run: Run) -> Result:
    """The loop says how many labels count."""
    net = reader()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.5), net)
    for inputs, targets in run.batches(padded):
        optimizer.samples = (targets != IGNORED).sum()
        optimizer.zero_grad()
        F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
    return net


@script("equal")
def steps_of_a_text(run: Run) -> Result:
    """The loss is a sum over the steps of a recurrent net, each of them a mean over the batch."""
    cell, head = nn.RNNCell(3, 6), nn.Linear(6, 4)
    net = nn.ModuleDict({"cell": cell, "head": head})
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.05), net)
    for inputs, targets in run.batches(
        lambda count, generator: (
            torch.randn(count, 5, 3, generator=generator),
            torch.randint(0, 4, (count, 5), generator=generator),
        )
    ):
        state, loss = torch.zeros(len(inputs), 6), torch.zeros(())
        for step in range(inputs.shape[1]):
            state = cell(inputs[:, step], state)
            loss = loss + F.cross_entropy(head(state), targets[:, step])
        optimizer.samples = len(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net
