from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression.packed import TwoBit
from paceline.errors import ProtocolError


def reference(grad: np.ndarray, residual: np.ndarray, threshold: float) -> tuple[bytes, np.ndarray]:
    """MXNet's loop, element by element."""
    t, residual = np.float32(threshold), residual.copy()
    packed = bytearray((len(grad) + 3) // 4)
    for i, g in enumerate(grad):
        residual[i] += g
        if residual[i] >= t:
            packed[i // 4] |= 0b11 << (6 - 2 * (i % 4))
            residual[i] -= t
        elif residual[i] <= -t:
            packed[i // 4] |= 0b10 << (6 - 2 * (i % 4))
            residual[i] += t
    return bytes(packed), residual


def test_pushes_of_the_mxnet_example_give_its_values() -> None:
    codec = TwoBit(threshold=0.5)
    state, out = codec.new_state(6), torch.empty(6)
    received = []
    for value in (0.4, 0.4, -2.0, 0.3, 0.0):
        codec.decode(codec.encode(torch.full((6,), value), state), out)
        assert (out == out[0]).all()
        received.append(out[0].item())
    assert received == [0.0, 0.5, -0.5, -0.5, 0.0]


def test_first_element_is_in_the_two_most_significant_bits() -> None:
    codec = TwoBit(threshold=1.0)
    grad = torch.tensor([1.0, -1.0, 0.0, 2.0, -5.0])
    payload = codec.encode(grad, codec.new_state(5))
    assert payload.tobytes() == bytes([0b11_10_00_11, 0b10_00_00_00])


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(0, 1100),
    seed=st.integers(0, 2**31),
    threshold=st.sampled_from([0.5, 0.1, 1.0, 3e-3]),
)
def test_bytes_and_residual_are_those_of_the_loop_in_mxnet(numel: int, seed: int, threshold: float) -> None:
    random = np.random.default_rng(seed)
    grad = (random.integers(-4, 5, numel) * threshold / 2).astype(np.float32)
    codec = TwoBit(threshold)
    state = codec.new_state(numel)
    expected_residual = np.zeros(numel, np.float32)
    for _ in range(3):
        payload = codec.encode(torch.from_numpy(grad), state)
        expected, expected_residual = reference(grad, expected_residual, threshold)
        assert payload.tobytes() == expected
        assert state.residual is not None
        assert np.array_equal(state.residual.numpy(), expected_residual)


def test_payload_has_a_byte_for_four_elements() -> None:
    assert [TwoBit().encoded_nbytes(n) for n in (0, 1, 4, 5, 25_500_000)] == [0, 1, 1, 2, 6_375_000]


def test_unused_code_decodes_to_zero_as_in_mxnet() -> None:
    out = torch.full((4,), 7.0)
    TwoBit().decode(bytes([0b01_11_10_01]), out)
    assert out.tolist() == [0.0, 0.5, -0.5, 0.0]


@pytest.mark.parametrize(("numel", "last"), [(1, 0b00_01_00_00), (2, 0b11_11_00_10), (3, 0b01)])
def test_codes_after_the_last_element_are_refused(numel: int, last: int) -> None:
    out = torch.full((numel,), 7.0)
    with pytest.raises(ProtocolError, match="after the last element"):
        TwoBit().decode_add(bytes([last]), out)
    assert out.tolist() == [7.0] * numel
