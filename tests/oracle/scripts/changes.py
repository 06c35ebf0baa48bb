"""Nets and optimizers that change after they were wrapped: heads, groups, states, dtypes; scripted, compiled nets."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.oracle.registry import script
from tests.oracle.run import Result, Run
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp
from tests.oracle.scripts.structure import decaying

#: The step before which a script changes something.
CHANGE = 20


def steps(run: Run, net: nn.Module, optimizer: Any, change: Any = None) -> nn.Module:
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == CHANGE and change is not None:
            change()
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("refused in its step", other="refused in its step")
def head_replaced(run: Run) -> Result:
    """Transfer to other classes: a new last layer, and a group for it."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        net[2] = nn.Linear(net[2].in_features, CLASSES)
        optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.05})

    return steps(run, net, optimizer, change)


@script("refused in its step", other="refused in its step")
def groups_replaced(run: Run) -> Result:
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = run.distribute(decaying(net[2].parameters()), net)

    def change() -> None:
        net[0].requires_grad_(True)
        old = optimizer.param_groups[0]
        optimizer.param_groups = [old, {**old, "params": list(net[0].parameters()), "lr": 0.02}]

    return steps(run, net, optimizer, change)


@script("equal")
def options_replaced(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        optimizer.param_groups = [{**group, "lr": 0.01, "momentum": 0.5} for group in optimizer.param_groups]

    return steps(run, net, optimizer, change)


@script("equal")
def state_replaced(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        optimizer.state = collections.defaultdict(dict)

    return steps(run, net, optimizer, change)


@script("refused in its step", other="refused in its step")
def state_cleared(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        optimizer.state.clear()

    return steps(run, net, optimizer, change)


@script("refused in its step", other="refused in its step")
def state_of_the_wrapped_optimizer_cleared(run: Run) -> Result:
    net = mlp()
    wrapped = decaying(net.parameters())
    optimizer = run.distribute(wrapped, net)
    return steps(run, net, optimizer, wrapped.state.clear)


@script("refused in its step", other="refused in its step")
def state_of_the_wrapped_optimizer_replaced(run: Run) -> Result:
    net = mlp()
    wrapped = decaying(net.parameters())

    def change() -> None:
        wrapped.state = collections.defaultdict(dict)

    return steps(run, net, run.distribute(wrapped, net), change)


@script("equal")
def state_of_the_start_loaded(run: Run) -> Result:
    """The optimizer starts anew: what it is given has no momentum."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    first = copy.deepcopy(optimizer.state_dict())
    return steps(run, net, optimizer, lambda: optimizer.load_state_dict(first))


@script("equal")
def state_looked_at(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    seen = []
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        seen.append(optimizer.state[net[0].weight]["momentum_buffer"].clone())
    return [net, seen[7], seen[-1]]


@script("refused in its step", worker="refused in its step", other="refused in its step")
def params_exchanged_in_a_group(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        net[2] = nn.Linear(net[2].in_features, CLASSES)
        optimizer.param_groups[0]["params"] = list(net.parameters())

    return steps(run, net, optimizer, change)


@script("equal")
def scripted(run: Run) -> Result:
    net = torch.jit.script(mlp())
    optimizer = run.distribute(decaying(net.parameters()), None)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def compiled_before(run: Run) -> Result:
    net = torch.compile(mlp(), backend="eager")
    return steps(run, net, run.distribute(decaying(net.parameters()), net))


@script("equal")
def compiled_after(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    return steps(run, torch.compile(net, backend="eager"), optimizer)


@script("equal")
def compiled_in_place(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    net.compile(backend="eager")
    return steps(run, net, optimizer)


def compiled_step(run: Run, backend: str) -> Result:
    """Train with a function that does all of a step, and is compiled."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    @torch.compile(backend=backend)
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()

    for inputs, targets in run.batches(labelled):
        step(inputs, targets)
    return net


@script("equal")
def compiled_train_step(run: Run) -> Result:
    return compiled_step(run, "eager")


@script("equal")
def compiled_train_step_that_hides_its_loss(run: Run) -> Result:
    return compiled_step(run, "aot_eager")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(FEATURES), torch.rand(FEATURES)))
        self.frozen = nn.Parameter(torch.randn(FEATURES, dtype=torch.cfloat), requires_grad=False)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(inputs) * self.turn * self.frozen
        return self.last(torch.fft.ifft(spectrum @ self.filter).abs())


@script("refused at once")
def complex_parameters(run: Run) -> Result:
    net = Complex()
    trained = [net.filter, *net.last.parameters()]
    steps(run, net, run.distribute(torch.optim.Adam(trained, 0.01), net))
    return [torch.view_as_real(net.filter), net.last, torch.view_as_real(net.turn), torch.view_as_real(net.frozen)]


@script("refused in its step", worker="refused in its step", other="refused in its step")
def made_double(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == CHANGE:
            net.double()
        optimizer.zero_grad()
        F.cross_entropy(net(inputs.to(net[0].weight.dtype)), targets).backward()
        optimizer.step()
    return net


@script("equal")
def two_optimizers_on_one_store(run: Run) -> Result:
    net = mlp()
    if not run.joined:
        import paceline

        run.kvstore = paceline.kvstore.create(run.kvstore)  # type: ignore[assignment]
    one = run.distribute(decaying(net[0].parameters()), net)
    other = run.distribute(torch.optim.Adam(net[2].parameters()), net)
    for inputs, targets in run.batches(labelled):
        net.zero_grad()
        loss_of(net, inputs, targets).backward()
        one.step()
        other.step()
    return net


@script("equal")
def traced(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    fast = torch.jit.trace(net, torch.zeros(3, FEATURES))
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        F.cross_entropy(fast(inputs), targets).backward()
        optimizer.step()
    return net


@script("equal")
def head_replaced_in_place(run: Run) -> Result:
    """New values in the old parameters: nothing to add."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)

    def change() -> None:
        net[2].reset_parameters()
        if not run.joined:
            optimizer.broadcast_weights()

    return steps(run, net, optimizer, change)


@script("equal")
def hooks_of_the_optimizer(run: Run) -> Result:
    net = mlp()
    own, seen = decaying(net.parameters()), list[float]()
    own.register_step_pre_hook(lambda *_: seen.append(0.5))
    optimizer = run.distribute(own, net)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1.0))
    optimizer.register_step_post_hook(lambda *_: seen.append(2.0))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(float(len(state["state"]))))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(4.0))
    of_all = register_optimizer_step_post_hook(lambda *_: seen.append(3.0))
    steps(run, net, optimizer, lambda: optimizer.load_state_dict(optimizer.state_dict()))
    of_all.remove()
    return [net, *seen]


@script("equal")
def rates_as_tensors(run: Run) -> Result:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01))
    optimizer = run.distribute(optimizer, net)
    return steps(run, net, optimizer, lambda: optimizer.param_groups[0]["lr"].mul_(0.5))


@script("equal")
def pruned(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    return steps(run, net, optimizer, lambda: prune.l1_unstructured(net[0], "weight", 0.3))


@script("refused in its step", other="refused in its step")
def group_taken_away(run: Run) -> Result:
    net = mlp()
    optimizer = decaying([{"params": net[0].parameters()}, {"params": net[2].parameters()}])
    optimizer = run.distribute(optimizer, net)
    return steps(run, net, optimizer, optimizer.param_groups.pop)


@script("equal")
def two_optimizers_of_one_model_stepped_in_turn(run: Run) -> Result:
    net = mlp()
    one = run.distribute(decaying(net[0].parameters()), net)
    other = run.distribute(torch.optim.AdamW(net[2].parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        net.zero_grad()
        loss_of(net, inputs, targets).backward()
        (one if step % 2 else other).step()
    return net


@script("equal")
def weights_loaded_into_the_net(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    kept = copy.deepcopy(net.state_dict())

    def change() -> None:
        net.load_state_dict(kept)
        if not run.joined:
            optimizer.broadcast_weights()

    return steps(run, net, optimizer, change)
