"""Every mistake in docs/mistakes.md is made here or in the test that its row names, and says what the row says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline.ddp
from paceline import DistributedOptimizer, config, hvd, kvstore
from paceline.data import ShardedSampler
from paceline.data.partition import part_of
from paceline.membership.alone import WAIT_S
from paceline.testing import LocalJob
from paceline.worker import alone
from tests.docs.pages import ROOT, named_tests, rows

ROWS = [row for row in rows("docs/mistakes.md", column="shown by") if not row[0].startswith("**")]
LINES = {row[0]: row[1].split(" ... ") for row in ROWS}
OWN = "tests/docs/test_mistakes.py"

#: Seconds within which a line about a job is there, and after which most tests judge: one of them takes the real time.
SOON_S, EARLY_S = 10.0, 0.3

#: Seconds between two steps, by when this judges. Ranks of DDP all make as many as last until then.
PAUSES_S = {EARLY_S: 0.01, alone.JUDGE_AFTER_S: 0.1}


def says(output: str, mistake: str) -> bool:
    """Return whether a line of an output has all pieces of the line of a row, in order."""
    pattern = ".*".join(map(re.escape, LINES[mistake]))
    return re.search(pattern, output) is not None


# ---- the page --------------------------------------------------------------------------------------------------------


def test_there_are_twenty_and_each_names_its_test() -> None:
    assert len(ROWS) >= 20
    for _, _, _, shown in ROWS:
        [(path, name)] = named_tests(shown)
        assert f"def {name}(" in (ROOT / path).read_text()


def test_lines_of_other_tests_are_those_that_they_expect() -> None:
    for row in [row for row in ROWS if OWN not in row[3]]:
        [(path, _)] = named_tests(row[3])
        text = re.sub(r'"\n\s*f?"', "", (ROOT / path).read_text())
        assert [piece for piece in LINES[row[0]] if piece not in text] == [], row[0]


def test_lines_about_a_job_are_soon_there() -> None:
    assert all(row[2] in ("< 10 s", "at once", "the next step", "at the end") for row in ROWS)
    assert alone.JUDGE_AFTER_S + WAIT_S < SOON_S - 1


# ---- jobs ------------------------------------------------------------------------------------------------------------


def train(
    inputs: Iterable[torch.Tensor], model: torch.nn.Module, step: Callable[[], Any], judge_after_s: float
) -> None:
    """Train on a list, or until this worker has told how it trains, or what on."""
    alone.JUDGE_AFTER_S = judge_after_s
    watch = alone._watch
    assert watch is not None
    for one in inputs:
        model(one).sum().backward()
        step()
        time.sleep(PAUSES_S[judge_after_s])
        if not isinstance(inputs, list) and (watch._has_told or watch._events is None):
            break


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def ones() -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(1, 2)


def without_joining(rank: int, folder: str) -> None:
    paceline.ddp.on_torch_import()
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    if rank == 1:
        kvstore.create()
    if rank > 1:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank - 2, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(model)
    train(ones() if rank < 2 else [torch.ones(1, 2)] * 55, model, sgd(model).step, alone.JUDGE_AFTER_S)


def test_workers_that_do_not_join(tmp_path: Path) -> None:
    with LocalJob(4, 1) as job:
        workers = [job.start(rank, without_joining, rank, str(tmp_path)) for rank in range(4)]
        for worker in workers:
            worker.result(60)
        output = job.scheduler.output
    for mistake in (
        "the script is as it was, and makes no store",
        "`kvstore.create()` has no type",
        "a DDP script is started without `--ddp`",
    ):
        assert says(output, mistake), output


def without_pushing(rank: int) -> None:
    paceline.ddp.on_torch_import()
    hvd.init()
    torch.distributed.init_process_group("gloo")
    if rank < 2:
        kvstore.create("dist_sync")
    elif rank < 4:
        hvd.init()
    model = torch.nn.Linear(2, 1)
    train(ones(), model, sgd(model).step, EARLY_S)


def test_workers_that_push_nothing() -> None:
    with LocalJob(6, 1, environment={paceline.ddp.VARIABLE: "1"}) as job:
        for worker in [job.start(rank, without_pushing, rank) for rank in range(6)]:
            worker.result(60)
        output = job.scheduler.output
    for mistake in (
        "a store is made, and the optimizer is not wrapped",
        "`hvd.init()`, without `hvd.DistributedOptimizer`",
        "`--ddp`, and the model is not wrapped",
    ):
        assert says(output, mistake), output


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(2, generator=generator)


def samples(number: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * number).reshape(number, 2))


def loader(rank: int) -> Iterable[Any]:
    if rank < 2:
        return ones()
    if rank < 4:
        return (one for (one,) in DataLoader(samples(4000), shuffle=True))
    if rank < 6:
        return (one for (one,) in DataLoader(samples(3000), sampler=ShardedSampler(3000, 1, 0)))
    return DataLoader(Stream())


def with_a_wrapped_optimizer(rank: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(model), kvstore.create("dist_async"), model=model, overlap=False)
    step = {0: sgd(model).step, 1: lambda: None}.get(rank, optimizer.step)
    if rank == 1:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
    train(loader(rank), model, step, EARLY_S)


def update(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.sub_(0.01 * param.grad)
    param.grad = None


def test_workers_that_have_wrapped_their_optimizer() -> None:
    with LocalJob(8, 1) as job:
        for worker in [job.start(rank, with_a_wrapped_optimizer, rank) for rank in range(8)]:
            worker.result(60)
        output = job.scheduler.output
    for mistake in (
        "another optimizer of the same parameters steps",
        "hooks update the weights inside of backward (LOMO)",
        "the loader has no sampler",
        "the sampler has one part: `ShardedSampler(data, 1, 0)`",
        "an iterable data set is the same on all workers",
    ):
        assert says(output, mistake), output


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "call", "rank"),
    [
        (
            "`num_parts` is not the number of workers, and `part_index` is left out",
            lambda: part_of(2, None, lambda: (4, 1)),
            "",
        ),
        ("`python train.py`, without a launcher", lambda: kvstore.create("dist_sync"), ""),
        ("`-s 0`, and a store that needs servers", lambda: kvstore.create("dist_sync"), "1"),
        ('`kvstore.create("ddp")`', lambda: kvstore.create("ddp"), ""),
    ],
)
def test_calls_that_raise(mistake: str, call: Callable[[], Any], rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.variable("rank"), rank)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is part of the row
        call()
    assert says(f"{type(caught.value).__name__}: {caught.value}", mistake)
