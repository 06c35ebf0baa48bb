"""Further loops of public code: steps taken twice or on zeros, optimizers exchanged, layers that come and go."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.oracle.registry import script
from tests.oracle.run import STEPS, Result, Run, Tensors, sizes
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def same_for_all(run: Run, count: int) -> Tensors:
    """Return samples that every worker has."""
    with torch.device("cpu"):
        inputs, targets = labelled(count, torch.Generator().manual_seed(1))
    return inputs.to(run.device), targets.to(run.device)


def train(run: Run, net: nn.Module, optimizer: Any, steps: int = STEPS) -> nn.Module:
    for inputs, targets in run.batches(labelled, steps):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal", dtype=torch.float64)
def step_twice_on_one_gradient(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        optimizer.step()
    return net


@script("equal")
def step_before_the_first_backward(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    optimizer.zero_grad()
    optimizer.step()
    return train(run, net, optimizer)


@script("equal")
def state_made_by_a_step_of_zeros(run: Run) -> Result:
    """As torch.distributed.checkpoint makes the state of an optimizer that is to be loaded."""
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
    return train(run, net, optimizer)


@script("equal")
def other_optimizer_in_the_middle(run: Run) -> Result:
    """Adam first, SGD to the end."""
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    train(run, net, optimizer, 20)
    return train(run, net, run.distribute(momentum(net.parameters()), net), 20)


@script("equal")
def adapters_added_to_a_trained_net(run: Run) -> Result:
    """As LoRA: the net is frozen, layers get factors beside them, and an optimizer of their own."""
    net = mlp()
    train(run, net, run.distribute(momentum(net.parameters()), net), 20)
    net.requires_grad_(False)
    torch.manual_seed(5)
    low = nn.Sequential(nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, 16, bias=False))
    nn.init.zeros_(low[1].weight)
    first = net[0]

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.low = first, low

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.first(inputs) + self.low(inputs)
            return result

    net[0] = Adapted()
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=1e-2)
    train(run, net, run.distribute(optimizer, net), 20)
    with torch.no_grad():
        first.weight.add_(low[1].weight @ low[0].weight)
    return net


@script("equal")
def tied_after_wrapping(run: Run) -> Result:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Linear(8, CLASSES))
    optimizer = run.distribute(momentum(net.parameters()), net)
    net[2].weight = net[0].weight
    return train(run, net, optimizer)


@script("equal")
def parametrized_norms(run: Run) -> Result:
    net = nn.Sequential(mlp(), nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES))
    parametrizations.weight_norm(net[0][0])
    parametrizations.orthogonal(net[1])
    return train(run, net, run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net))


@script("equal")
def parameters_without_elements(run: Run) -> Result:
    net = mlp()
    net.empty = nn.Parameter(torch.empty(0, 3))
    net.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        (F.cross_entropy(net(inputs) * net.scale, targets) + net.empty.sum()).backward()
        optimizer.step()
    return net


@script("equal")
def temperature_of_the_loss(run: Run) -> Result:
    """As CLIP: one parameter comes after the outputs of the net, so its gradient comes before them."""
    net = mlp()
    net.temperature = nn.Parameter(torch.tensor(1.0))
    optimizer = run.distribute(momentum([net.temperature, *net[0].parameters(), *net[2].parameters()]), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs) * net.temperature.exp(), targets).backward()
        optimizer.step()
    return net


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(FEATURES, 16), nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(3))

    def forward(self, inputs: torch.Tensor, task: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[task](self.trunk(inputs).tanh())
        return result


@script("equal")
def calls_for_several_tasks(run: Run) -> Result:
    """Each call has a head of its own, whose gradient is complete before backward has come to the other calls."""
    net = Tasks()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        outputs = [net(torch.cat([inputs] * (task + 1)), task) for task in range(3)]
        sum(F.cross_entropy(one, targets.repeat(task + 1)) for task, one in enumerate(outputs)).backward()
        optimizer.step()
    return net


@script("equal")
def transposed_parameters(run: Run) -> Result:
    net = mlp()
    net[0].weight = nn.Parameter(torch.randn(FEATURES, 16).t())
    return train(run, net, run.distribute(momentum(net.parameters()), net))


@script("equal")
def parameters_in_one_flat_tensor(run: Run) -> Result:
    """As apex and fairseq: weights are views of one tensor."""
    net = mlp()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, net.parameters())
    train(run, net, run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net))
    return [net, flat]


@script("equal")
def dtypes_mixed_in_one_net(run: Run) -> Result:
    net = mlp()
    net[2].double()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        F.cross_entropy(net[2](net[:2](inputs).double()), targets).backward()
        optimizer.step()
    return net


@script("equal")
def master_weights_by_hand(run: Run) -> Result:
    """The optimizer has copies of the weights in a longer type; gradients and weights are copied by hand."""
    net = mlp()
    masters = [param.detach().double().requires_grad_() for param in net.parameters()]
    optimizer = run.distribute(torch.optim.Adam(masters, lr=1e-2), None)
    with torch.no_grad():
        for param, master in zip(net.parameters(), masters, strict=True):
            param.copy_(master)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        net.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param, master in zip(net.parameters(), masters, strict=True):
            master.grad = param.grad.double()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(net.parameters(), masters, strict=True):
                param.copy_(master)
    return masters


@script("equal")
def meta_learning(run: Run) -> Result:
    """As MAML: the loss is that of weights after an inner step, on a set that all have."""
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    support = same_for_all(run, 8)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        weights = dict(net.named_parameters())
        slopes = torch.autograd.grad(loss_of(net, *support), list(weights.values()), create_graph=True)
        fast = {name: one - 0.1 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
        F.cross_entropy(torch.func.functional_call(net, fast, (inputs,)), targets).backward()
        optimizer.step()
    return net


@script("equal")
def reptile(run: Run) -> Result:
    """A copy of the net is trained here; what it has moved is the gradient."""
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        inner = copy.deepcopy(net)
        stepper = torch.optim.SGD(inner.parameters(), lr=0.5)
        stepper.zero_grad()
        loss_of(inner, inputs, targets).backward()
        stepper.step()
        for param, moved in zip(net.parameters(), inner.parameters(), strict=True):
            param.grad = (param - moved).detach()
        optimizer.step()
    return net


@script("equal")
def gradients_of_each_sample(run: Run) -> Result:
    """As Opacus: torch.func makes the gradient of each sample, which is clipped; their mean is set by hand."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.3), net)

    def loss(weights: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(net, weights, (one[None],)), target[None])

    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        weights = {name: param.detach() for name, param in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, inputs, targets)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in each.values()]).norm(dim=0)
        for name, param in net.named_parameters():
            factor = (0.5 / norms).clamp(max=1).reshape(-1, *[1] * param.dim())
            param.grad = (each[name] * factor).mean(0)
        optimizer.step()
    return net


@script("equal")
def layers_trained_in_turn(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        net[0].requires_grad_(step % 2 == 0)
        net[2].requires_grad_(step % 3 != 0 or step % 2 == 1)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def two_optimizers_of_one_loss(run: Run) -> Result:
    net = mlp()
    one = run.distribute(torch.optim.Adam(net[0].parameters(), lr=1e-2), net)
    other = run.distribute(torch.optim.SGD(net[2].parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        one.zero_grad()
        other.zero_grad()
        loss_of(net, inputs, targets).backward()
        one.step()
        other.step()
    return net


@script("equal")
def gradients_dropped_one_by_one(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        for param in net.parameters():
            param.grad = None
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def gradients_dropped_after_the_step(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        net.zero_grad(set_to_none=False)
    return net


@script("equal")
def decay_and_betas_on_a_schedule(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.AdamW(net.parameters(), lr=1e-2), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        for group in optimizer.param_groups:
            group["weight_decay"], group["betas"] = 0.01 * step, (0.9 - step / 200, 0.99)
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def copy_of_the_net_trained_on(run: Run) -> Result:
    net = mlp()
    train(run, net, run.distribute(momentum(net.parameters()), net), 20)
    other = copy.deepcopy(net)
    train(run, other, run.distribute(momentum(other.parameters()), other), 20)
    return [net, other]


@script("equal")
def folds_in_one_process(run: Run) -> Result:
    found = []
    for _ in range(3):
        net = mlp()
        found.append(train(run, net, run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net), 10))
    return found


@script("equal")
def weights_in_shared_memory(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    net.share_memory()
    return train(run, net, optimizer)


@script("equal")
def gradient_of_the_outputs_given(run: Run) -> Result:
    """As caches of gradients do it: first that of the outputs, then that of the weights."""
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        outputs = net(inputs)
        leaf = outputs.detach().requires_grad_()
        F.cross_entropy(leaf, targets).backward()
        outputs.backward(gradient=leaf.grad)
        optimizer.step()
    return net


@script("equal")
def backward_with_a_graph(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward(create_graph=True)
        optimizer.step()
    return net


@script("equal")
def validated_with_gradients_switched_on(run: Run) -> Result:
    """Losses of another set are computed, and no backward follows."""
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    other = same_for_all(run, 9)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        loss_of(net, *other).item()
    return net


@script("equal")
def validated_between_backward_and_step(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    other = same_for_all(run, 9)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        loss_of(net, *other).item()
        optimizer.step()
    return net


@script("at step")
def clipped_by_norms_of_weights(run: Run) -> Result:
    """Adaptive gradient clipping."""
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param in net.parameters():
            most = param.detach().norm().clamp(min=1e-3) * 0.1
            param.grad.mul_((most / param.grad.norm().clamp(min=1e-6)).clamp(max=1))
        optimizer.step()
    return net


@script("equal")
def in_a_thread(run: Run) -> Result:
    found: list[Any] = []
    net = mlp()

    def work() -> None:
        try:
            found.append(train(run, net, run.distribute(momentum(net.parameters()), net)))
        except Exception as error:  # noqa: BLE001 - raised below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found


@script("equal")
def stepped_by_another_thread(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    for inputs, targets in run.batches(labelled, 20):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
    return net


@script("equal")
def pickled_optimizer_goes_on_elsewhere(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    train(run, net, optimizer, 20)
    other, stepper = pickle.loads(pickle.dumps((net, optimizer)))
    inputs, targets = same_for_all(run, 8)
    for _ in range(5):
        stepper.zero_grad()
        loss_of(other, inputs, targets).backward()
        stepper.step()
    return [train(run, net, optimizer, 10), other]


@script("equal")
def state_of_a_training_before_loaded_first(run: Run) -> Result:
    net = mlp()
    torch.manual_seed(5)
    earlier = mlp()
    stepper = torch.optim.Adam(earlier.parameters(), lr=1e-2)
    inputs, targets = same_for_all(run, 8)
    for _ in range(5):
        stepper.zero_grad()
        loss_of(earlier, inputs, targets).backward()
        stepper.step()
    net.load_state_dict(earlier.state_dict())
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-3), net)
    optimizer.load_state_dict(stepper.state_dict())
    return train(run, net, optimizer)


@script("equal")
def schedules_in_sequence(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    round_and_round = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, round_and_round], [5])
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        schedule.step()
    return net


def worded(count: int, generator: torch.Generator) -> Tensors:
    words = torch.randint(12, (count, 5), generator=generator)
    return words, words.sum(1) % CLASSES


def reading(**options: Any) -> nn.ModuleDict:
    return nn.ModuleDict({"table": nn.Embedding(12, 8, sparse=True, **options), "head": nn.Linear(8, CLASSES)})


@script("equal")
def sparse_embedding_at_some_steps(run: Run) -> Result:
    """On some workers it has no gradient, and at some steps on none."""
    nets = reading(padding_idx=0)
    optimizer = run.distribute(torch.optim.SGD(nets.parameters(), lr=0.1), nets)
    for step, (words, targets) in enumerate(run.batches(worded)):
        if not run.joined:
            optimizer.samples = len(words)
        optimizer.zero_grad()
        inputs = nets["table"](words).mean(1)
        if step % 3 == 0 or (step % 3 == 1 and not run.joined and run.rank == 1):
            inputs = inputs.detach()
        if step % 3 == 1 and run.joined:
            owner = torch.arange(run.workers).repeat_interleave(torch.tensor(sizes(step, run.workers)))
            inputs = torch.where(owner[:, None] == 1, inputs.detach(), inputs)
        F.cross_entropy(nets["head"](inputs), targets).backward()
        optimizer.step()
    return nets


@script("equal")
def sparse_embedding_told_of_two_passes(run: Run) -> Result:
    nets = reading()
    optimizer = run.distribute(torch.optim.SGD(nets.parameters(), lr=0.1), nets, backward_passes_per_step=2)
    for step, (words, targets) in enumerate(run.batches(worded, alike=2)):
        if not run.joined:
            optimizer.samples = len(words)
        (F.cross_entropy(nets["head"](nets["table"](words).mean(1)), targets) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return nets


@script("refused in its step", worker="refused in its step", other="refused in its step")
def sparse_embedding_tied_with_the_head(run: Run) -> Result:
    """Its gradient is the sum of a sparse and a dense one."""
    table = nn.Embedding(12, 8, sparse=True)
    optimizer = run.distribute(torch.optim.SGD(table.parameters(), lr=0.1), table)
    for words, _ in run.batches(worded):
        if not run.joined:
            optimizer.samples = len(words)
        optimizer.zero_grad()
        F.cross_entropy(table(words[:, :-1]).mean(1) @ table.weight.t(), words[:, -1]).backward()
        optimizer.step()
    return table


@script("refused in its step", other="refused in its step")
def initialised_after_wrapping(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net.parameters()), net)
    torch.manual_seed(3)
    net.apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)
    return train(run, net, optimizer)


@script("equal")
def epochs_on_the_same_rollouts(run: Run) -> Result:
    """As PPO: several passes over parts of what was seen, with a ratio to earlier outputs."""
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for inputs, targets in run.batches(labelled, 10):
        with torch.no_grad():
            before = F.log_softmax(net(inputs), 1).gather(1, targets[:, None])
        for _ in range(4):
            ratio = (F.log_softmax(net(inputs), 1).gather(1, targets[:, None]) - before).exp()
            loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


for kind, (made, options) in {
    "adamw_amsgrad_foreach": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adam_decoupled": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd_fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad_fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop_centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "radam_decoupled": (torch.optim.RAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
}.items():

    def trained(run: Run, made: Any = made, options: Any = options) -> Result:
        net = mlp()
        if run.device != "cpu" and made is torch.optim.Adagrad:
            options = options | {"fused": False}  # there is none for CUDA
        return train(run, net, run.distribute(made(net.parameters(), **options), net))

    script("equal", name=f"optimizer_{kind}")(trained)
