"""Weights that are read, kept, averaged, written and brought back beside the optimizer."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.oracle.registry import script
from tests.oracle.run import Result, Run
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp


def start(run: Run) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = mlp()
    return net, run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(net, inputs, targets).backward()
    optimizer.step()


@script("equal", dtype=torch.float64)
def ema_by_hand(run: Run) -> Result:
    net, optimizer = start(run)
    mean = {name: param.data.clone() for name, param in net.named_parameters()}
    for batch in run.batches(labelled):
        train_step(net, optimizer, *batch)
        for name, param in net.named_parameters():
            mean[name].mul_(0.9).add_(param.data, alpha=0.1)
    return net, mean


@script("equal", dtype=torch.float64)
def ema_by_averaged_model(run: Run) -> Result:
    net, optimizer = start(run)
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in run.batches(labelled):
        train_step(net, optimizer, *batch)
        mean.update_parameters(net)
    return net, mean.module


@script("equal", dtype=torch.float64)
def ema_by_state_dict(run: Run) -> Result:
    net, optimizer = start(run)
    mean = copy.deepcopy(net).eval()
    for batch in run.batches(labelled):
        train_step(net, optimizer, *batch)
        with torch.no_grad():
            now = net.state_dict()
            for name, value in mean.state_dict().items():
                value.lerp_(now[name], 0.1)
    return net, mean


@script("equal", dtype=torch.float64)
def ema_swapped_in_and_out(run: Run) -> Result:
    """For an evaluation the averages are put in the net, and its own weights back before it trains on."""
    net, optimizer = start(run)
    mean = [param.detach().clone() for param in net.parameters()]
    outputs = []
    probe = torch.linspace(-1, 1, FEATURES).expand(2, FEATURES)
    for step, batch in enumerate(run.batches(labelled)):
        train_step(net, optimizer, *batch)
        for one, param in zip(mean, net.parameters(), strict=True):
            one.lerp_(param.data, 0.1)
        if step % 10 == 9:
            kept = [param.data.clone() for param in net.parameters()]
            for one, param in zip(mean, net.parameters(), strict=True):
                param.data.copy_(one)
            with torch.no_grad():
                outputs.append(net.eval()(probe))
            for one, param in zip(kept, net.parameters(), strict=True):
                param.data.copy_(one)
            net.train()
    return net, outputs


@script("equal", dtype=torch.float64)
def deep_copies(run: Run) -> Result:
    """Copies stay what they were, and train nothing."""
    net, optimizer = start(run)
    copies = []
    for step, batch in enumerate(run.batches(labelled)):
        if step % 15 == 0:
            copies.append(copy.deepcopy(net))
        train_step(net, optimizer, *batch)
    loss_of(copies[-1], *batch).backward()  # of a copy: nobody else hears of it
    return net, copies


@script("equal", dtype=torch.float64)
def saved_whole(run: Run) -> Result:
    net, optimizer = start(run)
    for batch in run.batches(labelled):
        train_step(net, optimizer, *batch)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return net, torch.load(file, weights_only=False)


@script("refused in its step", other="refused in its step", dtype=torch.float64)
def lookahead(run: Run) -> Result:
    """Zhang et al. 2019: every 5 steps the weights go half the way back, written through ``.data``."""
    net, optimizer = start(run)
    slow = [param.data.clone() for param in net.parameters()]
    for step, batch in enumerate(run.batches(labelled)):
        train_step(net, optimizer, *batch)
        if step % 5 == 4:
            for one, param in zip(slow, net.parameters(), strict=True):
                one.add_(param.data - one, alpha=0.5)
                param.data.copy_(one)
    return net


@script("refused in its step", other="refused in its step", dtype=torch.float64)
def back_to_earlier_weights(run: Run) -> Result:
    net, optimizer = start(run)
    for step, batch in enumerate(run.batches(labelled)):
        if step == 10:
            best = copy.deepcopy(net.state_dict())
        if step == 20:
            net.load_state_dict(best)
        train_step(net, optimizer, *batch)
    return net


@script("equal", dtype=torch.float64)
def weights_of_rank_0_for_all(run: Run) -> Result:
    """A layer is made anew from each process's own chances; one call makes rank 0's everybody's."""
    net, optimizer = start(run)
    for step, batch in enumerate(run.batches(labelled)):
        if step == 20:
            net[2].reset_parameters()
            if not run.joined:
                optimizer.broadcast_weights()
        train_step(net, optimizer, *batch)
    return net


@script("equal", dtype=torch.float64)
def state_kept_and_loaded(run: Run) -> Result:
    """Net and optimizer go through their state dicts into new ones in the middle."""
    net, optimizer = start(run)
    for step, batch in enumerate(run.batches(labelled)):
        if step == 15:
            states = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
            net.load_state_dict(states[0])
            optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
            optimizer.load_state_dict(states[1])
        train_step(net, optimizer, *batch)
    return net
