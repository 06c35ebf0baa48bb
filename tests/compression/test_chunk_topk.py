from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression.chunk_topk import ChunkTopK
from paceline.errors import ProtocolError

#: Four elements of 16: bf16 magnitudes 2 and 5, a bitmap of 8 bits, then 4 bits per element.
SMALL = ChunkTopK(k=4, chunk=16, decay=1.0)


def small() -> torch.Tensor:
    grad = torch.full((16,), 0.125)
    grad[[1, 2, 9, 15]] = torch.tensor([1.5, -5.0, -2.5, 5.0])
    return grad


def bits(number: int, width: int) -> str:
    return format(number, f"0{width}b")[::-1]


def test_chunk_is_two_magnitudes_a_bitmap_of_upper_bits_and_a_field_for_each_element() -> None:
    state = SMALL.new_state(16)
    payload = SMALL.encode(small(), state)
    bitmap = ["0"] * 8
    for j, upper in enumerate([1 >> 2, 2 >> 2, 9 >> 2, 15 >> 2]):
        bitmap[upper + j] = "1"
    fields = [(1, 0, 0), (2, 1, 1), (1, 1, 0), (3, 0, 1)]  # lower bits of the index, sign, higher magnitude
    expected = bits(0x4000, 16) + bits(0x40A0, 16) + "".join(bitmap)
    expected += "".join(bits(high | sign << 1 | lower << 2, 4) for lower, sign, high in fields)
    assert "".join(map(str, np.unpackbits(payload, bitorder="little"))) == expected
    assert state.residual is not None
    assert state.residual[[0, 1, 2, 9, 15]].tolist() == [0.125, -0.5, 0.0, -0.5, 0.0]


def test_a_default_chunk_is_195_times_smaller() -> None:
    assert ChunkTopK().encoded_nbytes(4096) == 84
    assert ChunkTopK().encoded_nbytes(3 * 4096 + 1) == 3 * 84 + 6


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, 1e-40, -3e30, 65536.0]), min_size=1),
    k=st.integers(1, 16),
)
def test_selection_is_exact_and_among_equals_the_lower_index_wins(values: list[float], k: int) -> None:
    codec, numel = ChunkTopK(k=k, chunk=16), len(values)
    expected = []
    for start in range(0, numel, 16):
        part = np.abs(np.array(values[start : start + 16], np.float32))
        count = -(-k * len(part) // 16)
        expected += (start + np.sort(np.argsort(-part, kind="stable")[:count])).tolist()
    payload = codec.encode(torch.tensor(values), codec.new_state(numel))
    assert _indices(codec, payload, numel) == expected


def _indices(codec: ChunkTopK, payload: np.ndarray, numel: int) -> list[int]:
    """Return the elements that a payload names: both magnitudes are set to 1, then decoded."""
    payload, at = payload.copy(), 0
    for start in range(0, numel, codec.chunk):
        payload[at : at + 4].view(np.uint16)[:] = 0x3F80
        at += codec.encoded_nbytes(min(codec.chunk, numel - start))
    out = torch.zeros(numel)
    codec.decode(payload, out)
    return out.nonzero().flatten().tolist()


def test_residual_decays_before_a_gradient_is_added() -> None:
    codec = ChunkTopK(k=1, chunk=16, decay=0.5)
    state, grad = codec.new_state(16), torch.zeros(16)
    grad[3:5] = torch.tensor([1.0, 2.0])
    sent = torch.zeros(16)
    codec.encode(grad, state)
    codec.decode(codec.encode(torch.zeros(16), state), sent)
    assert sent[3:5].tolist() == [0.5, 0.0]


def test_sum_of_what_is_sent_follows_gradients_that_stay_the_same() -> None:
    codec = ChunkTopK(k=8, chunk=64, decay=1.0)
    grad = torch.randn(256, generator=torch.Generator().manual_seed(0))
    state, sent = codec.new_state(256), torch.zeros(256)
    for round_ in range(200):
        codec.decode_add(codec.encode(grad, state, round=round_), sent)
    assert float((sent / 200 - grad).norm() / grad.norm()) < 0.1


def test_every_flipped_bit_is_refused_or_names_as_many_elements() -> None:
    """A field that is out of order, out of range or not of the right number is refused; signs and levels are free."""
    payload, refused = SMALL.encode(small(), SMALL.new_state(16)), 0
    for bit in range(8 * len(payload)):
        wrong, out = payload.copy(), torch.full((16,), 7.0)
        wrong[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ProtocolError):
            SMALL.decode(wrong, out)
        if out.tolist() == [7.0] * 16:
            refused += 1
        else:
            assert out.isfinite().all()
            assert len(out.nonzero()) <= 4
    assert refused >= 8  # each bit of the bitmap is


@pytest.mark.parametrize(
    "levels",
    [(0x7F80, 0x7F80), (0x3F80, 0x7F80), (0x7FC0, 0x7FC0), (0xBF80, 0x3F80), (0x4000, 0x3F80)],
    ids=["inf", "high inf", "nan", "negative", "high below low"],
)
def test_impossible_magnitudes_are_refused(levels: tuple[int, int]) -> None:
    payload, out = SMALL.encode(small(), SMALL.new_state(16)), torch.full((16,), 5.0)
    payload[:4].view(np.uint16)[:] = levels
    for method in (SMALL.decode, SMALL.decode_add):
        with pytest.raises(ProtocolError, match="chunktopk payload refused"):
            method(payload, out)
    assert out.tolist() == [5.0] * 16


def test_extreme_values_survive() -> None:
    largest, smallest = torch.finfo(torch.float32).max, 1e-45
    grad = torch.tensor([largest, -largest, smallest, 0.0] * 4)
    state, out = SMALL.new_state(16), torch.zeros(16)
    for value in (grad, torch.full((16,), smallest), torch.zeros(16)):
        codec_state = SMALL.new_state(16)
        SMALL.decode(SMALL.encode(value, codec_state), out)
        assert out.isfinite().all()
        assert codec_state.residual is not None
        assert codec_state.residual.isfinite().all()
    SMALL.decode(SMALL.encode(grad, state), out)
    torch.testing.assert_close(out[:2], grad[:2], rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"k": 0}, "k of"), ({"k": 65, "chunk": 64}, "k of"), ({"chunk": 8}, "chunk of"), ({"decay": 1.5}, "decay of")],
)
def test_unusable_parameters_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChunkTopK(**options)  # type: ignore[arg-type]
