"""Models whose gradients DDP or the like merges are refused before they train wrong: at once, or at the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline import DistributedOptimizer, hvd, kvstore, wrappers
from paceline.errors import PacelineError
from paceline.gluon import Trainer, replicate
from paceline.testing import LocalJob
from paceline.wrappers import refuse_wrapped


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


# ---- in a job --------------------------------------------------------------------------------------------------------


def said(make: Any) -> str:
    try:
        make()
    except PacelineError as error:
        return str(error)
    return ""


def wrap_in_every_way(path: str) -> list[str]:
    """Return the errors of a worker, or "", in turn: given and hidden wrappers, later ones, no wrapper."""
    store = kvstore.create("dist_sync")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=store.rank, world_size=2)
    heard: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    wrappers.logger.addHandler(log)

    def wrapped() -> tuple[nn.Module, nn.Module]:
        net = nn.Linear(2, 1)
        return net, DistributedDataParallel(net)

    def sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), 0.1)

    found = []
    net, ddp = wrapped()
    found.append(said(lambda: DistributedOptimizer(sgd(ddp), store, model=ddp)))
    found.append(said(lambda: DistributedOptimizer(sgd(net), store)))
    found.append(said(lambda: hvd_optimizer(sgd(net))))

    net = nn.Linear(2, 1)
    late = DistributedOptimizer(sgd(net), store, model=net)
    ddp = DistributedDataParallel(net)
    ddp(torch.ones(3, 2)).sum().backward()
    found.append(said(late.step))

    net = nn.Linear(2, 1)
    trainer = Trainer(replicate(net, ["cpu"]), "sgd", {"learning_rate": 0.1}, kvstore=store)
    ddp = DistributedDataParallel(net)
    ddp(torch.ones(3, 2)).sum().backward()
    found.append(said(lambda: trainer.step(3)))

    bare = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(bare), store, model=bare)
    bare(torch.ones(3, 2)).sum().backward()
    found.append(said(optimizer.step))
    dist.destroy_process_group()
    return [*found, *heard]


def hvd_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    hvd.init()
    try:
        return hvd.DistributedOptimizer(optimizer)
    finally:
        hvd.shutdown()


def test_a_job_whose_script_starts_ddp_is_refused_by_every_front_door(tmp_path: Path) -> None:
    with LocalJob(2, 1) as job:
        outcomes = [worker.result(60) for worker in job.start_all(wrap_in_every_way, str(tmp_path / "group"))]
    for rank, (*refused, bare, warned) in enumerate(outcomes):
        assert len(refused) == 5
        for text in refused:
            assert text.startswith(f"worker {rank}: ")
            assert "--no-torchrun-env" in text
        assert bare == ""
        # A process group alone does nothing wrong; whether other code merges through it is not known here.
        assert warned.startswith(f"worker {rank}: ")
        assert "--no-torchrun-env" in warned


def test_optimizer_of_horovods_interface_is_refused() -> None:
    hvd.init()
    net = torch.nn.Linear(2, 1)
    inner = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    with pytest.raises(ValueError, match=r"Horovod's interface.* the optimizer that it wraps"):
        DistributedOptimizer(inner, "local", model=net)
