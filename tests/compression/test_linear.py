from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.compression.linear import Int4, Int8, LinearCodec
from paceline.errors import ProtocolError

BOTH = pytest.mark.parametrize("kind", [Int8, Int4])


def test_scales_come_first_and_the_largest_element_is_level_127() -> None:
    codec = Int8(chunk=8)
    grad = torch.tensor([127.0, 1.0, -2.0, 0.4, 0.5, 1.5, 0.0, -127.0, -254.0, 2.0])
    payload = codec.encode(grad, codec.new_state(10))
    assert payload[:8].view(np.float32).tolist() == [1.0, 2.0]
    assert payload[8:].view(np.int8).tolist() == [127, 1, -2, 0, 0, 2, 0, -127, -127, 1]


def test_half_bytes_have_the_first_half_of_a_chunk_above_the_second() -> None:
    codec = Int4(chunk=8)
    grad = torch.tensor([7.0, 1.0, -2.0, 0.4, 0.5, 1.5, 0.0, -7.0, -14.0, 2.0, 4.0])
    payload = codec.encode(grad, codec.new_state(11))
    assert payload[:8].view(np.float32).tolist() == [1.0, 2.0]
    assert payload[8:].tobytes().hex() == "f89a6881" + "1a90"


@BOTH
def test_error_is_at_most_half_a_level_of_its_chunk(kind: type[LinearCodec]) -> None:
    codec = kind(chunk=64)
    grad = torch.randn(6400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 100).repeat_interleave(
        64
    )
    state = codec.new_state(6400)
    codec.encode(grad, state)
    assert state.residual is not None
    half_levels = grad.view(100, 64).abs().amax(dim=1, keepdim=True) / (2 * kind.levels)
    assert (state.residual.view(100, 64).abs() <= half_levels * 1.0001).all()


@BOTH
def test_chunk_of_zeros_and_chunk_too_small_to_scale_wait_in_the_residual(kind: type[LinearCodec]) -> None:
    codec = kind(chunk=8)
    grad = torch.zeros(16)
    grad[8:] = 1e-44
    state, out = codec.new_state(16), torch.ones(16)
    codec.decode(codec.encode(grad, state), out)
    assert not out.any()
    assert state.residual is not None
    assert torch.equal(state.residual, grad)


@BOTH
def test_largest_float_survives(kind: type[LinearCodec]) -> None:
    codec = kind(chunk=8)
    largest = torch.finfo(torch.float32).max
    state, out = codec.new_state(8), torch.zeros(8)
    codec.decode(codec.encode(torch.full((8,), largest), state), out)
    assert state.residual is not None
    assert state.residual.isfinite().all()
    torch.testing.assert_close(out, torch.full((8,), largest))


@BOTH
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 1e38])
def test_impossible_scale_is_refused(kind: type[LinearCodec], scale: float) -> None:
    codec, out = kind(chunk=8), torch.full((9,), 5.0)
    payload = codec.encode(torch.ones(9), codec.new_state(9))
    payload[4:8].view(np.float32)[0] = scale
    with pytest.raises(ProtocolError, match="scale"):
        codec.decode_add(payload, out)
    assert out.tolist() == [5.0] * 9


def test_level_that_is_never_sent_is_refused() -> None:
    out = torch.full((2,), 5.0)
    with pytest.raises(ProtocolError, match="-128"):
        Int8().decode(np.float32(1).tobytes() + bytes([1, 0x80]), out)
    assert out.tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("levels", "words"), [(b"\x80\x80", "level -8"), (b"\x08\x80", "level -8"), (b"\x88\x88", "after the last")]
)
def test_half_byte_that_is_never_sent_is_refused(levels: bytes, words: str) -> None:
    out = torch.full((3,), 5.0)
    with pytest.raises(ProtocolError, match=words):
        Int4().decode(np.float32(1).tobytes() + levels, out)
    assert out.tolist() == [5.0] * 3


def test_chunk_of_half_bytes_is_even() -> None:
    with pytest.raises(ValueError, match="even"):
        Int4(chunk=9)
