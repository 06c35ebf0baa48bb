"""Counting the samples behind a push."""

from __future__ import annotations

import logging
from collections import UserDict

import pytest
import torch

from paceline.optim.samples import Samples


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
    samples.see(inputs)
    assert samples.take() == expected


def test_passes_before_a_push_add_up_and_a_push_without_any_counts_as_the_last() -> None:
    samples = Samples(None, 0)
    assert samples.take() == 1.0
    samples.see(((torch.zeros(2),), {}))
    samples.see(((torch.zeros(3),), {}))
    assert [samples.take(), samples.take()] == [5, 5]
    samples.see(((torch.zeros(4),), {}))
    assert samples.take() == 4


def test_given_number_is_stronger_than_what_is_seen() -> None:
    samples = Samples(7, 0)
    samples.see(((torch.zeros(2),), {}))
    assert samples.take() == 7


def test_inputs_that_cannot_be_counted_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = Samples(None, 0)
    with caplog.at_level(logging.WARNING):
        samples.see((("text",), {}))
        samples.see((("text",), {}))
    assert len(caplog.records) == 1
    assert "set optimizer.samples" in caplog.text
