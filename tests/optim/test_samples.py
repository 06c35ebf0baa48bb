"""Counting the samples behind a push."""

from __future__ import annotations

import logging
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.optim.samples import Samples


def backward(samples: Samples, inputs: Any, passes: int = 1, reaches: bool = True) -> None:
    """Go forward and backward through something with two outputs."""
    weight = torch.ones(1, requires_grad=True)
    outputs = {"one": weight * 2, "other": [weight * 3]}
    samples.see(inputs, outputs)
    weight.register_post_accumulate_grad_hook(lambda param: samples.touch() if reaches else None)
    for _ in range(passes):
        (outputs["one"] + outputs["other"][0]).backward(retain_graph=True)


@pytest.mark.parametrize(
    ("inputs", "batch_dim", "expected"),
    [
        (((torch.zeros(5, 2),), {}), 0, 5),
        (((), {"x": torch.zeros(4, 2)}), 0, 4),
        ((({"ids": [torch.zeros(3, 7)]},), {}), 0, 3),
        (((UserDict(ids=torch.zeros(6, 7)),), {}), 0, 6),
        (((torch.zeros(9, 2),), {}), 1, 2),
        (((torch.tensor(1.0), torch.zeros(8)), {}), 0, 8),
        (((torch.zeros(5), torch.zeros(5, 3)), {}), 1, 3),
    ],
)
def test_samples_are_the_size_of_the_first_tensor_that_has_the_dimension(inputs, batch_dim, expected) -> None:
    samples = Samples(None, batch_dim)
    backward(samples, inputs)
    assert samples.take() == expected


def test_passes_before_a_push_add_up_and_a_push_without_any_counts_as_the_last() -> None:
    samples = Samples(None, 0)
    assert samples.take() == 1.0
    backward(samples, ((torch.zeros(2),), {}))
    backward(samples, ((torch.zeros(3),), {}))
    assert [samples.take(), samples.take()] == [5, 5]
    backward(samples, ((torch.zeros(4),), {}))
    assert samples.take() == 4


def test_forward_passes_without_a_backward_pass_count_nothing() -> None:
    samples = Samples(None, 0)
    samples.see(((torch.zeros(50),), {}), torch.ones(1, requires_grad=True) * 2)
    samples.see(((torch.zeros(50),), {}), torch.ones(1))
    backward(samples, ((torch.zeros(3),), {}))
    assert samples.take() == 3


def test_backward_passes_that_reach_no_parameter_count_nothing() -> None:
    samples = Samples(None, 0)
    backward(samples, ((torch.zeros(50),), {}), reaches=False)
    backward(samples, ((torch.zeros(3),), {}))
    assert samples.take() == 3


def test_push_within_a_pass_weighs_what_the_pass_has_seen() -> None:
    samples, taken = Samples(None, 0), []
    weight = torch.ones(1, requires_grad=True)

    def push(param: torch.Tensor) -> None:
        samples.touch()
        taken.append(samples.take())

    weight.register_post_accumulate_grad_hook(push)
    for number in (3, 4):
        output = weight * 2
        samples.see(((torch.zeros(number),), {}), output)
        output.backward()
    assert taken == [3, 4]


def test_each_backward_pass_through_one_forward_pass_counts() -> None:
    samples = Samples(None, 0)
    backward(samples, ((torch.zeros(3),), {}), passes=2)
    assert samples.take() == 6


def test_given_number_is_stronger_than_what_is_seen() -> None:
    samples = Samples(7, 0)
    backward(samples, ((torch.zeros(2),), {}))
    assert samples.take() == 7


def test_inputs_that_cannot_be_counted_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = Samples(None, 0)
    with caplog.at_level(logging.WARNING):
        backward(samples, (("text",), {}))
        backward(samples, (("text",), {}))
    assert len(caplog.records) == 1
    assert "set optimizer.samples" in caplog.text


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("wrap", [Output, Opaque])
def test_outputs_in_objects_count(wrap: Any) -> None:
    samples = Samples(None, 0)
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda param: samples.touch())
    output = wrap(weight * 2)
    samples.see(((torch.zeros(3),), {}), output)
    output.loss.backward()
    assert samples.take() == 3
