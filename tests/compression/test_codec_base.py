"""What holds for every codec."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.compression import Codec, make
from paceline.compression.buffers import Payload
from paceline.errors import ProtocolError
from paceline.testing import check_codec

SIZES = [*range(40), 63, 64, 65, 511, 512, 513, 1025, 65_537, 131_101]

gradients = hnp.arrays(
    np.float32,
    st.integers(1, 200),
    elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
    fill=st.just(np.float32(0)),
)


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def decoded(codec: Codec, payload: Payload, numel: int) -> torch.Tensor:
    out = torch.full((numel,), 7.0)
    codec.decode(payload, out)
    return out


def test_codec_keeps_the_contract_that_users_check(codec: Codec) -> None:
    check_codec(codec)


def test_payload_of_every_size_decodes_and_accounts_for_the_gradient(codec: Codec) -> None:
    for numel in SIZES:
        grad, state = gaussian(numel, seed=numel), codec.new_state(numel)
        payload = codec.encode(grad, state, round=3, seed=9)
        assert payload.dtype == np.uint8
        assert payload.shape == (codec.encoded_nbytes(numel),)
        sent = decoded(codec, payload, numel)
        if state.residual is not None:
            torch.testing.assert_close(sent + state.residual, grad, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(sent, grad, rtol=1e-2, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(first=gradients, seed=st.integers(0, 2**63 - 1))
def test_what_is_sent_and_the_residual_are_the_sum_of_all_gradients(
    residual_codec: Codec, first: np.ndarray, seed: int
) -> None:
    state = residual_codec.new_state(len(first))
    total, sent = torch.zeros(len(first)), torch.zeros(len(first))
    for round_ in range(3):
        grad = torch.from_numpy(np.roll(first, round_))
        payload = residual_codec.encode(grad, state, round=round_, seed=seed)
        residual_codec.decode_add(payload, sent)
        total += grad
    assert state.residual is not None
    scale = float(np.abs(first).max()) + 1
    torch.testing.assert_close(sent + state.residual, total, rtol=0, atol=2e-5 * scale)


@settings(max_examples=20, deadline=None)
@given(grad=gradients, alpha=st.floats(-100, 100, width=32))
def test_decode_add_adds_alpha_times_what_decode_writes(codec: Codec, grad: np.ndarray, alpha: float) -> None:
    payload = codec.encode(torch.from_numpy(grad), codec.new_state(len(grad)))
    before = gaussian(len(grad))
    out = before.clone()
    codec.decode_add(payload, out, alpha)
    expected = before + alpha * decoded(codec, payload, len(grad))
    scale = 1 + abs(alpha) * float(np.abs(grad).max())
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 * scale)


def test_encode_leaves_the_gradient_as_it_is_and_repeats_itself(codec: Codec) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        grad = gaussian(1001).to(dtype)
        before = grad.clone()
        payloads = [codec.encode(grad, codec.new_state(1001), round=1, seed=2) for _ in range(2)]
        assert torch.equal(grad, before)
        assert payloads[0].tobytes() == payloads[1].tobytes()


def test_one_codec_serves_many_threads(codec: Codec) -> None:
    grads = [gaussian(50_000, seed) for seed in range(8)]

    def payloads(grad: torch.Tensor) -> list[bytes]:
        state = codec.new_state(50_000)
        return [codec.encode(grad, state, round=round_).tobytes() for round_ in range(3)]

    # The sum of a matrix product depends on how many threads make it, and threads of a pool may get fewer.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(4, initializer=lambda: torch.set_num_threads(1)) as pool:
            assert list(pool.map(payloads, grads)) == [payloads(grad) for grad in grads]
    finally:
        torch.set_num_threads(threads)


def test_half_precision_gradient_encodes_like_its_float32_copy(codec: Codec) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        grad = gaussian(140_003).to(dtype)
        payload = codec.encode(grad, codec.new_state(len(grad)))
        assert np.array_equal(payload, codec.encode(grad.float(), codec.new_state(len(grad))))


def test_payload_may_come_as_bytes_memoryview_or_unaligned_array(codec: Codec) -> None:
    payload = codec.encode(gaussian(1001), codec.new_state(1001))
    shifted = np.empty(len(payload) + 1, np.uint8)[1:]
    shifted[:] = payload
    unaligned = memoryview(b"x" + payload.tobytes())[1:]
    expected = decoded(codec, payload, 1001)
    forms: list[Payload] = [payload.tobytes(), payload.data, bytearray(payload.tobytes()), shifted, unaligned]
    for form in forms:
        assert torch.equal(decoded(codec, form, 1001), expected)
        added = torch.zeros(1001)
        codec.decode_add(form, added, 2.0)
        torch.testing.assert_close(added, 2 * expected)


def test_payload_of_wrong_size_is_refused_and_changes_nothing(codec: Codec) -> None:
    out = gaussian(1001)
    before = out.clone()
    for change in (-1, 1, 4, 100):
        payload = bytes(codec.encoded_nbytes(1001) + change)
        for method in (codec.decode, codec.decode_add):
            with pytest.raises(ProtocolError, match=rf"{codec.name} payload refused: it has {len(payload)} bytes"):
                method(payload, out)
            assert torch.equal(out, before)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_bytes_decode_or_are_refused_but_never_change_anything_else(codec: Codec, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 100))
    size = codec.encoded_nbytes(numel)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    arena = torch.full((numel + 32,), 3.0)
    inside = arena[16 : 16 + numel]
    try:
        codec.decode(payload, inside)
    except ProtocolError:
        assert torch.equal(inside, torch.full((numel,), 3.0))
    assert torch.equal(arena[:16], torch.full((16,), 3.0))
    assert torch.equal(arena[16 + numel :], torch.full((16,), 3.0))


def test_non_finite_elements_do_not_spoil_the_residual_and_are_counted(
    residual_codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    clean = gaussian(5001)
    grad, state = clean.clone(), residual_codec.new_state(5001)
    bad = [0, 700, 5000]
    grad[bad] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    clean[bad] = 0
    with caplog.at_level(logging.WARNING):
        payload = residual_codec.encode(grad, state)
    assert state.dropped == 3
    assert "left 3 non-finite elements out" in caplog.text
    same = residual_codec.new_state(5001)
    assert np.array_equal(payload, residual_codec.encode(clean, same))
    assert state.residual is not None
    assert same.residual is not None
    assert torch.equal(state.residual, same.residual)


def test_sums_that_overflow_do_not_spoil_the_residual(residual_codec: Codec) -> None:
    state = residual_codec.new_state(300)
    for _ in range(8):
        payload = residual_codec.encode(torch.full((300,), torch.finfo(torch.float32).max / 4), state)
        assert decoded(residual_codec, payload, 300).isfinite().all()
    residual_codec.encode(torch.zeros(300), state)
    assert state.residual is not None
    assert state.residual.isfinite().all()


@pytest.mark.parametrize(
    "params",
    [
        {"type": "2bit", "threshold": 1.0},
        {"type": "1bit"},
        {"type": "fp16"},
        {"type": "bf16"},
        {"type": "int8"},
        {"type": "topk", "ratio": 0.05},
        {"type": "randomk", "ratio": 0.1},
        {"type": "powersgd", "rank": 1},
    ],
    ids=lambda params: params["type"],
)
def test_gradient_descent_converges_on_a_quadratic(params: dict[str, object]) -> None:
    codec = make(params)
    assert codec is not None
    target, curvature = gaussian(200), torch.linspace(0.2, 1.0, 200)
    x, state = torch.zeros(200), codec.new_state(200)
    update, rounds = torch.empty(200), 500
    for round_ in range(rounds):
        codec.decode(codec.encode(curvature * (x - target), state, round=round_, seed=1), update)
        x -= 0.1 * (1 - round_ / rounds) * update
    assert (x - target).norm() < 0.02 * target.norm()


def test_codec_is_rebuilt_from_its_params(codec: Codec) -> None:
    assert make(codec.params()) == codec


UNFIT = [
    (torch.zeros(4, dtype=torch.float64), TypeError),
    (torch.zeros(4, dtype=torch.int32), TypeError),
    (torch.zeros(2, 2), ValueError),
    (torch.zeros(8)[::2], ValueError),
    (torch.zeros(4, device="meta"), ValueError),
    (torch.zeros(5), ValueError),
]


def test_unfit_gradient_is_refused_and_changes_no_state(codec: Codec) -> None:
    state = codec.new_state(4)
    before = {name: tensor.clone() for name, tensor in state.state_tensors().items()}
    for grad, error in UNFIT:
        with pytest.raises(error):
            codec.encode(grad, state)
        for name, tensor in state.state_tensors().items():
            assert torch.equal(tensor, before[name])


def test_arguments_out_of_range_are_refused(codec: Codec) -> None:
    for round_, seed in ((-1, 0), (0, -1), (2**63, 0), (0, 2**63)):
        with pytest.raises(ValueError, match="must be in 0 to"):
            codec.encode(torch.zeros(4), codec.new_state(4), round=round_, seed=seed)
    payload, out = codec.encode(torch.ones(4), codec.new_state(4)), torch.zeros(4)
    for alpha in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite"):
            codec.decode_add(payload, out, alpha)
        assert torch.equal(out, torch.zeros(4))
    with pytest.raises(TypeError, match=r"torch\.float32"):
        codec.decode(payload, torch.zeros(4, dtype=torch.float16))


def test_state_without_residual_is_refused(residual_codec: Codec) -> None:
    stateless = make("fp16")
    assert stateless is not None
    with pytest.raises(ValueError, match="new_state"):
        residual_codec.encode(torch.zeros(4), stateless.new_state(4))
