from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression.sparse import TopK
from paceline.errors import ProtocolError


def test_indices_ascend_and_values_follow() -> None:
    codec = TopK(k=3)
    grad = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 4.0])
    payload = codec.encode(grad, codec.new_state(6))
    assert payload.tobytes() == struct.pack("<3I3f", 1, 3, 5, -5.0, 3.0, 4.0)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, 1e-40, -3e30, 65536.0]), min_size=1),
    k=st.integers(1, 40),
)
def test_selection_is_exact_and_among_equals_the_lower_index_wins(values: list[float], k: int) -> None:
    codec, grad = TopK(k=k), torch.tensor(values)
    count = min(k, len(values))
    payload = codec.encode(grad, codec.new_state(len(values)))
    expected = sorted(np.argsort(-grad.abs().numpy(), kind="stable")[:count].tolist())
    assert payload[: 4 * count].view(np.uint32).tolist() == expected


def test_selected_elements_leave_the_residual() -> None:
    codec = TopK(k=2)
    state = codec.new_state(4)
    codec.encode(torch.tensor([1.0, -4.0, 2.0, 3.0]), state)
    assert state.residual is not None
    assert state.residual.tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(("ratio", "numel", "count"), [(0.01, 1, 1), (0.01, 101, 2), (0.5, 7, 4), (1.0, 9, 9)])
def test_ratio_is_rounded_up(ratio: float, numel: int, count: int) -> None:
    assert TopK(ratio=ratio).encoded_nbytes(numel) == 8 * count


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ((0, 4), (1.0, 1.0)),
        ((0, 2**32 - 1), (1.0, 1.0)),
        ((2, 2), (1.0, 1.0)),
        ((3, 1), (1.0, 1.0)),
        ((0, 1), (1.0, float("nan"))),
        ((0, 1), (float("inf"), 0.0)),
    ],
)
def test_impossible_payload_is_refused(indices: tuple[int, int], values: tuple[float, float]) -> None:
    out = torch.full((4,), 5.0)
    for method in (TopK(k=2).decode, TopK(k=2).decode_add):
        with pytest.raises(ProtocolError, match="topk payload refused"):
            method(struct.pack("<2I2f", *indices, *values), out)
    assert out.tolist() == [5.0] * 4


def test_bucket_beyond_32_bit_indices_is_refused() -> None:
    with pytest.raises(ValueError, match="split it"):
        TopK().encoded_nbytes(2**32 + 1)
