"""What must hold for every codec, for tests of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ProtocolError

if TYPE_CHECKING:  # processes of tests that need no torch start without it
    import torch

    from paceline.compression import Codec

_SIZES = (0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 65_537)


def check_codec(codec: Codec) -> None:
    """Check sizes, determinism, the residual, scaled sums, and that payloads of another length are refused.

    Raises:
        AssertionError: the contract of :class:`paceline.compression.Codec` is broken; the text says where.
    """
    import torch

    for numel in _SIZES:
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float32, device="cpu")
        _check_one(codec, grad)
        if numel:
            _check_refusal(codec, grad)


def _check_one(codec: Codec, grad: torch.Tensor) -> None:
    import torch

    numel, before, state = grad.numel(), grad.clone(), codec.new_state(grad.numel())
    payload = codec.encode(grad, state, round=3, seed=9)
    what = f"codec {codec.name!r}, {numel} elements"
    assert payload.dtype.name == "uint8", f"{what}: a payload is bytes, not {payload.dtype}"
    assert len(payload) == codec.encoded_nbytes(numel), f"{what}: encoded_nbytes is not the length of the payload"
    assert torch.equal(grad, before), f"{what}: encode changes the gradient"
    again = codec.encode(grad, codec.new_state(numel), round=3, seed=9)
    assert payload.tobytes() == again.tobytes(), f"{what}: the same gradient, round and seed give another payload"
    sent = torch.full((numel,), 7.0, dtype=torch.float32, device="cpu")
    codec.decode(payload, sent)
    if state.residual is not None:
        total = sent + state.residual
        assert torch.allclose(total, grad, rtol=1e-5, atol=1e-5), f"{what}: sent and residual are not the gradient"
    added = torch.ones(numel, dtype=torch.float32, device="cpu")
    codec.decode_add(payload, added, -2.0)
    assert torch.allclose(added, 1 - 2 * sent, rtol=1e-5, atol=1e-5), f"{what}: decode_add is not decode, scaled"


def _check_refusal(codec: Codec, grad: torch.Tensor) -> None:
    payload = codec.encode(grad, codec.new_state(grad.numel()))
    try:
        codec.check(payload[:-1], grad.numel())
    except ProtocolError:
        return
    raise AssertionError(f"codec {codec.name!r} accepts a payload that is one byte short")
