from __future__ import annotations

import pytest
import torch

from paceline.compression import make

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def through(kind: str, grad: torch.Tensor) -> torch.Tensor:
    codec = make(kind)
    assert codec is not None
    out = torch.empty(grad.numel())
    codec.decode(codec.encode(grad, codec.new_state(grad.numel())), out)
    return out


@pytest.mark.parametrize("kind", DTYPES)
def test_values_are_rounded_to_nearest_even(kind: str) -> None:
    step = torch.finfo(DTYPES[kind]).eps
    grad = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -1 - step / 2])
    assert through(kind, grad).tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]


@pytest.mark.parametrize("kind", DTYPES)
def test_overflow_saturates_while_infinity_and_nan_stay(kind: str) -> None:
    largest, inf = torch.finfo(DTYPES[kind]).max, float("inf")
    huge = torch.finfo(torch.float32).max
    grad = torch.zeros(200_000)
    grad[100_000:100_005] = torch.tensor([huge, -huge, inf, -inf, float("nan")])
    out = through(kind, grad)
    assert out[100_000:100_004].tolist() == [largest, -largest, inf, -inf]
    assert out[100_004].isnan()
    assert not out[:100_000].any()
    assert not out[100_005:].any()


@pytest.mark.parametrize("kind", DTYPES)
def test_gradient_of_the_same_dtype_travels_unchanged(kind: str) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(DTYPES[kind])
    assert torch.equal(through(kind, grad), grad.float())


def test_bfloat16_gradient_saturates_as_fp16() -> None:
    assert through("fp16", torch.tensor([1e6, -1e6], dtype=torch.bfloat16)).tolist() == [65504.0, -65504.0]


def test_small_values_become_subnormal_or_zero_in_fp16() -> None:
    assert through("fp16", torch.tensor([2.0**-24, 2.0**-26])).tolist() == [2.0**-24, 0.0]
