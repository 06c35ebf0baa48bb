"""Whether a loss is a mean over samples or a sum, as far as its graph shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.torch_hooks.loss_graph import PassLosses, Reduced, counted_mean, reduced, tell_losses

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
    "a mean by hand, divided first": lambda out: (out.square() / N).sum(),
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
    found = counted_mean([loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)))])
    assert found is not None
    assert (float(found.weight), found.is_alone) == (pytest.approx(weight), is_alone)


CHOSEN = MASK.bool()
COUNT = int(CHOSEN.sum())
ROWS = torch.arange(N) % 2 == 0
#: A loss whose graph has the number that its sum is divided by, and that number.
DIVIDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "a masked sum": (lambda out: (out * MASK).sum() / MASK.sum(), COUNT),
    "by a number": (lambda out: (out * MASK).sum() / MASK.sum().item(), COUNT),
    "by at least one": (lambda out: (out * MASK).sum() / MASK.sum().clamp(min=1), COUNT),
    "scaled": (lambda out: torch.amp.GradScaler("cpu").scale(0.5 * (out * MASK).sum() / COUNT), COUNT),
    "negated": (lambda out: -(out.log_softmax(1) * MASK).sum() / COUNT, COUNT),
    "a loss that is a sum": (lambda out: F.cross_entropy(out, PARTLY, reduction="sum") / 5, 5),
    "smoothed": (lambda out: F.cross_entropy(out, PARTLY, reduction="sum", label_smoothing=0.1) / 5, 5),
    "of numbers that are not NaN": (
        lambda out: (out * MASK.masked_fill(~CHOSEN, float("nan"))).nanmean(), COUNT
    ),
    "a product": (lambda out: torch.dot(out[:, 0], MASK[:, 0]) / MASK[:, 0].sum(), int(MASK[:, 0].sum())),
    "elements": (lambda out: (out * MASK / MASK.sum()).sum(), COUNT),
    "masked": (lambda out: torch.masked.mean(out, mask=CHOSEN), COUNT),
    "divergence": (lambda out: F.kl_div(out.log_softmax(1), TARGETS, reduction="batchmean"), N),
    "sums of sequences": (lambda out: ((out * MASK).sum(1) / (1 + MASK.sum(1))).sum() / N, N),
    "two sums": (lambda out: (out.square().sum() + 0.1 * out.abs().sum()) / COUNT, COUNT),
    "two quotients by one tensor": (
        lambda out: (lambda number: out.square().sum() / number + out.abs().sum() / number)(MASK.sum()), COUNT
    ),
    "and a penalty on weights": (
        lambda out: (out * MASK).sum() / COUNT + WEIGHT.pow(2).sum() + WEIGHT.norm() / 2 + WEIGHT.abs().mean(), COUNT
    ),
    "zero elements": (lambda out: (out * 0).sum() / torch.tensor(0), 0),
    "chosen elements": (lambda out: out[CHOSEN].mean(), COUNT),
    "chosen, the other way": (lambda out: out.square().masked_select(CHOSEN).mean() / 4, COUNT),
    "chosen rows": (lambda out: F.mse_loss(out[ROWS], TARGETS[ROWS]), 3 * N / 2),
    "chosen labels": (lambda out: F.cross_entropy(out[ROWS], LABELS[ROWS], reduction="none").mean(), N / 2),
    "chosen losses": (lambda out: F.cross_entropy(out, LABELS, reduction="none")[ROWS].mean(), N / 2),
    "chosen logits": (lambda out: F.binary_cross_entropy_with_logits(out[CHOSEN], TARGETS[CHOSEN]), COUNT),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "weight"), DIVIDED.values(), ids=DIVIDED)
def test_the_number_that_a_sum_is_divided_by_is_found(
    loss: Callable[[torch.Tensor], torch.Tensor], weight: float
) -> None:
    found = counted_mean([loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)))])
    assert found is not None
    assert (float(found.weight), found.weight.shape, found.is_alone) == (weight, (), True)


#: Losses that no one number divides, as far as their graph shows it.
NOT_DIVIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squares of means": lambda out: F.mse_loss(out, TARGETS),
    "a mean": lambda out: out.mean() / COUNT,
    "a part of a mean": lambda out: (out * MASK).mean() / MASK.mean(),
    "means of columns": lambda out: out.mean(0).square().sum() / 3,
    "losses in a list": lambda out: torch.stack([one.sum() for one in out]).sum() / N,
    "of each image": lambda out: sum(one.square().sum() / (2 + at) for at, one in enumerate(out)) / N,  # type: ignore
    "of one image": lambda out: out.square().sum() / 2 / 1,
    "two quotients": lambda out: out.square().sum() / 2 + out.abs().sum() / 3,
    "and a mean": lambda out: (out * MASK).sum() / COUNT + F.mse_loss(out, TARGETS),
    "and something else": lambda out: (out * MASK).sum() / COUNT + out.norm(),
    "two chosen means": lambda out: out[CHOSEN].mean() + out[ROWS].mean(),
    "each by its own": lambda out: (out / torch.rand(N, 1)).sum(),
    "one by its own": lambda out: (out[:1] / torch.rand(1, 1)).sum(),
    "by a learned number": lambda out: out.square().sum() / WEIGHT[0, 0],
    "overlap": lambda out: 1 - (out * MASK).sum() / (out + MASK).sum(),
    "by a factor": lambda out: out.square().sum() * (1 / COUNT),
    "rows by number": lambda out: out[torch.arange(2)].mean(),
    "of several elements": lambda out: out.sum(1, keepdim=True) / COUNT,
}


@pytest.mark.parametrize("name", [*SUMS, *NOT_DIVIDED])
def test_other_losses_have_no_number(name: str) -> None:
    loss = SUMS.get(name) or NOT_DIVIDED[name]
    assert counted_mean([loss(torch.nn.Linear(4, 3)(torch.rand(N, 4)))]) is None


@pytest.mark.parametrize(
    ("name", "is_divided_twice"),
    [("of one image", True), ("of each image", False), ("two quotients", False), ("a mean", False)],
)
def test_a_sum_that_two_numbers_divide_is_told_from_others(name: str, is_divided_twice: bool) -> None:
    loss = NOT_DIVIDED[name](torch.nn.Linear(4, 3)(torch.rand(N, 4)))
    assert PassLosses(loss).are_divided_twice is is_divided_twice


@pytest.mark.parametrize(("divisor", "weight"), [(-4.0, 4), (float("nan"), 1), (float("inf"), 1)])
def test_a_divisor_that_counts_nothing_is_a_weight_all_the_same(divisor: float, weight: float) -> None:
    found = counted_mean([torch.nn.Linear(4, 3)(torch.rand(N, 4)).square().sum() / divisor])
    assert found is not None
    assert float(found.weight) == weight


def test_several_losses_of_one_pass_have_one_weight() -> None:
    outputs = torch.nn.Linear(4, 3)(torch.rand(N, 4))
    found = counted_mean([F.cross_entropy(outputs, PARTLY), F.cross_entropy(outputs, LABELS)])
    assert found is not None
    assert float(found.weight) == N


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda out: F.cross_entropy(out, PARTLY) * torch.tensor(0.25), Reduced.UNKNOWN),
        (lambda out: (out * MASK).sum() / MASK.sum(), Reduced.UNKNOWN),
        (lambda out: F.mse_loss(out[CHOSEN], TARGETS[CHOSEN]), Reduced.MEAN),
        (lambda out: out[CHOSEN].mean(), Reduced.MEAN),
    ],
)
def test_a_loss_in_a_checkpointed_segment_is_not_read_as_that_would_compute_it_again(
    make: Callable[[torch.Tensor], torch.Tensor], kind: Reduced
) -> None:
    head, calls = torch.nn.Linear(4, 3), 0

    def segment(inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return make(head(inputs))

    loss = checkpoint(segment, torch.rand(N, 4), use_reentrant=False)
    assert counted_mean([loss]) is None
    assert reduced(loss, N) is kind
    assert calls == 1


class Chunked(torch.autograd.Function):
    """A mean of squares, whose node does not show how it was made."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()


PACKED = "a checkpointed segment, or with other hooks of saved tensors, as save_on_cpu"


def compiled_loss(out: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda x: F.cross_entropy(x, PARTLY), backend="aot_eager")(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (compiled_loss, "torch.compile"),
        (Chunked.apply, "the autograd function Chunked"),
        (lambda out: Chunked.apply(out) / 4 + 0.1 * out.mean(), "the autograd function Chunked"),
        (lambda out: checkpoint(F.cross_entropy, out, PARTLY, use_reentrant=True), "a checkpointed segment"),
        (lambda out: checkpoint(F.cross_entropy, out, PARTLY, use_reentrant=False), PACKED),
        (lambda out: checkpoint(lambda x: (x * MASK).sum() / MASK.sum(), out, use_reentrant=False), PACKED),
        (lambda out: F.cross_entropy(out, PARTLY) + Chunked.apply(out), None),  # it has labels to weigh by
        (lambda out: checkpoint(F.mse_loss, out, TARGETS, use_reentrant=False), None),
        (lambda out: out.square().mean(), None),
        (lambda out: F.cross_entropy(Chunked.apply(out) * out, PARTLY), None),
    ],
)  # fmt: skip
def test_an_operation_that_hides_how_a_loss_was_made_is_named(
    make: Callable[[torch.Tensor], torch.Tensor], where: str | None
) -> None:
    out = torch.nn.Linear(4, 3)(torch.rand(N, 4))
    assert PassLosses(make(out)).hidden_in == where


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
