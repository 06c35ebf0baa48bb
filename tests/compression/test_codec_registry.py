from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.compression import Codec, CodecState, known_codecs, make
from paceline.compression.buffers import Bytes
from paceline.extensions import register


class Sign(Codec):
    """A user's codec: one byte per element."""

    name = "test-sign"
    uses_residual = False

    def __init__(self, step: float) -> None:
        if step <= 0:
            raise ValueError("step must be positive")
        self.step = step

    def encoded_nbytes(self, numel: int) -> int:
        return numel

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        payload.view(np.int8)[:] = grad.sign().to(torch.int8).numpy()
        return 0

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        out.zero_()
        self._decode_add(payload, out, 1.0)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        out.add_(torch.from_numpy(payload.view(np.int8).copy()), alpha=alpha * self.step)


def test_registered_codec_is_made_by_name_and_works() -> None:
    register("codec")(Sign)
    codec = make({"type": "test-sign", "step": 0.5})
    assert codec is not None
    assert codec.params() == {"type": "test-sign", "step": 0.5}
    out = torch.empty(3)
    codec.decode(codec.encode(torch.tensor([3.0, -2.0, 0.0]), codec.new_state(3)), out)
    assert out.tolist() == [0.5, -0.5, 0.0]


def test_missing_parameter_of_a_registered_codec_is_a_value_error() -> None:
    register("codec")(Sign)
    with pytest.raises(ValueError, match="step"):
        make("test-sign")


def test_name_of_another_codec_cannot_be_taken() -> None:
    class Impostor(Sign):
        name = "2bit"

    with pytest.raises(ValueError, match="registered already"):
        register("codec")(Impostor)
    assert type(make("2bit")).__name__ == "TwoBit"


@pytest.mark.parametrize("name", ["", "none", None])
def test_unusable_name_cannot_be_registered(name: object) -> None:
    class Nameless(Sign):
        pass

    Nameless.name = name  # type: ignore[assignment]
    with pytest.raises(ValueError, match="name"):
        register("codec")(Nameless)


@pytest.mark.parametrize("params", [None, "none", {"type": "none"}])
def test_no_compression_makes_no_codec(params: object) -> None:
    assert make(params) is None  # type: ignore[arg-type]


def test_type_alone_uses_defaults() -> None:
    codec = make("2bit")
    assert codec is not None
    assert codec.params() == {"type": "2bit", "threshold": 0.5}


def test_mxnet_settings_are_understood() -> None:
    codec = make({"type": "2bit", "threshold": 2})
    assert codec is not None
    assert codec.encoded_nbytes(5) == 2


@pytest.mark.parametrize(("name", "hint"), [("2bits", "'2bit'"), ("top-k", "'topk'"), ("FP16", "'fp16'")])
def test_unknown_type_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {hint}"):
        make(name)


def test_type_like_no_other_gets_all_names() -> None:
    with pytest.raises(ValueError, match=r"known are .*powersgd"):
        make({"type": 17})
    assert {"2bit", "1bit", "fp16", "bf16", "int8", "topk", "randomk", "powersgd", "none"} <= set(known_codecs())


def test_settings_without_type_are_refused() -> None:
    with pytest.raises(ValueError, match="no 'type'"):
        make({"threshold": 0.5})


@pytest.mark.parametrize("kind", ["2bit", "fp16", "none"])
def test_unknown_parameters_are_named(kind: str) -> None:
    with pytest.raises(ValueError, match="no parameter treshold, colour"):
        make({"type": kind, "treshold": 0.5, "colour": 1})


@pytest.mark.parametrize(
    "params",
    [
        {"type": "2bit", "threshold": 0},
        {"type": "2bit", "threshold": -1.0},
        {"type": "2bit", "threshold": float("nan")},
        {"type": "2bit", "threshold": 1e-60},
        {"type": "2bit", "threshold": "0.5"},
        {"type": "2bit", "threshold": True},
        {"type": "1bit", "threshold": float("inf")},
        {"type": "int8", "chunk": 0},
        {"type": "int8", "chunk": 100.0},
        {"type": "topk", "ratio": 0.0},
        {"type": "topk", "ratio": 1.5},
        {"type": "topk", "k": 0},
        {"type": "topk", "k": 3, "ratio": 0.1},
        {"type": "randomk", "ratio": -0.1},
        {"type": "powersgd", "rank": 0},
        {"type": "powersgd", "rank": True},
    ],
    ids=str,
)
def test_unusable_value_is_refused_by_name(params: dict[str, object]) -> None:
    parameter = list(params)[1]
    with pytest.raises(ValueError, match=parameter):
        make(params)
