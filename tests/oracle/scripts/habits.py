"""Loops as in public code: nets that are called without gradients or averaged, optimizers stepped in backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import STEPS, Result, Run, Tensors
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp


def train(run: Run, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> nn.Module:
    optimizer = run.distribute(optimizer, net, **options)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def stochastic_weight_averaging(run: Run) -> Result:
    """After ten steps each fifth has a rate of its own, and its weights are averaged."""
    net = mlp()
    averaged = torch.optim.swa_utils.AveragedModel(net)
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), net)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        if step >= 10 and step % 5 == 0:
            averaged.update_parameters(net)
            schedule.step()
    return averaged.module


@script("equal")
def one_cycle_of_rate_and_momentum(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.AdamW(net.parameters(), lr=1e-2), net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        schedule.step()
    return net


@script("equal")
def schedule_made_before_wrapping(run: Run) -> Result:
    net = mlp()
    base = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(base, 7)
    optimizer = run.distribute(base, net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        schedule.step()
    return net


@script("equal")
def two_views_of_each_sample(run: Run) -> Result:
    """As in SimSiam: the net is called twice before one backward."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, _ in run.batches(labelled):
        optimizer.zero_grad()
        one, other = net(inputs + 0.1), net(inputs.flip(1))
        loss = -F.cosine_similarity(one, other.detach()).mean() - F.cosine_similarity(other, one.detach()).mean()
        loss.backward()
        optimizer.step()
    return net


@script("equal")
def labels_by_the_net_itself(run: Run) -> Result:
    """As in FixMatch: three times as many samples go through the net without gradients."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        with torch.no_grad():
            net(torch.cat([inputs, -inputs, inputs + 1]))
            soft = net(inputs.flip(0)).flip(0).softmax(1)
        (loss_of(net, inputs, targets) + F.cross_entropy(net(inputs * 1.1), soft)).backward()
        optimizer.step()
    return net


@script("equal")
def rollouts_before_each_step(run: Run) -> Result:
    """As in policy gradients: the net acts on single samples, a number of its own on each worker, then it learns."""
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for inputs, targets in run.batches(labelled):
        for row in inputs:
            with torch.no_grad():
                net(row[None])
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def evaluated_in_inference_mode(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        if step % 10 == 0 and run.rank == 0:
            net.eval()
            with torch.inference_mode():
                net(torch.zeros(100, FEATURES))
            net.train()
    return net


@script("equal")
def optimizer_of_named_parameters(run: Run) -> Result:
    net = mlp()
    return train(run, net, torch.optim.Adam(net.named_parameters(), lr=1e-2))


@script("equal")
def ascending(run: Run) -> Result:
    net = mlp()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, maximize=True, nesterov=True, momentum=0.9)
    optimizer = run.distribute(inner, net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        (-loss_of(net, inputs, targets)).backward()
        optimizer.step()
    return net


@script("equal")
def data_parallel_of_one_device(run: Run) -> Result:
    net = nn.DataParallel(mlp())
    return train(run, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


@script("equal")
def spectral_norm(run: Run) -> Result:
    net = mlp()
    nn.utils.spectral_norm(net[0])
    return train(run, net, torch.optim.SGD(net.parameters(), lr=0.1))


@script("equal")
def weight_norm_of_old(run: Run) -> Result:
    net = mlp()
    nn.utils.weight_norm(net[0])
    return train(run, net, torch.optim.SGD(net.parameters(), lr=0.1))


@script("equal")
def channels_last(run: Run) -> Result:
    net = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, CLASSES))
    net = net.to(memory_format=torch.channels_last)
    return train(run, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


@script("equal")
def graph_of_the_gradients(run: Run) -> Result:
    """A penalty on the gradients, which are made with a graph of their own by autograd."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        inputs.requires_grad_()
        [slope] = torch.autograd.grad(net(inputs).square().sum(), inputs, create_graph=True)
        (loss_of(net, inputs, targets) + slope.square().sum(1).mean() * 0.01).backward()
        optimizer.step()
    return net


@script("equal")
def tensors_that_are_no_module(run: Run) -> Result:
    table = torch.zeros(FEATURES, CLASSES, requires_grad=True)
    optimizer = run.distribute(torch.optim.Adam([table], lr=0.1), None)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        F.cross_entropy(inputs @ table, targets).backward()
        optimizer.step()
    return table


@script("equal")
def some_layers_only(run: Run) -> Result:
    """``backward(inputs=...)``: the first layer gets no gradient."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward(inputs=list(net[2].parameters()))
        optimizer.step()
    return net


@script("refused in its step", other="refused in its step")
def two_optimizers_that_share_a_trunk(run: Run) -> Result:
    """As actor and critic: both step the first layers, each on the gradients of its own loss. Samples are told."""
    trunk, actor, critic = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)
    nets = nn.ModuleDict({"actor": nn.Sequential(trunk, nn.Tanh(), actor), "critic": nn.Sequential(trunk, critic)})
    acting = run.distribute(torch.optim.SGD(nets["actor"].parameters(), lr=0.1), nets["actor"])
    judging = run.distribute(torch.optim.SGD(nets["critic"].parameters(), lr=0.05), nets["critic"])
    for inputs, targets in run.batches(labelled):
        acting.samples = judging.samples = len(inputs)
        acting.zero_grad()
        loss_of(nets["actor"], inputs, targets).backward()
        acting.step()
        judging.zero_grad()
        (nets["critic"](inputs).squeeze(1) - targets).square().mean().backward()
        judging.step()
    return nets


@script("equal")
def steps_in_backward(run: Run) -> Result:
    """As in the tutorial on memory: an optimizer for each parameter steps as soon as its gradient is there."""
    net = mlp()
    optimizers = {}
    for param in net.parameters():
        optimizers[param] = run.distribute(torch.optim.SGD([param], lr=0.1, momentum=0.9), None, samples=1)

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(step)
    for inputs, targets in run.batches(labelled):
        for one in optimizers.values():
            if not run.joined:
                one.samples = len(inputs)
        loss_of(net, inputs, targets).backward()
    return net


@script("equal")
def accumulated_by_hand(run: Run) -> Result:
    """Gradients are taken out, summed elsewhere, and put back before the step."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    sums = [torch.zeros_like(param) for param in net.parameters()]
    for step, (inputs, targets) in enumerate(run.batches(labelled, alike=2)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for total, param in zip(sums, net.parameters(), strict=True):
            total.add_(param.grad / 2)
        if step % 2:
            for total, param in zip(sums, net.parameters(), strict=True):
                param.grad.copy_(total)
                total.zero_()
            optimizer.step()
    return net


class Averaging(torch.optim.Optimizer):
    """As those without schedules: it trains on other weights than it is evaluated on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.trains = True

    def _swap(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "mean" in self.state[param]:
                    other = self.state[param]["mean"].clone()
                    self.state[param]["mean"].copy_(param.data)
                    param.data.copy_(other)

    def eval(self) -> None:
        if self.trains:
            self._swap()
        self.trains = False

    def train(self) -> None:
        if not self.trains:
            self._swap()
        self.trains = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])
                mean = self.state[param].setdefault("mean", param.clone())
                mean.lerp_(param, 1 / group["steps"])


def series(count: int, generator: torch.Generator) -> Tensors:
    return (torch.randn(count, 5, FEATURES, generator=generator),)


@script("equal")
def truncated_backpropagation(run: Run) -> Result:
    """The state of a recurrent net goes on, detached, from one window of the samples to the next."""
    net, head = nn.GRU(FEATURES, 8, batch_first=True), nn.Linear(8, 1)
    nets = nn.ModuleList([net, head])
    optimizer = run.distribute(torch.optim.SGD(nets.parameters(), lr=0.1), nets)
    state = None
    for step, (inputs,) in enumerate(run.batches(series, alike=10)):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        outputs, state = net(inputs, state if step % 10 else None)
        state = state.detach()
        (head(outputs).squeeze(2) - inputs.sum(2)).square().mean().backward()
        optimizer.step()
    return nets


@script("refused at once")
def trained_on_other_weights(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(Averaging(net.parameters(), lr=0.2), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.train()
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        if step % 10 == 0:
            optimizer.eval()
            net(inputs.detach())
    optimizer.eval()
    return net


@script("refused in its step", other="refused in its step")
def state_loaded_into_the_wrapped_optimizer(run: Run) -> Result:
    """The state of a checkpoint goes into the optimizer that was wrapped."""
    net = mlp()
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = run.distribute(base, net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == 10:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 20:
            base.load_state_dict(saved)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def state_saved_from_the_wrapped_optimizer(run: Run) -> Result:
    net = mlp()
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = run.distribute(base, net)
    for inputs, targets in run.batches(labelled, 20):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    saved = base.state_dict()["state"]
    return [saved[number]["momentum_buffer"] for number in sorted(saved)]


@script("equal")
def autocast(run: Run) -> Result:
    """Sums of bfloat16 round by the batch, so the weights stay far from where that shows."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=1e-5), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, inputs, targets)
        loss.backward()
        optimizer.step()
    return net
