"""What a loss is divided by, as far as its graph shows it; all else is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.torch_hooks.loss_graph import divisor_of

N = 6
LABELS, TARGETS, CLASSES = torch.arange(N) % 3, torch.rand(N, 3), torch.tensor([1.0, 2.0, 4.0])
PARTLY = LABELS.masked_fill(LABELS == 1, -100)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
WEIGHT = torch.rand(4, 3, requires_grad=True)
Loss = Callable[[torch.Tensor], torch.Tensor]


def nll(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, LABELS, reduction="none")


#: Losses, and the numbers that they are divided by.
KNOWN: dict[str, tuple[Loss, float]] = {
    "cross entropy": (lambda out: F.cross_entropy(out, LABELS), N),
    "nll_loss": (lambda out: F.nll_loss(out.log_softmax(1), LABELS), N),
    "of pixels": (lambda out: F.cross_entropy(out.view(N, 3, 1, 1), PARTLY.view(N, 1, 1)), 4),
    "ignored labels": (lambda out: F.cross_entropy(out, PARTLY), 4),
    "weights of classes": (lambda out: F.cross_entropy(out, LABELS, CLASSES), 14),
    "weights, and ignored labels": (lambda out: F.cross_entropy(out, PARTLY, CLASSES), 10),
    "smoothed labels": (lambda out: F.cross_entropy(out, PARTLY, label_smoothing=0.1), 4),
    "smoothed labels and weights": (lambda out: F.cross_entropy(out, PARTLY, CLASSES, label_smoothing=0.1), 10),
    "smoothed labels of words": (lambda out: F.cross_entropy(out.T[None], PARTLY[None], label_smoothing=0.1) / 2, 4),
    "in half precision": (lambda out: F.cross_entropy(out.half(), PARTLY), 4),
    "scaled": (lambda out: 1024 * F.cross_entropy(out, PARTLY) / 2, 4),
    "no label that counts": (lambda out: F.cross_entropy(out, torch.full((N,), -100)), 0),
    "squares": (lambda out: F.mse_loss(out, TARGETS), 3 * N),
    "a mean by hand": (lambda out: (out - TARGETS).square().sum(1).mean(), N),
    "a mean of elements of a mask": (lambda out: nll(out)[MASK.bool()].mean(), 4),
    "logits": (lambda out: F.binary_cross_entropy_with_logits(out, TARGETS), 3 * N),
    "a sum that is divided": (lambda out: F.cross_entropy(out, LABELS, reduction="sum") / N, N),
    "words": (lambda out: (nll(out) * MASK).sum() / MASK.sum(), 4),
    "words, divided before the sum": (lambda out: (nll(out) * MASK / MASK.sum()).sum(), 4),
    "a divisor of several terms": (lambda out: (nll(out).sum() + out.square().sum()) / 5, 5),
    "a penalty on weights": (lambda out: F.cross_entropy(out, PARTLY) + WEIGHT.square().sum() + WEIGHT.norm(), 4),
}

#: Losses, and why it is not known by what they are divided.
REFUSED: dict[str, tuple[Loss, str]] = {
    "a sum": (lambda out: nll(out).sum(), "no number divides"),
    "a sum twice": (lambda out: out.square().sum(1).sum(), "no number divides"),
    "reduction='sum'": (lambda out: F.mse_loss(out, TARGETS, reduction="sum"), "no number divides"),
    "torch.dot": (lambda out: torch.dot(out[0], out[1]), "no number divides"),
    "divided twice": (lambda out: nll(out).sum() / 4 / 2, "several numbers divide"),
    "a product with a fraction": (lambda out: nll(out).sum() * 0.25, "no number divides"),
    "a norm": (lambda out: out.norm() ** 2, "neither a sum nor a mean"),
    "a trace": (lambda out: torch.trace(out @ out.T), "neither a sum nor a mean"),
    "Python's sum": (lambda out: sum(map(F.cross_entropy, out, LABELS)) / N, "one by one"),
    "two means": (lambda out: F.mse_loss(out, TARGETS) + F.cross_entropy(out, PARTLY), "one by one"),
    "two heads": (lambda out: F.cross_entropy(out, LABELS) + F.cross_entropy(out, PARTLY), "one by one"),
    "two quotients": (lambda out: out.sum() / 4 + nll(out).sum() / 3, "one by one"),
    "a mean of means": (lambda out: torch.stack([out[:2].mean(), out[2:].mean()]).mean(), "none of single samples"),
    "a sum of the mean over samples": (lambda out: out.mean(0).sum() / 3, "none of single samples"),
    "a mean over samples, by a negative dimension": (lambda out: out.mean(-2).sum() / 3, "none of single samples"),
    "a spread over samples": (lambda out: F.relu(1 - out.std(0)).sum() / 3, "none of single samples"),
    "a product of terms": (lambda out: out.mean() * nll(out).mean(), "a product of two terms"),
    "divided by what is learned": (lambda out: nll(out).sum() / out.abs().sum(), "a quotient of two terms"),
    "several losses": (nll, "several elements"),
    "a function": (lambda out: 2 * Own.apply(out), "the autograd function Own"),
    "a checkpoint": (
        lambda out: checkpoint(F.cross_entropy, out, PARTLY, use_reentrant=True), "a checkpointed segment"
    ),
    "a checkpoint without a pass": (
        lambda out: checkpoint(F.cross_entropy, out, PARTLY, use_reentrant=False), "hooks of saved tensors"
    ),
    "thousands of terms": (lambda out: sum(out.mean() * one for one in range(1, 300)), "more than 200 operations"),
}  # fmt: skip


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(N, 3)


def outputs() -> torch.Tensor:
    return torch.nn.Linear(4, 3)(torch.rand(N, 4))


@pytest.mark.parametrize("name", KNOWN)
def test_the_number_that_divides_a_loss_is_found(name: str) -> None:
    loss, number = KNOWN[name]
    found = divisor_of([loss(outputs())])
    assert (found.unknown, None if found.number is None else float(found.number)) == ("", number)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_graph_does_not_show_is_refused_with_the_reason(name: str) -> None:
    loss, reason = REFUSED[name]
    found = divisor_of([loss(outputs())])
    assert found.number is None
    assert reason in found.unknown


def test_a_penalty_alone_has_no_number() -> None:
    found = divisor_of([WEIGHT.square().sum()])
    assert (found.number, found.unknown) == (None, "")


def test_a_loss_in_compiled_code_is_refused() -> None:
    compiled = torch.compile(lambda out: F.cross_entropy(out, PARTLY), backend="aot_eager")
    assert "torch.compile" in divisor_of([compiled(outputs())]).unknown


def test_no_other_room_reads_the_graph_of_a_loss() -> None:
    sources = Path(paceline.__file__).parent
    found = {path.name for path in sources.rglob("*.py") if re.search(r"\b(_saved_|next_functions)", path.read_text())}
    assert found == {"loss_graph.py"}
