from __future__ import annotations

import pytest
import torch

from paceline.compression import Codec, CodecState, make


def gaussian(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_sender_continues_from_saved_state_as_if_never_stopped(codec: Codec) -> None:
    running = codec.new_state(2001)
    for round_ in range(3):
        codec.encode(gaussian(2001, round_), running, round=round_)
    saved = {name: tensor.clone() for name, tensor in running.state_tensors().items()}
    resumed = codec.new_state(2001)
    resumed.load(saved)
    payloads = [codec.encode(gaussian(2001, 3), state, round=3) for state in (running, resumed)]
    assert payloads[0].tobytes() == payloads[1].tobytes()


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"residual": torch.ones(3)},
        {"residual": torch.ones(4, dtype=torch.float64), "q": torch.ones(2)},
        {"residual": torch.ones(4), "q": torch.ones(3)},
        {"residual": torch.ones(4), "q": torch.ones(2), "p": torch.ones(1)},
    ],
)
def test_saved_state_that_does_not_fit_is_refused_and_changes_nothing(tensors: dict[str, torch.Tensor]) -> None:
    state = CodecState(4, torch.zeros(4), q=torch.zeros(2))
    with pytest.raises(ValueError, match="state"):
        state.load(tensors)
    assert not any(tensor.any() for tensor in state.state_tensors().values())


def test_codec_without_error_feedback_has_nothing_to_save() -> None:
    codec = make("bf16")
    assert codec is not None
    assert codec.new_state(10).state_tensors() == {}
