"""What one call of a model shows of its samples."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from paceline.optim.samples import tally, text_of


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Opaque:
    pass


PACKED = pack_sequence([torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3), torch.zeros(1)], layout=torch.jagged)
MASKED = UserDict(ids=torch.zeros(6, 7), mask=torch.zeros(6, 7))


@pytest.mark.parametrize(
    ("inputs", "batch_dim", "expected"),
    [
        (((torch.zeros(5, 2),), {}), 0, 5),
        (((), {"x": torch.zeros(4, 2)}), 0, 4),
        ((({"ids": [torch.zeros(3, 7)]},), {}), 0, 3),
        (((MASKED,), {}), 0, 6),
        (((MASKED,), {}), None, None),
        (((torch.zeros(9, 2),), {}), 1, 2),
        (((torch.tensor(1.0), torch.zeros(8)), {}), 0, 8),
        (((torch.zeros(5), torch.zeros(5, 3)), {}), 1, 3),
        (((torch.zeros(5), torch.zeros(5, 3)), {}), None, None),
        (((torch.zeros(40), torch.zeros(8)), {}), 0, None),
        (((Pair(torch.zeros(2, 1), torch.zeros(2)),), {}), 0, 2),
        (((torch.zeros(2, 0), torch.zeros(0)), {}), None, 0),
        (((PACKED,), {}), 0, 2),
        (((PACKED, torch.zeros(1, 2, 6)), {}), None, None),
        (((PACKED, torch.zeros(1, 2, 6)), {}), 1, 2),
        (((NESTED,), {}), 0, 3),
        (((PACKED, NESTED), {}), 0, None),
        ((("text",), {}), 0, None),
    ],
)
def test_samples_are_certain_or_none(inputs: Any, batch_dim: int | None, expected: int | None) -> None:
    assert tally(inputs, batch_dim).samples == expected


def test_equal_texts_mean_equal_shapes() -> None:
    inputs = [
        [torch.zeros(3, 4), torch.zeros(3, 4)],
        [torch.zeros(3, 4)],
        [torch.zeros(3, 5)],
        [np.zeros((3, 4)), "text", 1.0, None],
        [torch.zeros(3, 4)] * 3,
        [torch.zeros(one) for one in range(200)],
        [torch.zeros(one) for one in range(201)],
    ]
    texts = [text_of(tally(one, None).parts) for one in inputs]
    assert texts[0] == "2 x [3, 4]"
    assert texts[3] == "[3, 4], str, float, NoneType"
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) < 240


def test_objects_that_may_hold_samples_are_named() -> None:
    assert tally((torch.zeros(2), Opaque()), None).opaque == "Opaque"
    assert not tally((torch.zeros(2), "text", np.zeros(3), Pair), None).opaque
