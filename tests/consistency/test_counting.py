"""Comparing how the workers behind an update count."""

from __future__ import annotations

import pytest

from paceline.consistency.counting import LABELS, Inputs, difference_of, mixture_of


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
        ({0: LABELS, 1: LABELS}, "", ""),
        (
            {0: LABELS, 1: None, 2: LABELS},
            "worker 1 counts the samples of its batches, and worker 0 counts the labels of its losses",
            "",
        ),
        ({0: "", 3: LABELS}, "worker 3 counts the labels of its losses, and worker 0 does not know their number", ""),
    ],
)
def test_workers_all_count_or_none_does_and_shapes_are_compared(inputs: Inputs, mixed: str, unlike: str) -> None:
    assert mixture_of(inputs) == mixed
    assert difference_of(inputs) == unlike
