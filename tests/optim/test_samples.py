"""Counting the samples behind a push."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.data import dealt
from paceline.data.dealt import Walk
from paceline.optim.samples import Count, SampleCounter


def backward(samples: SampleCounter, inputs: Any, passes: int = 1, reaches: bool = True) -> None:
    """Go forward and backward through something with two outputs."""
    weight = torch.ones(1, requires_grad=True)
    outputs = {"one": weight * 2, "other": [weight * 3]}
    samples.see(inputs, outputs)
    weight.register_post_accumulate_grad_hook(lambda param: samples.touch() if reaches else None)
    for _ in range(passes):
        (outputs["one"] + outputs["other"][0]).backward(retain_graph=True)


def certain(samples: SampleCounter) -> float:
    """Return the weight of the push that begins now, whose samples must be certain."""
    count = samples.take()
    assert count.way != "unknown", count
    return count.samples


def test_passes_before_a_push_add_up() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(2),), {}))
    backward(samples, ((torch.zeros(3),), {}))
    assert certain(samples) == 5
    backward(samples, ((torch.zeros(4),), {}))
    assert certain(samples) == 4


def test_forward_passes_without_a_backward_pass_count_nothing() -> None:
    samples = SampleCounter(None, 0)
    samples.see(((torch.zeros(50),), {}), torch.ones(1, requires_grad=True) * 2)
    samples.see(((torch.zeros(50),), {}), torch.ones(1))
    backward(samples, ((torch.zeros(3),), {}))
    assert certain(samples) == 3


def test_backward_passes_that_reach_no_parameter_count_nothing() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(50),), {}), reaches=False)
    backward(samples, ((torch.zeros(3),), {}))
    assert certain(samples) == 3


def test_a_backward_pass_that_has_failed_counts_nothing() -> None:
    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    samples = SampleCounter(None, 0)
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(fail)
    output = weight * 2
    samples.see(((torch.zeros(50),), {}), output)
    with pytest.raises(MemoryError):
        output.backward()
    backward(samples, ((torch.zeros(3),), {}))
    assert certain(samples) == 3


def test_push_within_a_pass_weighs_what_the_pass_has_seen() -> None:
    samples, taken = SampleCounter(None, 0), []
    weight = torch.ones(1, requires_grad=True)

    def push(param: torch.Tensor) -> None:
        samples.touch()
        taken.append(certain(samples))

    weight.register_post_accumulate_grad_hook(push)
    for number in (3, 4):
        output = weight * 2
        samples.see(((torch.zeros(number),), {}), output)
        output.backward()
    assert taken == [3, 4]


def test_each_backward_pass_through_one_forward_pass_counts() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(3),), {}), passes=2)
    assert certain(samples) == 6


def test_given_number_is_stronger_than_what_is_seen() -> None:
    samples = SampleCounter(7, 0)
    backward(samples, ((torch.zeros(2),), {}))
    assert certain(samples) == 7


def test_without_a_batch_dim_shapes_are_told_and_nothing_is_guessed() -> None:
    samples = SampleCounter(None, None)
    backward(samples, ((torch.zeros(5, 2), torch.zeros(5)), {}))
    assert samples.take() == Count(1.0, 5.0, "unknown", "[5, 2], [5]", "batch_dim is not set")


def test_inputs_that_disagree_on_the_batch_dim_are_not_counted() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(40), torch.zeros(8)), {}))
    count = samples.take()
    assert (count.samples, count.shapes) == (1.0, "[40], [8]")
    assert "do not agree on dimension 0" in count.why


def test_a_pass_without_a_call_that_was_seen_is_not_counted() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(5),), {}))
    assert certain(samples) == 5
    param = torch.ones(1, requires_grad=True)
    param.register_post_accumulate_grad_hook(lambda param: samples.touch())
    (param * 2).backward()
    count = samples.take()
    assert (count.samples, count.shapes, count.why) == (1.0, "", "no call of the model was seen")


@pytest.mark.parametrize("batch_dim", [None, 0, 1])
def test_empty_tensors_are_no_samples_whatever_their_shape(batch_dim: int | None) -> None:
    samples = SampleCounter(None, batch_dim)
    backward(samples, ((torch.zeros(4, 0), torch.zeros(0)), {}))
    assert certain(samples) == 0


def test_no_backward_pass_and_no_gradient_is_no_sample() -> None:
    assert SampleCounter(None, None).take(lambda: False) == Count(0.0, 0.0)


def test_a_batch_that_is_told_counts_once_per_push_instead_of_calls() -> None:
    samples = SampleCounter(None, 0)
    for size in (6, 2):
        samples.see_batch({"x": torch.zeros(size, 3)})
        for _ in range(2):
            backward(samples, ((torch.zeros(50),), {}))
            samples.ended()
    assert certain(samples) == 8


# ---- batches of a sampler ----------------------------------------------------------------------------------------


def a_pass(samples: SampleCounter) -> None:
    samples.touch()
    samples.ended()


class Sampler:
    """Stands for a sampler: walks compare samplers by weak references."""


TRAINING, OTHER = Sampler(), Sampler()


@pytest.fixture
def walk() -> Iterator[Walk]:
    walk = Walk(TRAINING)
    yield walk
    walk.end()


def test_a_dealt_batch_counts_once_per_push_however_many_passes_it_takes(walk: Walk) -> None:
    samples = SampleCounter(None, None)
    walk.hand_out(7)
    a_pass(samples)
    a_pass(samples)
    assert certain(samples) == 7
    a_pass(samples)
    assert certain(samples) == 7
    for size in (3, 4):
        walk.hand_out(size)
        a_pass(samples)
    assert certain(samples) == 7


def test_dealt_batches_that_no_pass_has_used_do_not_count(walk: Walk) -> None:
    samples = SampleCounter(None, None)
    for size in (3, 4, 5):
        walk.hand_out(size)
    a_pass(samples)
    assert certain(samples) == 5


def test_what_a_running_pass_pushes_is_not_counted_again_when_it_ends(walk: Walk) -> None:
    samples = SampleCounter(None, None)
    walk.hand_out(3)
    samples.touch()
    assert certain(samples) == 3
    samples.touch()
    samples.ended()
    walk.hand_out(4)
    a_pass(samples)
    assert certain(samples) == 4


def test_gradients_set_by_hand_are_those_of_the_batch_that_the_loop_has(walk: Walk) -> None:
    samples = SampleCounter(None, None)
    walk.hand_out(3)
    assert certain(samples) == 3


def test_batches_of_two_samplers_at_once_are_not_counted(walk: Walk) -> None:
    samples, other = SampleCounter(None, None), Walk(OTHER)
    for _ in range(2):
        walk.hand_out(3)
        other.hand_out(30)
        a_pass(samples)
        assert samples.take().way == "unknown"
    other.end()


def test_evaluation_in_between_does_not_count(walk: Walk) -> None:
    samples, evaluation = SampleCounter(None, None), Walk(OTHER)
    walk.hand_out(3)
    a_pass(samples)
    assert certain(samples) == 3
    evaluation.hand_out(30)
    walk.hand_out(4)
    a_pass(samples)
    assert certain(samples) == 4
    evaluation.end()


def test_the_number_that_is_set_and_the_batch_dim_are_stronger_than_the_sampler(walk: Walk) -> None:
    walk.hand_out(3)
    given, told = SampleCounter(9, None), SampleCounter(None, 0)
    a_pass(given)
    backward(told, ((torch.zeros(5),), {}))
    a_pass(told)
    assert [certain(given), certain(told)] == [9, 5]


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("wrap", [Output, Opaque])
def test_outputs_in_objects_count(wrap: Any) -> None:
    samples = SampleCounter(None, 0)
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda param: samples.touch())
    output = wrap(weight * 2)
    samples.see(((torch.zeros(3),), {}), output)
    output.loss.backward()
    assert certain(samples) == 3


def test_passes_whose_gradients_were_dropped_do_not_count(walk: Walk) -> None:
    seen, dealt = SampleCounter(None, 0), SampleCounter(None, None)
    walk.hand_out(7)
    backward(seen, ((torch.zeros(5),), {}))
    seen.ended()
    a_pass(dealt)
    seen.see(((torch.zeros(2),), {}), Opaque(torch.ones(1)))  # of the next pass
    for one in (seen, dealt):
        one.forget()
    walk.hand_out(3)
    backward(seen, ((torch.zeros(4),), {}))
    for one in (seen, dealt):
        a_pass(one)
    assert [certain(seen), certain(dealt)] == [2 + 4, 3]


def test_samples_may_rise_until_a_pass_has_gone_through_all_calls_that_have_a_graph() -> None:
    samples, seen = SampleCounter(None, 0), []
    after, before = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    for param in (after, before):
        param.register_post_accumulate_grad_hook(lambda param: seen.append(samples.may_rise))
    outputs = before * torch.zeros(5)
    samples.see(((torch.zeros(5),), {}), outputs)
    assert samples.may_rise
    (outputs * after).sum().backward()
    assert seen == [True, False]
    outputs = before * torch.zeros(3)
    samples.see(((torch.zeros(3),), {}), outputs)
    del outputs
    assert not samples.may_rise


def test_a_push_of_the_last_gradients_counts_as_many_samples() -> None:
    samples = SampleCounter(None, 0)
    backward(samples, ((torch.zeros(5),), {}))
    assert certain(samples) == 5
    samples.ended()
    assert samples.take(lambda: True, lambda: True).samples == 5
    assert samples.take(lambda: False, lambda: True) == Count(0.0, 0.0)


def test_backward_passes_and_pushes_are_uses_of_the_batches_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealt, "_uses", dealt._Uses())
    samples = SampleCounter(None, None)
    for use in (samples.ended, samples.take):
        walk = Walk(TRAINING)
        walk.hand_out(3)
        walk.leave()
        assert walk.has_only_looked
        use()
        assert not walk.has_only_looked


@pytest.mark.parametrize(("given", "weight", "way"), [(7, 1.0, "equal"), (0, 0.0, ""), (None, 1.0, "equal")])
def test_equal_weights_are_1_unless_a_worker_has_no_samples(given: float | None, weight: float, way: str) -> None:
    samples = SampleCounter(given, None, "equal")
    backward(samples, ((torch.zeros(5),), {}))
    count = samples.take()
    assert (count.samples, count.way) == (weight, way)
    with pytest.raises(ValueError, match="weigh is 'samples' or 'equal' or 'loss', not 'labels'"):
        SampleCounter(None, None, "labels")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_number_that_no_batch_has_is_refused_and_changes_nothing(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"samples is {wrong}; it must be a finite number"):
        SampleCounter(wrong, None)
    samples = SampleCounter(7, None)
    with pytest.raises(ValueError, match="must be a finite number"):
        samples.give(wrong)
    assert samples.take() == Count(7.0, 7.0, "given")
