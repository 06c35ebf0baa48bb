"""Models whose gradients DDP or the like merges are refused before they train wrong: at once, or at the first step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline import DistributedOptimizer, hvd
from paceline.errors import PacelineError
from paceline.torch_hooks.wrappers import refuse_wrapped


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bare_model_is_taken(process_group: None) -> None:
    net = nn.Linear(2, 1)
    refuse_wrapped(net.parameters(), net, 0)


def test_wrapped_model_is_refused_with_the_way_out(process_group: None) -> None:
    net = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(PacelineError, match=r"worker 3: .*DistributedDataParallel.*--no-torchrun-env"):
        refuse_wrapped(net.parameters(), net, 3)


def test_wrapper_that_nobody_shows_is_found(process_group: None) -> None:
    net = nn.Linear(2, 1)
    hidden = [DistributedDataParallel(nn.Sequential(net))]
    with pytest.raises(PacelineError, match="--no-torchrun-env"):
        refuse_wrapped(net.parameters(), net, 0)
    with pytest.raises(PacelineError, match="--no-torchrun-env"):
        refuse_wrapped([net.bias], None, 0)
    del hidden


def test_wrapper_of_other_parameters_is_left_alone(process_group: None) -> None:
    other, net = DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)
    refuse_wrapped(net.parameters(), net, 0)
    assert other.training


def test_sharded_parameters_are_refused(process_group: None) -> None:
    net = fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PacelineError, match=r"DTensor.*--no-torchrun-env"):
        refuse_wrapped(net.parameters(), None, 0)


def test_optimizer_of_horovods_interface_is_refused() -> None:
    hvd.init()
    try:
        net = torch.nn.Linear(2, 1)
        inner = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
        with pytest.raises(ValueError, match=r"Horovod's interface.* the optimizer that it wraps"):
            DistributedOptimizer(inner, "local", model=net)
    finally:
        hvd.shutdown()  # for tests of the same process
