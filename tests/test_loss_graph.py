"""Whether a loss is a mean over samples or a sum, as far as its graph shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.loss_graph import PassLosses, Reduced, label_mean, reduced, tell_losses

N = 8
WEIGHT = torch.nn.Parameter(torch.rand(N, 3))
LABELS, TARGETS = torch.arange(N) % 3, torch.rand(N, 3)
MASK = torch.rand(N, 3).round()

MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda out: F.cross_entropy(out, LABELS),
    "with smoothed labels": lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.1),
    "of pixels": lambda out: F.cross_entropy(out.view(N, 3, 1, 1), LABELS.view(N, 1, 1)),
    "of half floats": lambda out: F.mse_loss(out.half(), TARGETS.half()).float(),
    "by hand": lambda out: (out - TARGETS).square().sum(1).mean(),
    "scaled": lambda out: torch.amp.GradScaler("cpu").scale(F.l1_loss(out, TARGETS)),
    "accumulated": lambda out: F.huber_loss(out, TARGETS) / 4,
    "with a penalty on weights": lambda out: (
        F.cross_entropy(out, LABELS) + WEIGHT.pow(2).sum() + (WEIGHT * WEIGHT).sum()
    ),
    "with a penalty": lambda out: F.binary_cross_entropy_with_logits(out, TARGETS) + 0.01 * out.norm(),
}
SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda out: F.cross_entropy(out, LABELS, reduction="sum"),
    "with smoothed labels": lambda out: F.cross_entropy(out, LABELS, label_smoothing=0.1, reduction="sum"),
    "squares": lambda out: F.mse_loss(out, TARGETS, reduction="sum"),
    "of an autoencoder": lambda out: F.mse_loss(out, TARGETS, reduction="sum") - 0.5 * out.sum(),
    "by hand": lambda out: (out - TARGETS).square().sum(),
    "of a layer without bias": lambda out: (TARGETS @ WEIGHT.T @ WEIGHT).square().sum(),
    "scaled": lambda out: torch.amp.GradScaler("cpu").scale(out.square().sum()),
}
OVER_LABELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weights of classes": lambda out: F.cross_entropy(out, LABELS, weight=torch.tensor([1.0, 2.0, 3.0])),
    "ignored labels": lambda out: F.cross_entropy(out, LABELS, ignore_index=1),
    "with smoothed labels": lambda out: F.cross_entropy(out, LABELS, ignore_index=1, label_smoothing=0.1),
    "of pixels": lambda out: F.cross_entropy(out.view(N, 3, 1, 1), LABELS.view(N, 1, 1), ignore_index=0),
    "with another mean": lambda out: F.mse_loss(out, TARGETS) + F.cross_entropy(out, LABELS, ignore_index=2) / 4,
}
UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mean by hand": lambda out: out.square().sum() / N,
    "a mean by a factor": lambda out: out.square().sum() * (1 / N),
    "a mean over some": lambda out: (out * MASK).sum() / MASK.sum(),
    "a sum of terms": lambda out: torch.stack([out[index].mean() for index in range(N)]).sum(),
    "a sum over classes": lambda out: out.mean(0).sum(),
    "another operation": lambda out: torch.dot(out[:, 0], out[:, 1]),
}
CASES = [
    (f"{wanted.value}: {name}", wanted, loss)
    for wanted, table in (
        (Reduced.MEAN, MEANS),
        (Reduced.SUM, SUMS),
        (Reduced.OVER_LABELS, OVER_LABELS),
        (Reduced.UNKNOWN, UNKNOWN),
    )
    for name, loss in table.items()
]


@pytest.mark.parametrize(("wanted", "loss"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_loss_is_read_from_its_graph(wanted: Reduced, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    outputs = torch.nn.Linear(4, 3)(torch.rand(N, 4))
    assert reduced(loss(outputs), N) is wanted


@pytest.mark.parametrize("terms", [2, 5000])
def test_a_sum_of_many_terms_is_read_as_far_as_that_takes_no_time(terms: int) -> None:
    outputs = torch.nn.Linear(4, 3)(torch.rand(N, 4))
    loss = F.cross_entropy(outputs, LABELS)
    for _ in range(terms):
        loss = loss + F.cross_entropy(outputs, LABELS)
    assert reduced(loss, N) is Reduced.MEAN


def test_terms_that_are_used_often_are_read_once() -> None:
    loss = F.mse_loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)), TARGETS, reduction="sum")
    for _ in range(100):  # a loss of 2 ** 100 paths
        loss = loss + loss
    assert reduced(loss) is Reduced.SUM


CLASSES = torch.tensor([1.0, 2.0, 3.0])
PARTLY = LABELS.masked_fill(LABELS == 1, -100)
#: A loss, its weight, and whether it has no other terms.
LABEL_MEANS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, bool]] = {
    "cross entropy": (lambda out: F.cross_entropy(out, LABELS), N, True),
    "ignored labels": (lambda out: F.cross_entropy(out, PARTLY), N - 3, True),
    "no labels": (lambda out: F.cross_entropy(out, torch.full((N,), -100)), 0, True),
    "weights of classes": (lambda out: F.cross_entropy(out, LABELS, CLASSES), float(CLASSES[LABELS].sum()), True),
    "smoothed": (lambda out: F.cross_entropy(out, PARTLY, label_smoothing=0.1), N - 3, True),
    "smoothed, with weights": (
        lambda out: F.cross_entropy(out, PARTLY, CLASSES, label_smoothing=0.1),
        float(CLASSES[LABELS][LABELS != 1].sum()),
        True,
    ),
    "of pixels": (lambda out: F.cross_entropy(out.view(N, 3, 1, 1), PARTLY.view(N, 1, 1)), N - 3, True),
    "of probabilities": (lambda out: F.nll_loss(out.log_softmax(1), PARTLY), N - 3, True),
    "scaled": (lambda out: torch.tensor(1024.0) * F.cross_entropy(out, PARTLY) / 4, N - 3, True),
    "of many half floats": (
        lambda out: F.cross_entropy(out[:1].bfloat16().expand(1001, 3), torch.zeros(1001).long()).float(), 1001, True
    ),
    "two": (lambda out: 0.3 * F.cross_entropy(out, LABELS) + 0.7 * F.cross_entropy(out, PARTLY), N, True),
    "and a penalty": (lambda out: F.cross_entropy(out, PARTLY) + WEIGHT.pow(2).sum(), N - 3, False),
    "and another mean": (lambda out: F.mse_loss(out, TARGETS) + F.cross_entropy(out, LABELS), N, False),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "weight", "is_alone"), LABEL_MEANS.values(), ids=LABEL_MEANS)
def test_the_weight_of_a_mean_over_labels_is_what_it_is_divided_by(
    loss: Callable[[torch.Tensor], torch.Tensor], weight: float, is_alone: bool
) -> None:
    found = label_mean([loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)))])
    assert found is not None
    assert (float(found.weight), found.is_alone) == (pytest.approx(weight), is_alone)


@pytest.mark.parametrize("name", [*SUMS, "squares of means"])
def test_other_losses_have_no_labels(name: str) -> None:
    loss = SUMS.get(name, lambda out: F.mse_loss(out, TARGETS))
    assert label_mean([loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)))]) is None


def test_several_losses_of_one_pass_have_one_weight() -> None:
    outputs = torch.nn.Linear(4, 3)(torch.rand(N, 4))
    found = label_mean([F.cross_entropy(outputs, PARTLY), F.cross_entropy(outputs, LABELS)])
    assert found is not None
    assert float(found.weight) == N


def test_a_loss_in_a_checkpointed_segment_is_not_read_as_that_would_compute_it_again() -> None:
    head, calls = torch.nn.Linear(4, 3), 0

    def segment(inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(head(inputs), PARTLY) * torch.tensor(0.25)

    loss = checkpoint(segment, torch.rand(N, 4), use_reentrant=False)
    assert label_mean([loss]) is None
    assert reduced(loss, N) is Reduced.UNKNOWN
    assert calls == 1


class Listener:
    def __init__(self) -> None:
        self.heard: list[PassLosses] = []

    def hear(self, losses: PassLosses) -> None:
        self.heard.append(losses)


def test_losses_of_outermost_passes_are_told_before_their_graph_is_gone() -> None:
    listener, net, inputs = Listener(), torch.nn.Linear(4, 3), torch.rand(N, 4, requires_grad=True)
    tell_losses(listener.hear)
    tell_losses(Listener().hear)  # has ended
    outputs = checkpoint(net, inputs, use_reentrant=True)  # its own pass runs inside of the other one
    loss = F.cross_entropy(outputs, LABELS)
    loss.backward()
    torch.autograd.backward([F.cross_entropy(net(inputs), LABELS)])
    assert [one.tensors[0] is loss for one in listener.heard] == [True, False]
    again = Listener()
    tell_losses(again.hear)
    net(inputs).sum().backward()
    assert len(again.heard) == 1  # the function of torch is replaced once
