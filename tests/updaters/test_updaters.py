"""Optimizers on stored flat values against torch.optim on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.updaters import (
    FlatUpdater,
    KeyOptions,
    Piece,
    StepOptions,
    TorchUpdater,
    UpdaterSpec,
    is_whole_tensor,
    known_names,
    make_spec,
    make_updater,
    option_groups,
)
from paceline.updaters.classes import ELEMENTWISE, WHOLE_TENSOR, check_name, find_class, name_of_class

SHAPES: dict[str | int, tuple[int, ...]] = {"conv": (4, 3), "bias": (5,), 7: (2, 2, 3)}
NUMEL = 29
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {"lr": 0.05}) for name in ELEMENTWISE],
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("rmsprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("adamw", {"lr": 0.01, "maximize": True}),
]


def pieces() -> list[Piece]:
    found, position = [], 0
    for key, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        found.append(Piece(key, position, numel, shape))
        position += numel
    return found


def start(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step + 1)).to(dtype)


def by_torch(cls: Any, steps: int = 5, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """What torch's own optimizer makes of the same gradients, every key in its shape."""
    value = start(dtype)
    params = [torch.nn.Parameter(value[p.start : p.start + p.length].view(p.shape).clone()) for p in pieces()]
    optimizer = cls([{"params": [p], "key": piece.key} for p, piece in zip(params, pieces(), strict=True)], **options)
    for step in range(steps):
        grad = gradient(step, dtype)
        for param, piece in zip(params, pieces(), strict=True):
            param.grad = grad[piece.start : piece.start + piece.length].view(piece.shape).clone()
        optimizer.step()
    return torch.cat([param.detach().view(-1) for param in params])


def split_at(updater: FlatUpdater, cuts: list[int]) -> list[tuple[int, FlatUpdater]]:
    """Cut an updater at positions of the value; returns (first element, updater)."""
    parts, begin = [(0, updater)], 0
    for cut in sorted(set(cuts)):
        begin, last = parts.pop()
        left, right = last.split(cut - begin)
        parts += [(begin, left), (cut, right)]
    return parts


def run(
    parts: list[tuple[int, FlatUpdater]], steps: range, scale: float = 1.0, options: StepOptions | None = None
) -> None:
    for step in steps:
        for begin, part in parts:
            merged = gradient(step, part.value.dtype)[begin : begin + part.value.numel()].clone()
            part.update(merged / scale, scale, options)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(1, NUMEL - 1), max_size=3), when=st.integers(0, 5), scale=st.sampled_from([1.0, 0.25]))
def test_flat_value_cut_anywhere_at_any_time_steps_as_torch_does(
    name: str, options: dict[str, Any], cuts: list[int], when: int, scale: float
) -> None:
    value = start()
    updater = make_updater(make_spec(name, **options), value, pieces())
    run([(0, updater)], range(when), scale)
    run(split_at(updater, cuts), range(when, 5), scale)
    torch.testing.assert_close(value, by_torch(ELEMENTWISE[name], **options), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(WHOLE_TENSOR))
def test_whole_tensor_optimizer_sees_every_key_in_its_shape(name: str) -> None:
    shapes = {key: shape for key, shape in SHAPES.items() if name != "muon" or len(shape) == 2}
    listed = [piece for piece in pieces() if piece.key in shapes]
    value = start()[: sum(piece.length for piece in listed)]
    params = [torch.nn.Parameter(value[p.start : p.start + p.length].view(p.shape).clone()) for p in listed]
    optimizer = WHOLE_TENSOR[name](params, lr=0.1)  # type: ignore[call-arg]
    updater = make_updater(make_spec(name, lr=0.1), value, listed)
    for step in range(5):
        for param, piece in zip(params, listed, strict=True):
            param.grad = gradient(step)[piece.start : piece.start + piece.length].view(piece.shape).clone()
        optimizer.step()
        updater.update(gradient(step)[: value.numel()], 1.0, None)
    torch.testing.assert_close(value, torch.cat([param.detach().view(-1) for param in params]))


def test_lars_scales_the_step_by_the_ratio_of_norms() -> None:
    value = torch.tensor([3.0, 4.0])
    spec = make_spec("lars", lr=1.0, momentum=0.0, trust_coefficient=0.1)
    make_updater(spec, value, [Piece("w", 0, 2, (2,))]).update(torch.tensor([0.0, 2.0]), 1.0, None)
    torch.testing.assert_close(value, torch.tensor([3.0, 4.0 - 0.1 * 5.0]))


def test_first_step_of_lamb_has_the_length_of_the_weights() -> None:
    value = torch.tensor([3.0, 4.0])
    make_updater(make_spec("lamb", lr=0.1), value, [Piece("w", 0, 2, (2,))]).update(
        torch.tensor([5.0, -2.0]), 1.0, None
    )
    torch.testing.assert_close((value - torch.tensor([3.0, 4.0])).norm(), torch.tensor(0.1 * 5.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_layer_wise_optimizer_moves_weights_that_are_zero(name: str) -> None:
    value = torch.zeros(2)
    make_updater(make_spec(name, lr=0.1), value, [Piece("w", 0, 2, (2,))]).update(torch.ones(2), 1.0, None)
    assert (value < 0).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("lamb", {"lr": -1.0}), ("lamb", {"betas": (1.0, 0.9)}), ("lars", {"lr": -1.0}), ("lars", {"momentum": 1.0})],
)
def test_layer_wise_optimizer_refuses_impossible_numbers(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs lr >= 0"):
        make_updater(make_spec(name, **options), start(), pieces())


# ---- options ---------------------------------------------------------------------------------------------------------


def test_param_groups_and_multipliers_reach_their_keys() -> None:
    keys: dict[str | int, KeyOptions] = {"bias": KeyOptions(1), 7: KeyOptions(0, lr_mult=0.5, wd_mult=0.0)}
    spec = UpdaterSpec("sgd", [{"lr": 0.1, "weight_decay": 0.2}, {"lr": 0.01}], keys)
    value, before = start(), start()
    make_updater(spec, value, pieces()).update(gradient(0), 1.0, None)
    conv, bias, seven = (slice(p.start, p.start + p.length) for p in pieces())
    grad = gradient(0)
    torch.testing.assert_close(value[conv], before[conv] - 0.1 * (grad[conv] + 0.2 * before[conv]))
    torch.testing.assert_close(value[bias], before[bias] - 0.01 * grad[bias])
    torch.testing.assert_close(value[seven], before[seven] - 0.05 * grad[seven])


def test_multiplier_of_an_option_that_is_not_given_multiplies_the_default() -> None:
    spec = UpdaterSpec("adamw", [{}], {"conv": KeyOptions(lr_mult=2.0, wd_mult=0.0)})
    value = start()[:12]
    make_updater(spec, value, [Piece("conv", 0, 12, (4, 3))]).update(gradient(0)[:12], 1.0, None)
    param = torch.nn.Parameter(start()[:12])
    param.grad = gradient(0)[:12]
    torch.optim.AdamW([param], lr=2e-3, weight_decay=0.0).step()
    torch.testing.assert_close(value, param.detach())


MULTIPLIED = {name: {"lr": 0.05} for name in [*ELEMENTWISE, "lamb", "lars"]} | {"adamw": {"weight_decay": 0.1}}


@pytest.mark.parametrize("name", MULTIPLIED)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_multipliers_change_at_any_step_and_the_state_goes_on_also_after_a_cut(name: str, data: st.DataObject) -> None:
    options: dict[str, Any] = MULTIPLIED[name]
    classes: dict[str, Any] = ELEMENTWISE | WHOLE_TENSOR
    factors = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    value = start()
    updater = make_updater(make_spec(name, **options), value, pieces())
    params = [torch.nn.Parameter(start()[p.start : p.start + p.length].view(p.shape).clone()) for p in pieces()]
    table = [{"params": [param], "key": piece.key} for param, piece in zip(params, pieces(), strict=True)]
    optimizer = classes[name](table, **options)
    usual = dict(optimizer.param_groups[0])
    parts, cut_after = [(0, updater)], data.draw(st.integers(0, 4)) if name in ELEMENTWISE else 5
    for step in range(5):
        keys = {piece.key: KeyOptions(0, data.draw(factors), data.draw(factors)) for piece in pieces()}
        told = data.draw(st.sampled_from([StepOptions([options], keys), StepOptions([], keys), StepOptions()]))
        for param, group, piece in zip(params, optimizer.param_groups, pieces(), strict=True):
            mine = keys[piece.key] if told.keys is not None else KeyOptions()
            group["lr"] = usual["lr"] * mine.lr_mult
            if "weight_decay" in usual:
                group["weight_decay"] = usual["weight_decay"] * mine.wd_mult
            param.grad = gradient(step)[piece.start : piece.start + piece.length].view(piece.shape).clone()
        optimizer.step()
        run(parts, range(step, step + 1), options=told)
        if step == cut_after:
            parts = split_at(updater, [data.draw(st.integers(1, NUMEL - 1))])
    expected = torch.cat([param.detach().view(-1) for param in params])
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_options_that_make_no_sense_leave_the_last_ones_in_force() -> None:
    value = start()
    updater = make_updater(make_spec("sgd", lr=0.1), value, pieces())
    with pytest.raises(ValueError, match="param group 3 does not exist"):
        updater.update(gradient(0), 1.0, StepOptions([{"lr": 9.0}], {"bias": KeyOptions(3)}))
    assert torch.equal(value, start())
    updater.update(gradient(0), 1.0, None)
    torch.testing.assert_close(value, start() - 0.1 * gradient(0))


def test_group_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="param group 3 does not exist; the optimizer has 1"):
        make_updater(UpdaterSpec("sgd", [{}], {"bias": KeyOptions(3)}), start(), pieces())


def test_learning_rate_changes_at_the_step_it_is_set_also_after_a_cut() -> None:
    value = start()
    updater = make_updater(make_spec("sgd", lr=0.1), value, pieces())
    faster = StepOptions([{"lr": 0.5}])
    run([(0, updater)], range(1))
    run([(0, updater)], range(1, 2), options=faster)
    run(split_at(updater, [13]), range(2, 3))
    expected = start() - 0.1 * gradient(0) - 0.5 * gradient(1) - 0.5 * gradient(2)
    torch.testing.assert_close(value, expected)


def test_simple_updaters_assign_and_add() -> None:
    cases: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("assign", {}, 1.0),
        ("add", {"rate": 0.5}, 3.5),
        ("test", {"rescale_grad": 2.0}, 5.0),
    )
    for name, options, expected in cases:
        value = torch.full((6,), 3.0)
        parts = split_at(make_updater(make_spec(name, **options), value, [Piece("w", 0, 6)]), [2])
        for _, part in parts:
            part.update(torch.full_like(part.value, 4.0), 0.25, None)
            assert part.state(part.pieces[0]) == {}
        assert value.tolist() == [expected] * 6


def test_assign_without_a_scale_copies() -> None:
    value = torch.zeros(2)
    make_updater(make_spec("assign"), value, [Piece("w", 0, 2)]).update(torch.tensor([1.0, 2.0]), 1.0, None)
    assert value.tolist() == [1.0, 2.0]


# ---- joining ---------------------------------------------------------------------------------------------------------


def join_all(parts: list[tuple[int, FlatUpdater]], value: torch.Tensor) -> list[tuple[int, FlatUpdater]]:
    """Join neighbours as far as that goes; returns (first element, updater)."""
    found = parts[:1]
    for start, right in parts[1:]:
        first, left = found[-1]
        stop = start + right.value.numel()
        inside = [part for piece in pieces() if (part := piece.within(first, stop))]
        both = left.join(right, value[first:stop], inside)
        found[-1:] = [(first, left), (start, right)] if both is None else [(first, both)]
    return found


def all_states(parts: list[tuple[int, FlatUpdater]]) -> list[dict[str, torch.Tensor]]:
    [(_, updater)] = parts
    return [updater.state(piece) for piece in pieces()]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@settings(max_examples=4, deadline=None)
@given(
    cuts=st.lists(st.integers(1, NUMEL - 1), max_size=3),
    again=st.lists(st.integers(1, NUMEL - 1), max_size=3),
    when=st.integers(0, 3),
)
def test_parts_that_are_joined_and_cut_again_step_as_torch_does(
    name: str, options: dict[str, Any], cuts: list[int], again: list[int], when: int
) -> None:
    value = start()
    parts = split_at(make_updater(make_spec(name, **options), value, pieces()), cuts)
    run(parts, range(when))
    before = value.clone()
    one = join_all(parts, value)
    assert len(one) == 1
    assert torch.equal(value, before)
    run(one, range(when, 4))
    run(split_at(one[0][1], again), range(4, 5))
    torch.testing.assert_close(value, by_torch(ELEMENTWISE[name], **options), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_cut_and_a_join_change_no_bit_of_the_state_and_copy_nothing(name: str, options: dict[str, Any]) -> None:
    value = start()
    whole = make_updater(make_spec(name, **options), value, pieces())
    run([(0, whole)], range(3))
    before = all_states([(0, whole)])
    memory = {one.data_ptr() for one in per_element(whole)}
    parts = join_all(split_at(whole, [7, 14, 20]), value)
    for old, new in zip(before, all_states(parts), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert {one.data_ptr() for one in per_element(parts[0][1])} == memory


def per_element(updater: FlatUpdater) -> list[torch.Tensor]:
    assert isinstance(updater, TorchUpdater)
    optimizer = updater._optimizer
    found = [one for key in optimizer.keys for one in optimizer.own_state(key).values()]
    return [one for one in found if isinstance(one, torch.Tensor) and one.dim()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True], ids=["views", "copies"])
def test_masters_are_joined(dtype: torch.dtype, apart: bool) -> None:
    spec, value = make_spec("adam", lr=1e-4, multi_precision=True), start(dtype)
    expected = value.clone()
    whole = make_updater(spec, expected, pieces())
    parts = split_at(make_updater(spec, value, pieces()), [16])
    if apart:
        parts[1] = (16, make_updater(spec, value[16:], parts[1][1].pieces))
    for updaters in ([(0, whole)], parts):
        run(updaters, range(2))
    both = join_all(parts, value)
    assert len(both) == 1
    for updaters in ([(0, whole)], both):
        run(updaters, range(2, 5))
    torch.testing.assert_close(value, expected)


def test_keys_with_other_counters_stay_apart_in_one_updater_and_halves_of_a_key_in_two() -> None:
    for cut, joined in ((12, True), (5, False)):
        value = start()
        parts = split_at(make_updater(make_spec("adam", lr=0.1), value, pieces()), [cut])
        run(parts, range(2))
        run(parts[1:], range(2, 3))
        both = join_all(parts, value)
        assert (len(both) == 1) == joined
        if joined:
            steps = [float(state["step"]) for state in all_states(both)]
            assert steps == [2.0, 3.0, 3.0]


def test_updaters_of_unlike_options_are_not_joined() -> None:
    for first, second in (("adam", "adamw"), ("assign", "adam"), ("adam", "assign")):
        value = start()
        left = make_updater(make_spec(first), value[:12], pieces()[:1])
        right = make_updater(make_spec(second), value[12:17], [Piece("bias", 0, 5, (5,))])
        assert left.join(right, value[:17], pieces()[:2]) is None
    for name, option in (("sgd", "lr"), ("assign", "rescale_grad")):
        value = start()
        parts = split_at(make_updater(make_spec(name), value, pieces()), [12])
        run(parts[:1], range(1), options=StepOptions([{option: 0.5}]))
        run(parts[1:], range(1), options=StepOptions([{option: 0.25}]))
        assert len(join_all(parts, value)) == 2
        run(parts, range(1, 2), options=StepOptions([{option: 0.25}]))
        assert len(join_all(parts, value)) == 1


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_keys_of_a_whole_tensor_optimizer_are_joined_but_no_halves_of_one(name: str) -> None:
    value, expected = start(), start()
    whole = make_updater(make_spec(name, lr=0.1), expected, pieces())
    parts = split_at(make_updater(make_spec(name, lr=0.1), value, pieces()), [12])
    for updaters in ([(0, whole)], parts):
        run(updaters, range(2))
    both = join_all(parts, value)
    assert len(both) == 1
    for updaters in ([(0, whole)], both):
        run(updaters, range(2, 4))
    assert torch.equal(value, expected)
    assert len(join_all(split_at(make_updater(make_spec(name), value, pieces()), [14]), value)) == 2


# ---- element types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cut", [[], [13]])
def test_master_of_a_half_value_steps_in_float32(dtype: torch.dtype, cut: list[int]) -> None:
    value = start(dtype)
    updater = make_updater(make_spec("adam", lr=1e-4, multi_precision=True), value, pieces())
    param = torch.nn.Parameter(start(dtype).float())
    reference = torch.optim.Adam([param], lr=1e-4)
    run([(0, updater)], range(2))
    run(split_at(updater, cut), range(2, 5))
    for step in range(5):
        param.grad = gradient(step, dtype).float()
        reference.step()
    torch.testing.assert_close(value, param.detach().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_value_without_a_master_steps_as_torch_does(dtype: torch.dtype) -> None:
    value = start(dtype)
    run([(0, make_updater(make_spec("sgd", lr=0.1), value, pieces()))], range(5))
    torch.testing.assert_close(value, by_torch(torch.optim.SGD, dtype=dtype, lr=0.1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_double_values_keep_their_precision_under_a_scale(name: str) -> None:
    value = start(torch.float64)
    run([(0, make_updater(make_spec(name, lr=0.05), value, pieces()))], range(5), scale=0.3)
    expected = by_torch(ELEMENTWISE[name], dtype=torch.float64, lr=0.05)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_state_saved_in_one_cut_goes_on_in_another(name: str, options: dict[str, Any]) -> None:
    spec = make_spec(name, **options)
    value = start()
    first = split_at(make_updater(spec, value, pieces()), [3, 20])
    run(first, range(3))
    whole = make_updater(spec, value, pieces())
    for begin, part in first:
        for piece in part.pieces:
            whole.load_state(Piece(piece.key, begin + piece.start, piece.length), part.state(piece))
    run(split_at(whole, [11]), range(3, 5))
    torch.testing.assert_close(value, by_torch(ELEMENTWISE[name], **options), rtol=1e-6, atol=1e-6)


def test_master_is_part_of_the_state() -> None:
    spec = make_spec("sgd", lr=1e-3, multi_precision=True)
    value = start(torch.bfloat16)
    updater = make_updater(spec, value, pieces())
    run([(0, updater)], range(2))
    again = make_updater(spec, value.clone(), pieces())
    for piece in pieces():
        again.load_state(piece, updater.state(piece))
    for one in (updater, again):
        run([(0, one)], range(2, 5))
    assert torch.equal(updater.value, again.value)


def test_whole_tensor_state_comes_back_in_its_shape() -> None:
    spec = make_spec("lamb", lr=0.1)
    value = start()
    updater = make_updater(spec, value, pieces())
    run([(0, updater)], range(2))
    again = make_updater(spec, value.clone(), pieces())
    for piece in pieces():
        state = updater.state(piece)
        assert state["exp_avg"].shape == piece.shape
        again.load_state(piece, state)
    for one in (updater, again):
        run([(0, one)], range(2, 4))
    assert torch.equal(updater.value, again.value)


@pytest.mark.parametrize(
    ("name", "piece", "state", "why"),
    [
        ("adam", Piece("bias", 12, 5), {"exp_avg": torch.zeros(4)}, r"shape \(4,\), not \(5,\)"),
        ("adam", Piece("bias", 12, 5), {"exp_avg": torch.zeros(5, 1)}, r"not \(5,\)"),
        ("adam", Piece("bias", 12, 5), {"master": torch.zeros(5)}, "master"),
        ("lamb", Piece("bias", 12, 5, (5,)), {"exp_avg": torch.zeros(4)}, r"shape \(4,\), not \(5,\)"),
        ("adam", Piece("other", 100, 5), {"exp_avg": torch.zeros(5)}, "not part of this value"),
        ("assign", Piece("bias", 12, 5), {"exp_avg": torch.zeros(5)}, "has no state"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(
    name: str, piece: Piece, state: dict[str, torch.Tensor], why: str
) -> None:
    value = start()
    updater = make_updater(make_spec(name), value, pieces())
    with pytest.raises(ValueError, match=why):
        updater.load_state(piece, state)
    assert torch.equal(value, start())
    assert updater.state(pieces()[1]) == {}


def test_simple_updater_accepts_no_state_at_all() -> None:
    value = start()
    updater = make_updater(make_spec("assign"), value, pieces())
    updater.load_state(pieces()[0], {})
    assert updater.state(pieces()[0]) == {}
    assert torch.equal(value, start())


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | WHOLE_TENSOR))
def test_class_and_name_are_the_same_spec(name: str) -> None:
    cls = (ELEMENTWISE | WHOLE_TENSOR)[name]
    assert name_of_class(cls) == name == check_name(name.upper())
    assert find_class(name) is cls
    assert is_whole_tensor(name) == (name in WHOLE_TENSOR)
    assert name in known_names()


def test_instance_brings_its_param_groups() -> None:
    model = torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    spec = make_spec(optimizer)
    assert spec.name == "adamw"
    assert [group["lr"] for group in spec.groups] == [0.1, 0.5]
    assert spec.groups == option_groups(optimizer)
    assert "fused" not in spec.groups[0]
    assert spec.groups[0]["betas"] == [0.9, 0.999]


def test_options_have_mxnets_names_too() -> None:
    assert make_spec("sgd", learning_rate=0.1, wd=0.5).groups == [{"lr": 0.1, "weight_decay": 0.5}]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("adamm", "did you mean 'adam'"),
        ("zzzzzz", "known are adadelta"),
        ("lbfgs", "evaluates a closure"),
        (torch.optim.LBFGS, "evaluates a closure"),
    ],
)
def test_name_that_cannot_be_is_refused(name: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_spec(name)


def test_what_is_no_optimizer_and_options_that_cannot_travel_are_refused() -> None:
    with pytest.raises(TypeError, match="not an optimizer"):
        make_spec(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only numbers"):
        make_spec("sgd", lr=object())
    with pytest.raises(TypeError, match="instance itself"):
        make_spec(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), lr=0.2)


def test_option_that_the_optimizer_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="has no option 'lr'; known are rate"):
        make_spec("add", lr=0.1)
    with pytest.raises((TypeError, ValueError), match="momentun"):
        make_updater(make_spec("sgd", momentun=0.9), start(), pieces())


class Own(torch.optim.SGD):
    """A user's optimizer."""


def test_users_class_runs_only_where_it_is_allowed() -> None:
    path = "torch.optim.sgd:SGD"
    with pytest.raises(ValueError, match=r"--allow torch\.optim\.sgd:SGD"):
        find_class(path)
    assert find_class(path, [path]) is torch.optim.SGD
    assert is_whole_tensor(path)
    assert make_spec(Own, lr=0.1).name.endswith(":Own")
    updater = make_updater(make_spec(path, lr=0.1), start(), pieces(), [path])
    assert isinstance(updater, TorchUpdater)
    for wrong, why in (
        ("torch.optim:Nope", "cannot be imported"),
        ("nowhere.at:All", "cannot be imported"),
        ("torch:Tensor", "not a torch.optim.Optimizer"),
    ):
        with pytest.raises(ValueError, match=why):
            find_class(wrong, [wrong])


@pytest.mark.parametrize("late", ["conv", "bias", 7])
@pytest.mark.parametrize(("dampening", "restored"), [(0.5, False), (0.0, True)])
def test_a_key_whose_first_gradient_comes_later_gets_torchs_first_step_then(
    late: str | int, dampening: float, restored: bool
) -> None:
    """Torch's fused SGD cannot mix parameters with and without momentum; a first step has no dampening."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
    weights = torch.arange(NUMEL, dtype=torch.float32)
    updater = make_updater(make_spec("sgd", **options), value := weights.clone(), pieces())
    params = {piece.key: torch.nn.Parameter(weights[piece.start : piece.start + piece.length]) for piece in pieces()}
    expected = {key: torch.optim.SGD([param], **options, fused=True) for key, param in params.items()}
    for step in range(3):
        grad = torch.sin(torch.arange(NUMEL, dtype=torch.float32) + step)
        absent = [(one.start, one.start + one.length) for one in pieces() if one.key == late and step == 0]
        updater.update(grad.clone(), 1.0, None, tuple(absent))
        if restored and step == 0:
            states = [updater.state(piece) for piece in pieces()]
            updater = make_updater(make_spec("sgd", **options), value, pieces())
            for piece, state in zip(pieces(), states, strict=True):
                updater.load_state(piece, state)
            updater.update(torch.zeros(NUMEL), 1.0, None, ((0, NUMEL),))
        for piece in pieces():
            if not (piece.key == late and step == 0):
                params[piece.key].grad = grad[piece.start : piece.start + piece.length].clone()
                expected[piece.key].step()
    torch.testing.assert_close(value, torch.cat([params[piece.key].detach() for piece in pieces()]))


@pytest.mark.parametrize("betas", [[0.9], "half"])
def test_options_that_do_not_fit_the_class_are_named(betas: Any) -> None:
    spec = make_spec("adam", lr=0.1, betas=betas)
    with pytest.raises(ValueError, match=r"the options \{'lr': 0.1, 'betas': .*\} do not fit Adam: "):
        make_updater(spec, torch.zeros(2), [Piece("w", 0, 2)])
