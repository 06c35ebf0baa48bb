"""Training loops of GPU users: two workers on one CUDA device, and one process with the joined batch."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import LocalJob

STEPS = 8
HALF = 6  # samples of one worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Side:
    """One side of the comparison: the loop's optimizer, and its batches.

    Args:
        update: of ``DistributedOptimizer``; "" in the joined run.
    """

    def __init__(self, update: str) -> None:
        self.update, self.rank = update, 0

    def optimizer(self, inner: torch.optim.Optimizer, net: nn.Module) -> Any:
        """Return the optimizer to train with."""
        if not self.update:
            return inner
        wrapped = paceline.DistributedOptimizer(inner, model=net, update=self.update)  # type: ignore[arg-type]
        self.rank = wrapped.kvstore.rank
        return wrapped

    def batches(self, *shape: int, steps: int = STEPS) -> Iterator[torch.Tensor]:
        """Yield this worker's samples of each step, in page-locked memory; in the joined run all."""
        for step in range(steps):
            whole = torch.randn(2 * HALF, *shape, generator=torch.Generator().manual_seed(step), device="cpu")
            yield (whole[self.rank * HALF :][:HALF] if self.update else whole).pin_memory()


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5)).cuda()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(side: Side, net: nn.Module, inner: torch.optim.Optimizer, model: Callable[..., Any] | None = None) -> None:
    optimizer = side.optimizer(inner, net)
    model = model or net
    for inputs in side.batches(20):
        optimizer.zero_grad()
        model(inputs.cuda(non_blocking=True)).square().mean().backward()
        optimizer.step()


def fused_adamw(side: Side) -> nn.Module:
    net = mlp()
    train(side, net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
    return net


def capturable_adam(side: Side) -> nn.Module:
    net = mlp()
    train(side, net, torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True))
    return net


def compiled(side: Side, mode: str = "default") -> nn.Module:
    net = mlp()
    train(side, net, sgd(net), torch.compile(net, mode=mode))
    return net


def compiled_to_graphs(side: Side) -> nn.Module:
    return compiled(side, "reduce-overhead")


def graphed_before(side: Side) -> nn.Module:
    net = mlp()
    size = HALF if side.update else 2 * HALF
    model = torch.cuda.make_graphed_callables(net, (torch.randn(size, 20, device="cuda"),))
    net.zero_grad()
    train(side, net, sgd(net), model)
    return net


def own_stream(side: Side) -> nn.Module:
    net, stream = mlp(), new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(side, net, sgd(net))
    torch.cuda.current_stream().wait_stream(stream)
    return net


def prefetched(side: Side) -> nn.Module:
    net, stream = mlp(), new_stream()
    optimizer = side.optimizer(sgd(net), net)

    def fetched() -> Iterator[torch.Tensor]:
        ahead = None
        for inputs in side.batches(20):
            with torch.cuda.stream(stream):
                coming = inputs.cuda(non_blocking=True)
            if ahead is not None:
                yield ahead
            torch.cuda.current_stream().wait_stream(stream)
            coming.record_stream(torch.cuda.current_stream())
            ahead = coming
        if ahead is not None:
            yield ahead

    for inputs in fetched():
        optimizer.zero_grad(set_to_none=False)
        net(inputs).square().mean().backward()
        optimizer.step()
    return net


def backward_on_another_stream(side: Side) -> nn.Module:
    net, stream = mlp(), new_stream()
    optimizer = side.optimizer(sgd(net), net)
    for inputs in side.batches(20):
        optimizer.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = net(inputs.cuda()).square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        optimizer.step()
    return net


def on_two_devices(side: Side) -> nn.Module:
    """The first layer on the CPU, the others on the GPU."""
    first, rest = nn.Linear(20, 300), mlp()[1:]
    net = nn.ModuleList([first, rest])
    optimizer = side.optimizer(sgd(net), net)
    for inputs in side.batches(20):
        optimizer.zero_grad()
        rest(first(inputs).cuda()).square().mean().backward()
        optimizer.step()
    return net


def mixed_precision(side: Side) -> nn.Module:
    """A scaler whose first steps overflow, on rank 1 alone."""
    net = mlp()
    optimizer = side.optimizer(sgd(net), net)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
    for step, inputs in enumerate(side.batches(20)):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = net(inputs.cuda()).square().mean()
        if step == 2 and (side.rank or not side.update):
            loss = loss * 1e12
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return net


def in_bfloat16(side: Side) -> nn.Module:
    net = mlp().bfloat16()
    optimizer = side.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for inputs in side.batches(20):
        optimizer.zero_grad()
        net(inputs.cuda().bfloat16()).square().mean().backward()
        optimizer.step()
    return net


def pictures(side: Side) -> nn.Module:
    """Convolutions in channels_last, normalised by GroupNorm."""
    net: nn.Module = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.LazyLinear(5)
    ).cuda()
    net(torch.zeros(1, 3, 12, 12, device="cuda"))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = side.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), net)
    for inputs in side.batches(3, 12, 12):
        optimizer.zero_grad()
        net(inputs.cuda().to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
    return net


def accumulated(side: Side) -> nn.Module:
    """Two backward passes in a step, with the memory of the device given back after each."""
    net = mlp()
    optimizer = side.optimizer(sgd(net), net)
    for inputs in side.batches(20):
        optimizer.zero_grad()
        for part in inputs.cuda().chunk(2):
            (net(part).square().mean() / 2).backward()
            torch.cuda.empty_cache()
        optimizer.step()
    return net


def default_device(side: Side) -> nn.Module:
    torch.set_default_device("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        net = mlp()
        train(side, net, torch.optim.RMSprop(net.parameters(), lr=1e-3, foreach=True))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_device("cpu")
    return net


LOOPS: dict[str, Callable[[Side], nn.Module]] = {
    one.__name__: one
    for one in (
        fused_adamw, capturable_adam, compiled, compiled_to_graphs, graphed_before, own_stream, prefetched,
        backward_on_another_stream, on_two_devices, mixed_precision, in_bfloat16, pictures, accumulated, default_device,
    )
}  # fmt: skip

#: Loops whose gradients this process must have between backward and step, or that say only then that it was the last.
REFUSED_BY_SERVERS = {"mixed_precision", "accumulated"}


def weights_of(name: str, update: str) -> list[float]:
    """Run a loop; return its last weights."""
    torch.manual_seed(3)
    net = LOOPS[name](Side(update))
    torch.cuda.synchronize()
    return torch.cat([param.detach().double().cpu().flatten() for param in net.parameters()]).tolist()


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("name", LOOPS)
def test_two_workers_equal_one_process(name: str, update: str) -> None:
    if update == "server" and name in REFUSED_BY_SERVERS:
        pytest.skip("where servers step, such a loop is an error; tests/oracle has that")
    with LocalJob(2, 1) as job:
        found = [torch.tensor(one, dtype=torch.float64) for one in job.run(weights_of, name, update)]
    joined = torch.tensor(weights_of(name, ""), dtype=torch.float64)
    assert torch.equal(found[0], found[1])
    loose = {"in_bfloat16": 4e-3, "mixed_precision": 1e-3}.get(name, 2e-5)
    torch.testing.assert_close(found[0], joined, rtol=1e-3, atol=loose)


def memory_after(steps: int, update: str) -> list[list[float]]:
    """Return the MB of the device and of this process after some steps, and after all."""
    net, side, found = mlp(), Side(update), []
    optimizer = side.optimizer(torch.optim.Adam(net.parameters()), net)
    inputs = torch.randn(4, 20, device="cuda")
    for step in range(steps):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
        if step in (steps // 4, steps - 1):
            torch.cuda.synchronize()
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            found.append([torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20, own])
    return found


@pytest.mark.parametrize("update", ["worker", "server"])
def test_memory_stays(update: str) -> None:
    with LocalJob(2, 1) as job:
        for early, late in job.run(memory_after, 2000, update):
            assert late[0] <= early[0] + 0.1
            assert late[1] <= early[1] + 4
            assert late[2] <= early[2] + 8
