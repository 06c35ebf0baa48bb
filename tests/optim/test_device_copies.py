"""Pushes that wait for copies from a device, without one and with one."""

from __future__ import annotations

import threading

import pytest
import torch

import paceline
from paceline.errors import DeadlineError, PacelineError
from paceline.optim.device import Pusher
from paceline.testing import LocalJob


def test_pushes_leave_in_order_and_each_when_its_copy_is_there() -> None:
    pusher, pushed, first_is_there = Pusher(30.0), [], threading.Event()
    pusher.after(first_is_there.is_set, lambda: pushed.append(1), "first")
    pusher.after(lambda: True, lambda: pushed.append(2), "second")
    assert pushed == []
    first_is_there.set()
    pusher.drain()
    assert pushed == [1, 2]


def test_copy_that_does_not_end_is_an_error_that_names_it() -> None:
    pusher, pushed = Pusher(0.05), []
    pusher.after(lambda: False, lambda: pushed.append(1), "worker 1: the gradients of 'conv.weight'")
    pusher.after(lambda: True, lambda: pushed.append(2), "second")
    with pytest.raises(
        DeadlineError, match=r"gradients of 'conv.weight' were not copied from their device within 0.05 s"
    ):
        pusher.drain()
    assert pushed == []


def test_error_of_a_push_is_raised_once_where_somebody_waits() -> None:
    pusher, pushed = Pusher(5.0), []
    pusher.after(lambda: True, lambda: pushed.remove(1), "first")
    with pytest.raises(ValueError, match="not in list"):
        pusher.drain()
    pusher.after(lambda: True, lambda: pushed.append(1), "next")
    pusher.drain()
    assert pushed == [1]


def train(device: str, passes: int) -> list[float]:
    """Train a small network on a device; return its weights."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)).to(device)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.DistributedOptimizer(inner, model=net, backward_passes_per_step=passes)
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(optimizer.kvstore.rank))
    for _ in range(12):
        optimizer.zero_grad()
        for _ in range(passes):
            net(inputs.to(device)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    return torch.cat([param.detach().cpu().flatten() for param in net.parameters()]).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}])
def test_weights_on_a_gpu_are_those_of_the_cpu(passes: int, settings: dict[str, bool]) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        with LocalJob(2, 1, **settings) as job:  # type: ignore[arg-type]
            found[device] = job.run(train, device, passes)
    torch.testing.assert_close(torch.tensor(found["cuda"]), torch.tensor(found["cpu"]), rtol=1e-4, atol=1e-5)


def capture(update: str) -> str:
    """Capture forward and backward in a CUDA graph; return the error."""
    net = torch.nn.Linear(4, 2).cuda()
    paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, update=update)
    inputs = torch.ones(3, 4, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            net(inputs).sum().backward()
    except RuntimeError as error:
        while not isinstance(error, PacelineError) and error.__context__ is not None:
            error = error.__context__  # type: ignore[assignment]
        return str(error)
    return ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_pass_in_a_cuda_graph_is_an_error_that_names_the_way_out() -> None:
    with LocalJob(1, 1) as job:
        [found] = job.run(capture, "worker")
    assert "make_graphed_callables before" in found
