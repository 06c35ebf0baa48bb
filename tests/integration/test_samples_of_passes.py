"""Samples of the passes that one step accumulates: the weights are those of one process, or a line names the way out.

Gradients of the passes of a step are added up. Each loss is divided by the samples of its pass, and by the passes; or
by the samples of the whole step. The script tells ``optimizer.samples`` before each pass, once a step, or after
the passes; or ``batch_dim`` counts them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline import DistributedOptimizer
from paceline.testing import LocalJob, tell
from tests.hvd.ranks import run as run_ranks

Parts = list[tuple[torch.Tensor, torch.Tensor]]

SIZES, STEPS = ((2, 5), (4, 4)), 2
SERVERS: dict[str, dict[str, Any]] = {
    "each pass is merged": {},
    "merged at once": {"backward_passes_per_step": 2},
    "servers step": {"update": "server"},
    "local steps": {"local_steps": 1, "outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False}},
}
ALL_REDUCE = {f"{name}, all-reduce": options for name, options in SERVERS.items() if "merged" in name}

#: By what losses are divided, and when the script tells the samples.
HABITS = list(itertools.product(("pass", "step"), ("each", "once", "after", "counted")))
CASES = [(mode, *habit) for mode in SERVERS | ALL_REDUCE for habit in HABITS]

PASSES = "backward passes of one step have 2 and 5 samples"
LATE = "optimizer.samples was set to 7 after the gradients of this step had left"


def parts(step: int, rank: int) -> Parts:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in SIZES[rank]
    ]


def new_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3)


def weights_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in net.parameters()])


def backward(net: torch.nn.Module, own: Parts, divided_by: str, tells: Callable[[int], None]) -> None:
    total = sum(len(y) for _, y in own)
    for x, y in own:
        tells(len(y))
        share = 1 / len(own) if divided_by == "pass" else len(y) / total
        (F.cross_entropy(net(x), y) * share).backward()


@functools.cache
def reference(divided_by: str) -> torch.Tensor:
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        joined = [
            (torch.cat(list(x)), torch.cat(list(y)))
            for x, y in (zip(*one, strict=True) for one in zip(parts(step, 0), parts(step, 1), strict=True))
        ]
        backward(net, joined, divided_by, lambda _: None)
        optimizer.step()
    return weights_of(net)


def train(store: str, rank: int, options: dict[str, Any], divided_by: str, tells: str) -> tuple[float, list[str]]:
    """Return how far the weights are from those of one process, and what this worker has said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.optim.told").addHandler(handler)
    net = new_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    known = {"batch_dim": 0} if tells == "counted" else {"samples": 1}
    optimizer = DistributedOptimizer(inner, store, model=net, **known, **options)

    def set_samples(samples: int) -> None:
        optimizer.samples = samples

    for step in range(STEPS):
        optimizer.zero_grad()
        if tells == "once":
            set_samples(sum(SIZES[rank]))
        backward(net, parts(step, rank), divided_by, set_samples if tells == "each" else lambda _: None)
        if tells == "after":
            set_samples(sum(SIZES[rank]))
        optimizer.step()
    logging.getLogger("paceline.optim.told").removeHandler(handler)
    optimizer.close()
    return float((weights_of(net) - reference(divided_by)).abs().max()), lines


def train_all(store: str, modes: dict[str, dict[str, Any]]) -> list[Any]:
    rank = paceline.kvstore.create(store).rank
    return [((mode, *habit), train(store, rank, modes[mode], *habit)) for mode in modes for habit in HABITS]


def tell_all(modes: dict[str, dict[str, Any]]) -> None:
    tell(train_all("dist_sync", modes))


@functools.cache
def outcomes(all_reduce: bool) -> dict[Any, Any]:
    """Return by case what the first worker has found."""
    if all_reduce:
        found = run_ranks(train_all, 2, "allreduce", ALL_REDUCE)[0]
    else:
        with LocalJob(2, 1) as job:
            found = job.start_all(tell_all, SERVERS)[0].heard()
    return {tuple(case): outcome for case, outcome in found}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_weights_are_those_of_one_process_or_a_line_names_the_way_out(case: tuple[str, str, str]) -> None:
    mode, divided_by, tells = case
    distance, lines = outcomes(mode in ALL_REDUCE)[case]
    is_equal = distance < 1e-6
    by_itself = mode.startswith("each")
    if tells in ("each", "counted"):
        (line,) = lines
        assert line.startswith(f"worker 0: {PASSES}")
        assert is_equal == (by_itself == (divided_by == "pass"))
    elif tells == "after" and "merged" in mode:
        assert [one.startswith(f"worker 0: {LATE}") for one in lines] == [True]
    else:  # the samples of the step: those that the loss has to be divided by
        assert lines == []
        assert is_equal == (divided_by == "step")
