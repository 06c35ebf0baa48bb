"""The weight of a worker with ``weigh="loss"``: what its losses were divided by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from paceline.errors import PacelineError
from paceline.optim.samples import Count, SampleCounter

LABELS = torch.arange(6) % 3


class Loop:
    """A net, a counter of its samples, and backward passes."""

    def __init__(self, samples: float | None = None) -> None:
        self.samples, self.net = SampleCounter(samples, 0, "loss"), torch.nn.Linear(4, 3)
        self.samples.read_losses(3)
        for param in self.net.parameters():
            param.register_post_accumulate_grad_hook(lambda _: self.samples.touch())

    def step(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> Count:
        """Go forward and backward, and push."""
        self.go(loss)
        return self.samples.take()

    def go(self, loss: Callable[[torch.Tensor], torch.Tensor], size: int = 6) -> None:
        """Go forward and backward."""
        x = torch.rand(size, 4)
        outputs = self.net(x)
        self.samples.see(((x,), {}), outputs)
        loss(outputs).backward()
        self.samples.ended()


def of_labels(ignored: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: F.cross_entropy(out, LABELS[: len(out)].masked_fill(torch.arange(len(out)) < ignored, -100))


def test_passes_of_a_push_add_up_and_a_push_begins_anew() -> None:
    loop = Loop()
    loop.go(of_labels(2))
    loop.go(of_labels(1))
    count = loop.samples.take()
    assert (count.samples, count.rows, count.way) == (9.0, 12.0, "loss")
    loop.go(of_labels(0))
    assert loop.samples.take().samples == 6


def test_passes_of_others_and_passes_that_are_dropped_do_not_count() -> None:
    loop = Loop()
    torch.ones(3, requires_grad=True).exp().sum().backward()  # its graph would be refused
    loop.go(of_labels(2))
    loop.samples.forget()
    loop.go(of_labels(3))
    assert loop.samples.take().samples == 3


def test_a_worker_without_labels_or_without_samples_counts_nothing() -> None:
    loop = Loop()
    loop.go(of_labels(6))
    assert loop.samples.take().samples == 0
    loop.go(of_labels(0), size=0)
    assert (count := loop.samples.take()).samples == 0
    assert count.way == ""


def test_the_number_that_the_script_sets_is_stronger() -> None:
    loop = Loop(5)
    loop.go(lambda out: out.sum())
    assert loop.samples.take().samples == 5


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([lambda out: out.sum()], "a term is a sum that no number divides"),
        ([lambda out: F.cross_entropy(out, LABELS) * 3, lambda out: F.cross_entropy(out, LABELS) * 5], "and was by 3"),
    ],
)
def test_what_is_not_known_is_refused_with_the_way_out(
    losses: list[Callable[[torch.Tensor], torch.Tensor]], reason: str
) -> None:
    loop = Loop()
    *before, last = losses
    for loss in before:
        loop.step(loss)
    with pytest.raises(PacelineError, match=f"worker 3: with weigh='loss' .* {reason}.* set optimizer.samples"):
        loop.step(last)


def test_gradients_of_no_loss_are_refused_and_a_scale_of_a_power_of_2_may_change() -> None:
    loop = Loop()
    for scale in (1024.0, 512.0):
        loop.go(lambda out, scale=scale: F.cross_entropy(out, LABELS) * scale)  # type: ignore[misc]
        assert loop.samples.take().samples == 6
    with pytest.raises(PacelineError, match=r"the gradients are of no loss that backward\(\) was called on"):
        loop.samples.take()
