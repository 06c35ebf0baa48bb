"""What loops do with gradients between ``backward`` and ``step``."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.oracle.registry import script
from tests.oracle.run import Result, Run
from tests.oracle.scripts.parts import labelled, loss_of, mlp, norm_of


def momentum(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


@script("equal")
def plain(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def norm_logging(run: Run) -> Result:
    """Gradients are read only; what is read is what is applied only where the worker has it."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    seen = 0.0
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        seen += norm_of([p.grad for p in net.parameters()]).item()
        optimizer.step()
    assert seen > 0
    return net


@script("equal")
def hooks_before_wrapping(run: Run) -> Result:
    """Hooks of the user's own change each gradient when it is complete."""
    net = mlp()
    halve(net)
    optimizer = run.distribute(momentum(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal")
def hooks_after_wrapping(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    halve(net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


def halve(net: torch.nn.Module) -> None:
    def half(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(half)


@script("at step")
def clip_norm(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    norms = []
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        norms.append(clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
    return {"net": net, "norms": torch.stack(norms)}


@script("at step")
def clip_value(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        clip_grad_value_(net.parameters(), 0.02)
        optimizer.step()
    return net


@script("equal")
def scaled_gradients(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param in net[0].parameters():
            param.grad.mul_(0.3)
        optimizer.step()
    return net


@script("equal")
def gradient_noise(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    noise = torch.Generator().manual_seed(5)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param in net.parameters():
            param.grad.add_(torch.randn(param.shape, generator=noise, device="cpu").to(param.device), alpha=0.01)
        optimizer.step()
    return net


@script("equal")
def zeroed_gradients(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        net[0].weight.grad[3:7].zero_()
        net[2].bias.grad.zero_()
        optimizer.step()
    return net


@script("at step")
def gradients_by_data(run: Run) -> Result:
    """Written through ``.data``, which no version counter sees."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param in net.parameters():
            param.grad.data.clamp_(-0.02, 0.02)
        optimizer.step()
    return net


@script("at step")
def replaced_gradients(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=1e-2), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for param in net.parameters():
            param.grad = param.grad / (param.grad.norm() + 0.1)
        optimizer.step()
    return net


@script("equal")
def gradients_taken_away(run: Run) -> Result:
    """A parameter whose gradient is None is not stepped: neither decay nor momentum moves it."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        if step % 3 == 0:
            net[2].weight.grad = None
        optimizer.step()
    return net


@script("equal")
def scaler(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, inputs, targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"net": net, "scale": scaler.get_scale()}


@script("at step")
def scaler_with_clipping(run: Run) -> Result:
    """With an overflow on one worker: the step is skipped on all, as the joined batch's is."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad(set_to_none=True)
        inf = step in (5, 20) and run.rank == 0
        scaler.scale(loss_of(net, inputs, targets) * (float("inf") if inf else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return {"net": net, "scale": scaler.get_scale()}


@script("equal")
def zeroed_in_place(run: Run) -> Result:
    """Right after the step, and right before the next backward, while a slow server may still be busy."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for inputs, targets in run.batches(labelled):
        loss = loss_of(net, inputs, targets)
        net.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return net


@script("equal")
def rate_between_backward_and_step(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + step % 7)
        optimizer.step()
    return net


@script("at step")
def by_hand(run: Run) -> Result:
    """No step at all: the user takes it."""
    net = mlp()
    run.distribute(torch.optim.SGD(net.parameters(), lr=1.0), net)
    for inputs, targets in run.batches(labelled):
        net.zero_grad()
        loss_of(net, inputs, targets).backward()
        clip_grad_norm_(net.parameters(), 0.25)
        for param in net.parameters():
            param.data.add_(param.grad, alpha=-0.1)
    return net


@script("equal")
def step_skipped_by_norm(run: Run) -> Result:
    """A step whose merged gradient is large is left out."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    skipped = 0
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        if norm_of([p.grad for p in net.parameters()]) > 0.5:
            skipped += 1
            continue
        optimizer.step()
    return {"net": net, "skipped": skipped}


@script("equal")
def clipped_by_option(run: Run) -> Result:
    """The norm is that of the merged gradient, over all keys and servers."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net, clip_grad_norm=0.1)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        if run.joined:
            clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return net


@script("equal")
def values_clipped_by_option(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net, clip_grad_value=0.02)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        if run.joined:
            clip_grad_value_(net.parameters(), 0.02)
        optimizer.step()
    return net


@script("equal")
def set_by_hand_and_clipped_by_option(run: Run) -> Result:
    """Gradients that no backward pass has merged are clipped after ``step`` has merged them."""
    net = mlp()
    params = list(net.parameters())
    optimizer = run.distribute(momentum(net), net, clip_grad_norm=0.1)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        for param, grad in zip(params, torch.autograd.grad(loss_of(net, inputs, targets), params), strict=True):
            param.grad = grad
        if run.joined:
            clip_grad_norm_(params, 0.1)
        optimizer.step()
    return net


@script("refused in its step", worker="refused in its step", other="refused in its step")
def not_finite(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(momentum(net), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        bad = step == 3 and run.rank == run.workers - 1
        (loss_of(net, inputs, targets) * (float("nan") if bad else 1.0)).backward()
        optimizer.step()
    return net


@script("equal")
def steps_skipped_where_not_finite(run: Run) -> Result:
    """One worker's gradients are Inf or NaN: nobody steps."""
    net = mlp()
    optimizer = run.distribute(momentum(net), net, on_nan="skip")
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        bad = {4: float("inf"), 11: float("nan")}.get(step, 1.0) if run.rank == 0 else 1.0
        (loss_of(net, inputs, targets) * bad).backward()
        if not run.joined or all(param.grad.isfinite().all() for param in net.parameters()):
            optimizer.step()
    return net
