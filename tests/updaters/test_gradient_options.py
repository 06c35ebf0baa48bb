"""Options that every updater has: rescale_grad and clip_gradient, and float32 masters of half values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.updaters import (
    FlatUpdater,
    KeyOptions,
    Options,
    Piece,
    StepOptions,
    UpdaterSpec,
    make_spec,
    make_updater,
)
from paceline.updaters.classes import ELEMENTWISE, WHOLE_TENSOR
from paceline.updaters.rows import LAZY

SHAPES: dict[str | int, tuple[int, ...]] = {"conv": (4, 3), "mat": (5, 2), 7: (2, 4)}
NUMEL = 30
RATES: dict[str, dict[str, Any]] = {name: {"lr": 0.05} for name in [*ELEMENTWISE, *WHOLE_TENSOR]}
NAMES: dict[str, dict[str, Any]] = RATES | {"add": {"rate": 0.5}, "test": {}, "assign": {}}
DECAYED = {"sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}, "nag": {"weight_decay": 0.5}}


def pieces() -> list[Piece]:
    found, position = [], 0
    for key, shape in SHAPES.items():
        found.append(Piece(key, position, torch.Size(shape).numel(), shape))
        position += found[-1].length
    return found


def start(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step + 1)).to(dtype)


def updater(name: str, value: torch.Tensor, **options: Any) -> FlatUpdater:
    return make_updater(make_spec(name, **options), value, pieces())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradient_is_rescaled_then_clipped_with_every_updater(name: str, scale: float) -> None:
    value, expected = start(), start()
    mine = updater(name, value, rescale_grad=0.5, clip_gradient=0.2, **NAMES[name])
    plain = updater(name, expected, **NAMES[name])
    for step in range(5):
        merged = gradient(step) / scale
        mine.update(merged, scale, None)
        plain.update((gradient(step) * 0.5).clamp(-0.2, 0.2), 1.0, None)
        if scale == 1.0:
            assert torch.equal(merged, gradient(step)), "memory of a worker was written"
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "add", "assign"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rescaling_alone_is_a_factor(name: str, scale: float) -> None:
    value, expected = start(), start()
    mine, plain = updater(name, value, rescale_grad=-2.0, **NAMES[name]), updater(name, expected, **NAMES[name])
    for step in range(3):
        merged = gradient(step) / scale
        mine.update(merged, scale, None)
        plain.update(-2.0 * gradient(step), 1.0, None)
        assert scale != 1.0 or torch.equal(merged, gradient(step)), "memory of a worker was written"
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_factor_of_zero_counts_as_no_gradient() -> None:
    value = start()
    updater("sgd", value, lr=0.1, rescale_grad=0.0).update(gradient(0), 0.5, None)
    assert torch.equal(value, start())


@pytest.mark.parametrize("name", DECAYED)
def test_weight_decay_comes_after_the_clip(name: str) -> None:
    value, expected = start() * 10, start() * 10
    mine = updater(name, value, clip_gradient=0.1, **DECAYED[name])
    plain = updater(name, expected, **DECAYED[name])
    for step in range(3):
        mine.update(gradient(step), 1.0, None)
        plain.update(gradient(step).clamp(-0.1, 0.1), 1.0, None)
    torch.testing.assert_close(value, expected)
    assert float((value - start() * 10).abs().max()) > 0.5


@pytest.mark.parametrize("name", ["sgd", "adam", "ftrl", "lamb", "add", "assign"])
def test_limit_is_an_option_of_a_step(name: str) -> None:
    value, expected = start(), start()
    mine, plain = updater(name, value, **NAMES[name]), updater(name, expected, **NAMES[name])
    tight, loose = StepOptions([{"clip_gradient": 0.1}]), StepOptions([{}])
    for step, options in enumerate([None, tight, None, loose, tight, StepOptions()]):
        clipped = step in (1, 2, 4)
        mine.update(gradient(step).clone(), 1.0, options)
        plain.update(gradient(step).clamp(-0.1, 0.1) if clipped else gradient(step), 1.0, None)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", ["sgd", "ftrl", "assign"])
def test_groups_have_limits_and_factors_of_their_own_also_after_a_cut(name: str) -> None:
    groups: list[Options] = [{"clip_gradient": 0.1}, {"rescale_grad": 3.0}]
    value, expected = start(), start()
    spec = UpdaterSpec(name, groups, {"mat": KeyOptions(1)})
    left, right = make_updater(spec, value, pieces()).split(15)
    plain = updater(name, expected)
    for step in range(3):
        merged = gradient(step) * 4
        left.update(merged[:15].clone(), 0.25, None)
        right.update(merged[15:].clone(), 0.25, None)
        wanted = gradient(step).clamp(-0.1, 0.1)
        wanted[12:22] = 3 * gradient(step)[12:22]
        plain.update(wanted, 1.0, None)
    torch.testing.assert_close(value, expected)


def test_halves_of_a_store_without_optimizer_keep_the_options_of_the_last_step() -> None:
    value = torch.zeros(NUMEL)
    whole = updater("assign", value)
    whole.update(gradient(0), 1.0, StepOptions([{"clip_gradient": 0.1}]))
    for part, grad in zip(whole.split(15), gradient(1).split(15), strict=True):
        part.update(grad, 1.0, None)
    assert torch.equal(value, gradient(1).clamp(-0.1, 0.1))


@pytest.mark.parametrize("name", [name for name, cls in ELEMENTWISE.items() if cls in LAZY])
def test_rows_are_rescaled_and_clipped(name: str) -> None:
    value, expected, piece = torch.ones(12), torch.ones(12), Piece("w", 0, 12, (4, 3))
    spec = make_spec(name, rescale_grad=0.5, clip_gradient=0.2, lr=0.1)
    rows, grad = torch.tensor([[0, 2]]), torch.tensor([[1.0, -1.0, 0.2], [0.1, 4.0, -4.0]])
    make_updater(spec, value, [piece]).update_rows(torch.sparse_coo_tensor(rows, grad, (4, 3)).coalesce(), 0.5, None)
    clipped = torch.sparse_coo_tensor(rows, (grad * 0.25).clamp(-0.2, 0.2), (4, 3)).coalesce()
    make_updater(make_spec(name, lr=0.1), expected, [piece]).update_rows(clipped, 1.0, None)
    torch.testing.assert_close(value, expected)
    assert torch.equal(value[3:6], torch.ones(3))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"clip_gradient": 0.0}, ValueError, "above 0; None turns it off"),
        ({"clip_gradient": -1.0}, ValueError, "above 0"),
        ({"clip_gradient": float("nan")}, ValueError, "above 0"),
        ({"clip_gradient": float("inf")}, ValueError, "finite"),
        ({"rescale_grad": float("nan")}, ValueError, "finite"),
        ({"rescale_grad": None}, TypeError, "not a number"),
        ({"rescale_grad": "half"}, TypeError, "not a number"),
        ({"lr": float("nan")}, ValueError, "lr is nan"),
        ({"lr": float("inf")}, ValueError, "lr is inf"),
        ({"lr": 0.1, "momentum": float("nan")}, ValueError, "momentum is nan"),
        ({"lr": 0.1, "weight_decay": float("inf")}, ValueError, "weight_decay is inf"),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        make_spec("sgd", **options)
    with pytest.raises(error, match=why):
        make_updater(UpdaterSpec("sgd", [options]), start(), pieces())


@pytest.mark.parametrize("name", ["t0", "step_sizes"])
def test_numbers_may_be_infinite_where_that_makes_sense(name: str) -> None:
    optimizer = {"t0": "asgd", "step_sizes": "rprop"}[name]
    value: Any = float("inf") if name == "t0" else (1e-6, float("inf"))
    make_updater(make_spec(optimizer, lr=0.1, **{name: value}), start(), pieces())
    with pytest.raises(ValueError, match=f"{name} is nan"):
        make_spec(optimizer, lr=0.1, **{name: float("nan") if name == "t0" else (float("nan"), 1.0)})


def test_numbers_of_an_optimizer_of_torch_are_checked() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0]["lr"] = torch.tensor(float("nan"))
    with pytest.raises(ValueError, match="lr is nan"):
        make_spec(optimizer)
    with pytest.raises(ValueError, match="lr_mult of key 'w' is nan"):
        make_spec("sgd", keys={"w": KeyOptions(lr_mult=float("nan"))})


def test_none_is_no_limit() -> None:
    value = start()
    updater("sgd", value, lr=1.0, clip_gradient=None).update(gradient(0), 1.0, None)
    torch.testing.assert_close(value, start() - gradient(0))


def test_instance_may_come_with_options_of_the_gradient_but_of_nothing_else() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    spec = make_spec(optimizer, clip_gradient=0.1, rescale_grad=2.0)
    assert spec.groups[0]["lr"] == 0.5
    assert spec.groups[0]["clip_gradient"] == 0.1
    with pytest.raises(TypeError, match="instance itself"):
        make_spec(optimizer, momentum=0.5)


def test_options_of_a_step_complete_those_of_the_spec_also_where_keys_part() -> None:
    value, expected = start(), start()
    mine = updater("sgd", value, lr=0.1, momentum=0.9)
    plain = updater("sgd", expected, lr=0.1, momentum=0.9)
    faster = StepOptions([{"lr": 0.2}], {"mat": KeyOptions(wd_mult=0.5)})
    for step in range(4):
        mine.update(gradient(step), 1.0, faster if step == 1 else None)
        plain.update(gradient(step), 1.0, StepOptions([{"lr": 0.2, "momentum": 0.9}]) if step == 1 else None)
    torch.testing.assert_close(value, expected)


# ---- float32 masters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_values_with_a_master_step_in_float32_with_every_updater(name: str, dtype: torch.dtype) -> None:
    value, expected = start(dtype), start(dtype).float()
    options = NAMES[name] if name == "assign" else NAMES[name] | {"clip_gradient": 1.0}
    mine, plain = updater(name, value, multi_precision=True, **options), updater(name, expected, **options)
    for step in range(20):
        # Merged gradients come in float32 where there is a master.
        mine.update(gradient(step) * 0.01, 0.5, None)
        plain.update(gradient(step) * 0.005, 1.0, None)
    assert torch.equal(value, expected.to(dtype))


def test_master_keeps_what_a_half_value_would_lose() -> None:
    lost, kept = torch.ones(NUMEL, dtype=torch.float16), torch.ones(NUMEL, dtype=torch.float16)
    for value, precision in ((lost, False), (kept, True)):
        one = updater("add", value, multi_precision=precision)
        for _ in range(16):
            one.update(torch.full((NUMEL,), 2.0**-12), 1.0, None)
    assert lost.unique().tolist() == [1.0]
    assert kept.unique().tolist() == [1.0 + 2.0**-8]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "assign"])
def test_master_is_saved_and_cut_with_every_updater(name: str) -> None:
    value = start(torch.bfloat16)
    mine = updater(name, value, multi_precision=True, **NAMES[name])
    for step in range(3):
        mine.update(gradient(step) * 0.01, 1.0, None)
    again = updater(name, value.clone(), multi_precision=True, **NAMES[name])
    for piece in pieces():
        again.load_state(piece, mine.state(piece))
    parts = [(0, again)] if name in WHOLE_TENSOR else list(zip((0, 15), again.split(15), strict=True))
    for step in range(3, 6):
        mine.update(gradient(step) * 0.01, 1.0, None)
        for begin, part in parts:
            part.update(gradient(step)[begin : begin + part.value.numel()] * 0.01, 1.0, None)
    assert torch.equal(mine.value, again.value)
