"""Nets whose parameters come and go: frozen, unused, shared, held in lists, used without their module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.oracle.registry import script
from tests.oracle.run import Result, Run, Tensors
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp


def decaying(params: object) -> torch.optim.Optimizer:
    """Momentum and decay, which move a parameter that is stepped without a gradient."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.02)  # type: ignore[arg-type]


def train(run: Run, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> nn.Module:
    optimizer = run.distribute(optimizer, net, **options)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def frozen_layers(run: Run) -> Result:
    net = mlp()
    net[0].requires_grad_(False)
    return train(run, net, decaying(net.parameters()))


@script("equal")
def frozen_layers_left_out(run: Run) -> Result:
    net = mlp()
    net[0].requires_grad_(False)
    return train(run, net, decaying(p for p in net.parameters() if p.requires_grad))


@script("equal")
def frozen_in_the_middle(run: Run) -> Result:
    """With ``zero_grad`` to None a frozen parameter has no gradient: it stands still at once."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == 20:
            net[0].requires_grad_(False)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def unfrozen_in_the_middle(run: Run) -> Result:
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = run.distribute(decaying(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == 20:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


class Experts(nn.Module):
    """Each sample goes to one of three experts; a fourth is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, inputs: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_zeros(len(inputs), CLASSES)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero().squeeze(1)
            if len(mine):
                outputs = outputs.index_put((mine,), expert(inputs[mine]))
        return self.last(torch.tanh(outputs))


def routed(count: int, generator: torch.Generator) -> Tensors:
    """Neighbours have the same expert, so that a worker has samples for some of them; in some steps one has none."""
    inputs, targets = labelled(count, generator)
    first = int(torch.randint(3, (1,), generator=generator))
    return inputs, (first + torch.arange(count) * 2 // count) % 3, targets


@script("equal", dtype=torch.float64)
def experts(run: Run) -> Result:
    net = Experts()
    optimizer = run.distribute(torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1), net)
    for inputs, choice, targets in run.batches(routed):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs, choice), targets).backward()
        optimizer.step()
    return net


@script("equal")
def experts_with_momentum(run: Run) -> Result:
    net = Experts()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for inputs, choice, targets in run.batches(routed):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs, choice), targets).backward()
        optimizer.step()
    return net


@script("equal")
def experts_zeroed_in_place(run: Run) -> Result:
    """A gradient that is zero and not None is stepped, by decay and momentum."""
    net = Experts()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for inputs, choice, targets in run.batches(routed):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(net(inputs, choice), targets).backward()
        optimizer.step()
    return net


class Unused(nn.Module):
    """Parameters of which nobody makes use, before, between and after those that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5))
        self.net = mlp()
        self.spare = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


@script("equal")
def unused_parameters(run: Run) -> Result:
    net = Unused()
    return train(run, net, decaying(net.parameters()))


@script("equal")
def branches_by_step(run: Run) -> Result:
    """Which parameters are used changes from step to step, the same on all workers."""
    net = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(3)])
    optimizer = run.distribute(decaying(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        loss_of(net[step % 3], inputs, targets).backward()
        optimizer.step()
    return net


class Tied(nn.Module):
    """One matrix is the first layer and, turned, the last; it belongs to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 6, bias=False), nn.Linear(6, FEATURES)
        self.middle = nn.Linear(6, 6)
        self.classes = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(torch.tanh(self.into(inputs)))
        return self.classes(torch.tanh(F.linear(hidden, self.into.weight.t(), self.out.bias)))


@script("equal")
def tied_by_use(run: Run) -> Result:
    net = Tied()
    return train(run, net, decaying(net.parameters()))


class TiedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.out.weight = self.into.weight
        self.classes = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classes(self.out(torch.tanh(self.into(inputs))))


@script("equal")
def tied_by_name(run: Run) -> Result:
    net = TiedByName()
    return train(run, net, decaying(net.parameters()))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(0.3 * torch.randn(FEATURES, FEATURES)) for _ in range(3))
        self.named = nn.ParameterDict({"bias": torch.zeros(CLASSES), "last": 0.3 * torch.randn(FEATURES, CLASSES)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for one in self.many:
            inputs = torch.tanh(inputs @ one)
        return inputs @ self.named["last"] + self.named["bias"]


@script("equal")
def parameter_lists(run: Run) -> Result:
    net = Lists()
    return train(run, net, decaying(net.parameters()))


class Attention(nn.Module):
    """``MultiheadAttention`` reads the weights of its ``out_proj`` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.classes = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sequence = torch.stack([inputs, inputs.flip(1), -inputs], 1)
        return self.classes(self.attend(sequence, sequence, sequence, need_weights=False)[0].mean(1))


@script("equal")
def attention(run: Run) -> Result:
    net = Attention()
    return train(run, net, decaying(net.parameters()))


@script("equal", dtype=torch.float64)
def transformer_layers(run: Run) -> Result:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.0, batch_first=True)
    net = nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(FEATURES, CLASSES)
    )
    return train(run, net, decaying(net.parameters()))


@script("equal")
def functional_call(run: Run) -> Result:
    """The net is called with its own parameters as arguments; its forward sees no sample count of its own."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        outputs = torch.func.functional_call(net, dict(net.named_parameters()), (inputs,))
        F.cross_entropy(outputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def weights_used_without_a_forward(run: Run) -> Result:
    """A penalty on weights, read outside of any forward, and a layer used as a function."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        penalty = sum(param.square().sum() for param in net.parameters())
        hidden = torch.tanh(F.linear(inputs, net[0].weight, net[0].bias))
        if not run.joined:
            optimizer.samples = len(inputs)
        (F.cross_entropy(net[2](hidden), targets) + 0.01 * penalty).backward()
        optimizer.step()
    return net


@script("equal")
def parametrized(run: Run) -> Result:
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(FEATURES, 12)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(12, 12)),
        nn.Linear(12, CLASSES),
    )
    return train(run, net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.reentrant, self.times = reentrant, times

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(self.times):
            hidden = checkpoint(self._part, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)

    def _part(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(hidden))


@script("equal")
def checkpointing(run: Run) -> Result:
    """A layer is used, and checkpointed, twice."""
    net = Checkpointed(reentrant=False, times=2)
    return train(run, net, decaying(net.parameters()))


@script("equal")
def checkpointing_reentrant(run: Run) -> Result:
    """Backward runs inside backward."""
    net = Checkpointed(reentrant=True, times=1)
    return train(run, net, decaying(net.parameters()))


@script("equal")
def checkpointing_reentrant_twice(run: Run) -> Result:
    """A layer's gradient comes in two inner passes of one backward, so nothing may leave before its end."""
    net = Checkpointed(reentrant=True, times=2)
    return train(run, net, decaying(net.parameters()), overlap=False)


@script("equal", worker="refused in its step")
def checkpointing_reentrant_twice_untold(run: Run) -> Result:
    net = Checkpointed(reentrant=True, times=2)
    return train(run, net, decaying(net.parameters()))


@script("equal")
def evaluation_in_between(run: Run) -> Result:
    """Between steps, without gradients, by unlike numbers of samples, in either mode: none of them counts."""
    net = mlp()
    optimizer = run.distribute(decaying(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        with torch.no_grad():
            net(inputs.repeat(1 + 3 * run.rank, 1))
            net.eval()(inputs.repeat(1 + run.rank, 1))
        net.train()
        optimizer.zero_grad()
        loss = loss_of(net, inputs, targets)
        if step % 2:
            with torch.no_grad():
                net(inputs[:1])
        loss.backward()
        optimizer.step()
    return net


@script("refused in its step", other="refused in its step")
def group_added_in_the_middle(run: Run) -> Result:
    """As fine-tuning does when it unfreezes the next layers."""
    net = mlp()
    net[0].requires_grad_(False)
    optimizer = run.distribute(decaying(net[2].parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        if step == 20:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.02})
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def tied_under_two_names(run: Run) -> Result:
    """Names of two nets that share a layer, joined by the user: it comes twice."""
    net = TiedByName()
    names = {} if run.joined else {"named_parameters": list(net.named_parameters(remove_duplicate=False))}
    return train(run, net, decaying(net.parameters()), **names)


class Quantised(nn.Module):
    """Has integers that are no buffers, as quantised layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.codes = nn.Parameter(torch.randint(256, (5,), dtype=torch.uint8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


@script("equal")
def integers_among_the_parameters(run: Run) -> Result:
    """The optimizer has all parameters, those that can have no gradient too."""
    net = Quantised()
    train(run, net, decaying(net.parameters()))
    return [net.net, net.codes]


class BackwardFirst(torch.autograd.Function):
    """Computes the loss of a batch in two parts, and goes backward in its forward: the logits of one part exist."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
        hidden = hidden.detach().requires_grad_(True)
        total = torch.zeros(())
        with torch.enable_grad():
            for part, wanted in zip(hidden.chunk(2), targets.chunk(2), strict=True):
                loss = F.cross_entropy(head(part), wanted, reduction="sum") / len(targets)
                loss.backward()
                total += loss.detach()
        ctx.save_for_backward(hidden.grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * grads[0], None, None


@script("equal")
def backward_in_a_forward(run: Run) -> Result:
    body, head = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)
    nets = nn.ModuleList([body, head])
    optimizer = run.distribute(decaying(nets.parameters()), nets)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        BackwardFirst.apply(torch.tanh(body(inputs)), head, targets).backward()
        optimizer.step()
    return nets
