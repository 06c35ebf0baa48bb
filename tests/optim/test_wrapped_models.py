"""A script that starts DDP beside paceline is refused; ``tests/torch_hooks/test_wrappers.py`` shows what is found."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import DistributedOptimizer, hvd, kvstore
from paceline.errors import PacelineError
from paceline.gluon import Trainer, replicate
from paceline.testing import LocalJob
from paceline.torch_hooks import wrappers


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
