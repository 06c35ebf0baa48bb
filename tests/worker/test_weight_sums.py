"""Sums of weights: alike for like weights, apart for others, and indifferent to rounding."""

from __future__ import annotations

import pytest
import torch

from paceline.worker.weight_sums import is_due, sums_of

STEPS = [1, 2, 64, 4096]


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], step: int) -> list[str]:
    """Return the names of the parameters whose sums differ by more than they may."""
    pairs = zip(sums_of(one, step), sums_of(other, step), strict=True)
    return [name for (name, total, slack), (_, theirs, _) in pairs if abs(total - theirs) > slack]


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 64), "weight": (10, 4096), "bias": (10,), "scale": ()}
    return {name: torch.randn(shape, generator=drawn).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_rounding_makes_no_difference(dtype: torch.dtype, step: int) -> None:
    one = weights(dtype=dtype)
    # Values of 16 bits absorb most of the differences.
    units = 4 * torch.finfo(dtype).eps * (step**0.5 if dtype.itemsize > 2 else 1)
    rounded = {}
    for name, value in one.items():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rounded[name] = (value.double() * (1 + units * noise)).to(dtype)
    assert differ(one, rounded, step) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_make_one_in_nearly_every_step(dtype: torch.dtype) -> None:
    found = [differ(weights(0, dtype), weights(1, dtype), step) for step in range(1, 21)]
    assert all(found)
    for name in ("embed", "weight"):
        assert sum(name in one for one in found) >= 15


@pytest.mark.parametrize("name", ["embed", "weight", "bias", "scale"])
def test_the_parameter_that_differs_is_named(name: str) -> None:
    other = weights()
    other[name] += torch.where(other[name] > 0, 0.05, -0.05)
    found = [differ(weights(), other, step) for step in (1, 2, 4)]
    assert all(one in ([], [name]) for one in found)
    assert [name] in found


def test_differences_that_add_up_to_0_over_rows_or_columns_are_seen() -> None:
    """As gradients of a softmax do over its classes, and as in layers that are followed by a normalisation."""
    one, other, turned = weights(), weights(), weights()
    drawn = 0.1 * torch.randn(10, 4096, generator=torch.Generator().manual_seed(2))
    other["weight"] += drawn - drawn.mean(0)
    turned["weight"] += drawn - drawn.mean(1, keepdim=True)
    assert differ(one, other, 1) == differ(one, turned, 1) == ["weight"]


def test_small_values_may_differ_by_the_rounding_of_larger_ones() -> None:
    one = {"weight": torch.ones(100, 100), "bias": torch.full((100,), 1e-8)}
    other = one | {"bias": -one["bias"]}
    assert differ(one, other, 1) == []


def test_large_parameters_are_added_up_in_part_and_in_the_end_everywhere() -> None:
    large = torch.zeros(3000, 4096)
    other = large.clone()
    other[1000:1100] = 1.0
    found = [differ({"embed": large + 0.1}, {"embed": other + 0.1}, step) for step in range(1, 9)]
    assert all(found)
    other[1000:1100] = 0.0
    other[7] = 1000.0
    assert sum(bool(differ({"embed": large}, {"embed": other}, step)) for step in range(1, 17)) in range(1, 12)


def test_layout_in_memory_does_not_count_and_neither_do_parameters_without_elements() -> None:
    one = {"a": torch.randn(4, 5, 6, 7), "b": torch.empty(0), "c": torch.randn(3, dtype=torch.complex64)}
    other = one | {"a": one["a"].contiguous(memory_format=torch.channels_last)}
    assert sums_of(one, 3)[0][1] == pytest.approx(sums_of(other, 3)[0][1])
    assert sums_of({"i": torch.ones(3, dtype=torch.int64)}, 1)[0][0] == "i"


def test_sums_of_very_many_parameters_are_few_and_still_differ() -> None:
    one = {f"p{number}": torch.randn(3) for number in range(2000)}
    other = one | {"p1234": one["p1234"] + 9}
    [name] = differ(one, other, 1)
    assert name == "p1232 to p1235"
    assert len(sums_of(one, 1)) == 500


def test_weights_are_compared_often_at_first_and_then_now_and_then() -> None:
    assert [step for step in range(1, 1600) if is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536]
