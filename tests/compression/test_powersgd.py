from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.compression import make
from paceline.compression.powersgd import PowerSGD
from paceline.errors import ProtocolError


def low_rank(rank: int, side: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(side, rank, generator=generator), torch.randn(rank, side, generator=generator)
    return (left @ right).flatten()


def error_of_round(codec: PowerSGD, grad: torch.Tensor, rounds: int) -> float:
    """Relative error of the last of ``rounds`` encodings of one gradient, without error feedback."""
    state, out = codec.new_state(grad.numel()), torch.empty(grad.numel())
    assert state.residual is not None
    for round_ in range(rounds):
        state.residual.zero_()
        codec.decode(codec.encode(grad, state, round=round_), out)
    return float((out - grad).norm() / grad.norm())


def test_gradient_of_the_codecs_rank_is_sent_exactly() -> None:
    assert error_of_round(PowerSGD(rank=3), low_rank(3), rounds=1) < 1e-5


def test_warm_start_finds_the_best_approximation_in_a_few_rounds() -> None:
    grad = low_rank(2) + 0.05 * torch.randn(3600, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(grad.view(60, 60))
    best = float(singular[2:].norm() / singular.norm())
    assert error_of_round(PowerSGD(rank=2), grad, rounds=8) < best * 1.001


def test_last_elements_that_fill_no_row_are_sent_exactly() -> None:
    codec = PowerSGD(rank=1)
    grad = torch.randn(10_050, generator=torch.Generator().manual_seed(0))
    out = torch.empty(10_050)
    codec.decode(codec.encode(grad, codec.new_state(10_050)), out)
    assert torch.equal(out[-50:], grad[-50:])
    assert codec.encoded_nbytes(10_050) == 4 * (100 + 100 + 50)


def test_bucket_that_factors_would_not_make_smaller_travels_as_it_is() -> None:
    codec, grad = PowerSGD(rank=8), torch.randn(40, generator=torch.Generator().manual_seed(0))
    assert codec.encode(grad, codec.new_state(40)).tobytes() == grad.numpy().tobytes()


def test_gradient_that_was_zero_for_a_round_is_found_again() -> None:
    codec = PowerSGD(rank=1)
    state, out = codec.new_state(3600), torch.empty(3600)
    codec.encode(torch.zeros(3600), state)
    grad = torch.zeros(60, 60)
    grad[30, 40] = 5.0
    for round_ in range(1, 4):
        assert state.residual is not None
        state.residual.zero_()
        codec.decode(codec.encode(grad.flatten(), state, round=round_), out)
    torch.testing.assert_close(out.view(60, 60), grad)


def test_factor_that_is_not_finite_is_refused() -> None:
    codec, out = PowerSGD(rank=1), torch.full((100,), 5.0)
    payload = np.zeros(20, np.float32)
    payload[3] = np.nan
    for method in (codec.decode, codec.decode_add):
        with pytest.raises(ProtocolError, match="not finite"):
            method(payload.tobytes(), out)
    assert (out == 5).all()


@pytest.mark.parametrize("other", [{"type": "topk"}, {"type": "powersgd", "rank": 3}])
def test_state_of_another_codec_is_refused(other: dict[str, object]) -> None:
    stranger = make(other)
    assert stranger is not None
    state = stranger.new_state(3600)
    with pytest.raises(ValueError, match="new_state"):
        PowerSGD(rank=2).encode(torch.ones(3600), state)
    assert state.residual is not None
    assert not state.residual.any()
