"""Comparing how the workers behind an update count."""

from __future__ import annotations

import pytest

from paceline.counting import Inputs, difference_of, mixture_of

MIXED = "worker 1 counts the samples of its batches, and worker 0 does not know their number"


@pytest.mark.parametrize(
    ("inputs", "mixed", "unlike"),
    [
        ({}, "", ""),
        ({0: None, 1: None}, "", ""),
        ({0: "[4]", 1: "[4]"}, "", ""),
        ({0: "", 1: ""}, "", ""),
        ({1: "[5]", 0: "[4]"}, "", "inputs are [4] on worker 0 and [5] on worker 1"),
        ({0: "[4]", 1: "[4]", 2: ""}, "", "inputs are [4] on worker 0 and unknown on worker 2"),
        (
            {0: "[4]", 1: None},
            "worker 1 counts the samples of its batches, and worker 0 does not know their number",
            "",
        ),
    ],
)
def test_workers_all_count_or_none_does_and_shapes_are_compared(inputs: Inputs, mixed: str, unlike: str) -> None:
    assert mixture_of(inputs) == mixed
    assert difference_of(inputs) == unlike
