from __future__ import annotations

import pytest
import torch

from paceline.compression.packed import OneBit
from paceline.errors import ProtocolError


def test_first_element_is_in_the_most_significant_bit() -> None:
    codec = OneBit()
    grad = torch.tensor([1.0, -1.0, -1.0, -1.0, 2.0, -0.1, 0.1, -3.0, 0.5, 0.0])
    payload = codec.encode(grad, codec.new_state(10))
    assert payload.tobytes() == bytes([0b1000_1010, 0b1000_0000])


def test_values_are_plus_and_minus_one_and_the_rest_is_the_residual() -> None:
    codec = OneBit()
    state, out = codec.new_state(2), torch.empty(2)
    codec.decode(codec.encode(torch.tensor([0.25, -0.5]), state), out)
    assert out.tolist() == [1.0, -1.0]
    assert state.residual is not None
    assert state.residual.tolist() == [-0.75, 0.5]


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, [-1.0, 1.0]), (0.5, [-1.0, -1.0]), (-0.5, [1.0, 1.0])])
def test_bit_is_set_above_the_threshold(threshold: float, expected: list[float]) -> None:
    codec = OneBit(threshold)
    out = torch.empty(2)
    codec.decode(codec.encode(torch.tensor([0.0, 0.5]), codec.new_state(2)), out)
    assert out.tolist() == expected


def test_payload_has_a_byte_for_eight_elements() -> None:
    assert [OneBit().encoded_nbytes(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_bits_after_the_last_element_are_refused() -> None:
    out = torch.full((7,), 3.0)
    with pytest.raises(ProtocolError, match="after the last element"):
        OneBit().decode(bytes([1]), out)
    assert out.tolist() == [3.0] * 7
