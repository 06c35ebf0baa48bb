from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression.sparse import RandomK
from paceline.errors import ProtocolError


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3000),
    ratio=st.floats(0.001, 1.0),
    round_=st.integers(0, 2**63 - 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_indices_are_distinct_ascending_and_in_range(numel: int, ratio: float, round_: int, seed: int) -> None:
    indices = RandomK(ratio).indices(numel, round=round_, seed=seed).astype(np.int64)
    assert len(indices) == RandomK(ratio).encoded_nbytes(numel) // 4 - 4
    assert (np.diff(indices) > 0).all()
    assert indices[0] >= 0
    assert indices[-1] < numel


def test_every_element_has_the_same_chance() -> None:
    codec, counts = RandomK(0.1), np.zeros(1000)
    for round_ in range(2000):
        counts[codec.indices(1000, round=round_, seed=7)] += 1
    assert counts.sum() == 200_000
    # Binomial(2000, 0.1) has a standard deviation of 13.4: 5 of them hold for all of 1000 elements.
    assert np.abs(counts - 200).max() < 5 * 13.4


def test_indices_depend_on_seed_and_round() -> None:
    codec = RandomK(0.1)
    draws = {tuple(codec.indices(1000, round=r, seed=s).tolist()) for r in range(5) for s in range(5)}
    assert len(draws) == 25


def test_indices_are_the_same_in_every_release() -> None:
    assert RandomK(0.1).indices(50, round=3, seed=11).tolist() == [2, 16, 24, 34, 46]


def test_values_of_workers_can_be_summed_before_decoding() -> None:
    codec = RandomK(0.2)
    grads = [torch.randn(501, generator=torch.Generator().manual_seed(worker)) for worker in range(3)]
    payloads = [codec.encode(grad, codec.new_state(501), round=4, seed=2) for grad in grads]
    summed = payloads[0].copy()
    values = summed[16:].view(np.float32)
    for payload in payloads[1:]:
        values += payload[16:].view(np.float32)
    out, expected = torch.zeros(501), torch.zeros(501)
    codec.decode(summed, out)
    for payload in payloads:
        codec.decode_add(payload, expected)
    torch.testing.assert_close(out, expected)


def test_value_that_is_not_finite_is_refused() -> None:
    codec, out = RandomK(0.5), torch.full((4,), 5.0)
    payload = bytes(16) + np.array([1.0, np.nan], np.float32).tobytes()
    with pytest.raises(ProtocolError, match="not finite"):
        codec.decode_add(payload, out)
    assert out.tolist() == [5.0] * 4
