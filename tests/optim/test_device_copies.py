"""Pushes that wait for copies from a device, without one and with one."""

from __future__ import annotations

import threading

import pytest
import torch

import paceline
from paceline.errors import DeadlineError, PacelineError
from paceline.layout.tensors import copy_stream
from paceline.net.memory import pin, unpin
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
    inputs = torch.ones(3, 4, device="cuda")
    net(inputs).sum().backward()  # makes the handles of libraries, which a capture refuses
    paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, update=update)
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
@pytest.mark.parametrize("update", ["worker", "server"])
def test_backward_pass_in_a_cuda_graph_is_an_error_that_names_the_way_out(update: str) -> None:
    with LocalJob(1, 1) as job:
        [found] = job.run(capture, update)
    assert "make_graphed_callables before" in found


def train_behind_slow_copies(update: str, delay: int) -> list[float]:
    """Train while the stream for copies has other work first, and zero gradients in place; return the weights."""
    device = torch.device("cuda:0")
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    ).to(device, memory_format=torch.channels_last)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.DistributedOptimizer(inner, model=net, update=update)  # type: ignore[arg-type]
    inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(optimizer.kvstore.rank)).to(device)
    for _ in range(3):
        with torch.cuda.stream(copy_stream(device)):
            torch.cuda._sleep(delay)
        net(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return torch.cat([one.detach().float().cpu().flatten() for one in net.state_dict().values()]).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("update", ["worker", "server"])
def test_slow_copies_change_no_weight_and_are_no_error(update: str) -> None:
    found = []
    for delay in (200_000_000, 0):  # some 0.1 s of the GPU
        with LocalJob(2, 1) as job:
            found.append(torch.tensor(job.run(train_behind_slow_copies, update, delay)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def change_on_a_gpu() -> list[str]:
    """Change a weight where the servers do not see it; return the errors of three steps."""
    net = torch.nn.Linear(4, 2).cuda()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net, update="server")
    said = []
    for number in range(3):
        if number == 1:
            net.weight.data.add_(1.0)
        if number == 2:
            optimizer.broadcast_weights()
        net(torch.ones(3, 4, device="cuda")).sum().backward()
        try:
            optimizer.step()
            said.append("")
        except PacelineError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weight_on_a_gpu_that_a_loop_has_changed_is_an_error() -> None:
    with LocalJob(2, 1) as job:
        for first, second, third in job.run(change_on_a_gpu):
            assert "parameter 'weight' was changed after the last step" in second
            assert first == third == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_cannot_be_locked_makes_no_later_kernel_fail() -> None:
    memory, device = torch.zeros(4096, 4), torch.device("cuda:0")
    assert pin(memory, device)
    assert not pin(memory, device)
    assert (torch.ones(3, device=device) + 1).tolist() == [2.0] * 3
    unpin(memory)


def move_and_train() -> list[str]:
    """Train on a GPU, then on the CPU, then on the GPU again, with one optimizer."""
    net = torch.nn.Linear(4, 2).cuda()
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    devices = []
    for device in ("cuda", "cpu", "cuda"):
        net.to(device)
        net(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()
        devices.append(net.weight.device.type)
    return devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_net_that_is_moved_to_another_device_trains_on() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(move_and_train) == [["cuda", "cpu", "cuda"]]


def backward_behind_other_work() -> bool:
    """Run a backward pass while the GPU has other work first; return whether the last hook still saw that work."""
    device = torch.device("cuda:0")
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(device)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    inputs, seen = torch.randn(5, 6, device=device), []
    for delay in (0, 2_000_000_000):  # some second of the GPU; the first pass loads kernels
        torch.cuda._sleep(delay)
        work = torch.cuda.current_stream(device).record_event()
        net[0].weight.register_post_accumulate_grad_hook(lambda _, work=work: seen.append(not work.query()))
        net(inputs).square().sum().backward()
        optimizer.step()
    return seen[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_hook_waits_for_the_device_to_send_buffers() -> None:
    with LocalJob(2, 1) as job:
        assert job.run(backward_behind_other_work) == [True, True]
