"""What set_optimizer takes beside an optimizer's own options, in the stores of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.kvstore.inprocess import LocalStore
from paceline.kvstore.options import Schedule, schedule_of
from paceline.updaters import SGLD, Piece, make_spec, make_updater
from paceline.updaters.classes import ELEMENTWISE, WHOLE_TENSOR

SHAPES: dict[str, tuple[int, ...]] = {"w": (4, 3), "b": (2, 5)}
NAMES: dict[str, dict[str, Any]] = {name: {"lr": 0.05} for name in [*ELEMENTWISE, *WHOLE_TENSOR]}
NAMES |= {"add": {"rate": 0.5}, "test": {}, "assign": {}}


@pytest.fixture
def store() -> Any:
    return LocalStore()


def drawn(key: str, step: int) -> torch.Tensor:
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(step * 100 + len(key) + ord(key[0])))


def pulled(store: Any, key: str = "w", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(SHAPES[key], dtype=dtype)
    store.pull(key, out)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradient", [{}, {"rescale_grad": 0.5, "clip_gradient": 0.2}], ids=["plain", "clipped"])
def test_store_steps_as_a_server_does_with_every_updater(store: Any, name: str, gradient: dict[str, float]) -> None:
    values = {key: drawn(key, 0) for key in SHAPES}
    updaters = {
        key: make_updater(
            make_spec(name, **NAMES[name], **gradient),
            values[key].view(-1),
            [Piece(key, 0, values[key].numel(), shape)],
        )
        for key, shape in SHAPES.items()
    }
    store.set_optimizer(name, **NAMES[name], **gradient)
    store.init(list(SHAPES), [drawn(key, 0) for key in SHAPES])
    for step in range(1, 6):
        store.push(list(SHAPES), [drawn(key, step) for key in SHAPES])
        for key in SHAPES:
            updaters[key].update(drawn(key, step).view(-1), 1.0, None)
    for key in SHAPES:
        torch.testing.assert_close(pulled(store, key), values[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_float32_with_every_updater(store: Any, name: str, dtype: torch.dtype) -> None:
    single = type(store)()
    for one, precision in ((store, dtype), (single, torch.float32)):
        one.set_optimizer(name, multi_precision=True, **NAMES[name])
        one.init("w", drawn("w", 0).to(dtype).to(precision))
        for step in range(1, 21):
            one.push("w", (drawn("w", step) * 0.01).to(dtype).to(precision))
    torch.testing.assert_close(pulled(store, dtype=dtype), pulled(single).to(dtype), rtol=0, atol=0)


def test_users_gradient_stays_as_it_is(store: Any) -> None:
    store.set_optimizer("sgd", lr=1.0, rescale_grad=0.5, clip_gradient=0.1)
    store.init("w", torch.zeros(4, 3))
    given = torch.ones(4, 3)
    store.push("w", given)
    assert torch.equal(given, torch.ones(4, 3))
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -0.1))


def test_sum_over_devices_is_rescaled_then_clipped(store: Any) -> None:
    store.set_optimizer("sgd", lr=1.0, rescale_grad=0.5, clip_gradient=0.8)
    store.init(["w", "b"], [torch.zeros(4, 3), torch.zeros(2, 5)])
    store.push(["w", "b"], [[torch.ones(4, 3)] * 2, [torch.full((2, 5), 0.5)] * 2])
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -0.8))
    torch.testing.assert_close(pulled(store, "b"), torch.full((2, 5), -0.5))


def test_rows_are_rescaled_and_clipped(store: Any) -> None:
    store.set_optimizer("sgd", lr=1.0, rescale_grad=0.5, clip_gradient=0.8)
    rows = torch.sparse_coo_tensor([[1]], torch.tensor([[4.0, 1.0, -4.0]]), (4, 3), check_invariants=True)
    store.init("w", torch.zeros(4, 3).to_sparse(1))
    store.push("w", rows)
    expected = torch.zeros(4, 3)
    expected[1] = torch.tensor([-0.8, -0.5, 0.8])
    torch.testing.assert_close(pulled(store), expected)


def test_options_that_a_step_names_leave_the_others_when_keys_come_later(store: Any) -> None:
    store.set_optimizer("sgd", lr=1.0, momentum=0.5)
    store.init(["w", "b"], [torch.zeros(4, 3), torch.zeros(2, 5)])
    store.set_optimizer("sgd", lr=1.0, momentum=0.5, lr_scheduler=lambda num_update: 1.0)
    store.push("w", torch.ones(4, 3))
    store.push("b", torch.ones(2, 5))  # the first push of a key builds the optimizer anew
    store.push("w", torch.ones(4, 3))
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -2.5))


def test_own_class_keeps_its_options_beside_those_of_the_gradient(store: Any) -> None:
    class Own(torch.optim.SGD):
        """A user's optimizer."""

    store.set_optimizer(Own, lr=1.0, clip_gradient=0.5)
    store.init("w", torch.zeros(4, 3))
    store.push("w", torch.ones(4, 3))
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -0.5))


def test_instance_takes_options_of_the_gradient(store: Any) -> None:
    store.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0), clip_gradient=0.5)
    store.init("w", torch.zeros(4, 3))
    store.push("w", torch.ones(4, 3))
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -0.5))


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD])
def test_momentum_form_is_chosen_by_name_or_class(store: Any, optimizer: Any) -> None:
    rates = {1: 1.0, 2: 0.1}
    store.set_optimizer(optimizer, lr=1.0, momentum=0.5, momentum_form="mxnet", lr_scheduler=rates.__getitem__)
    store.init("w", torch.zeros(4, 3))
    for _ in range(2):
        store.push("w", torch.ones(4, 3))
    # v = -1, then -0.5 - 0.1; torch's form would be -1 - 0.1 * 1.5.
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -1.6))


# ---- schedules -------------------------------------------------------------------------------------------------------


def test_schedule_gets_the_number_of_the_update_and_sets_its_rate(store: Any) -> None:
    seen: list[int] = []

    def schedule(num_update: int) -> float:
        seen.append(num_update)
        return 1.0 / num_update

    store.set_optimizer("sgd", lr_scheduler=schedule)
    store.init(["w", "b"], [torch.zeros(4, 3), torch.zeros(2, 5)])
    store.push("w", torch.ones(4, 3))
    store.push("w", torch.ones(4, 3))
    store.push("b", torch.ones(2, 5))
    store.push(["w", "b"], [torch.ones(4, 3), torch.ones(2, 5)])
    assert seen == [1, 2, 2, 3]
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -(1 + 1 / 2 + 1 / 3)))
    torch.testing.assert_close(pulled(store, "b"), torch.full((2, 5), -(1 / 2 + 1 / 3)))


def test_push_that_is_refused_does_not_count(store: Any) -> None:
    seen: list[int] = []
    store.set_optimizer("sgd", lr_scheduler=lambda num_update: float(seen.append(num_update) or 1.0))  # type: ignore[func-returns-value]
    store.init("w", torch.zeros(4, 3))
    with pytest.raises(ValueError, match="shape"):
        store.push("w", torch.ones(5))
    store.push("w", torch.ones(4, 3))
    assert seen == [1]


class FactorScheduler:
    """MXNet's interface: a rate to start from."""

    def __init__(self) -> None:
        self.base_lr = 0.01

    def __call__(self, num_update: int) -> float:
        return self.base_lr * 0.5**num_update


def test_schedule_with_a_base_rate_starts_at_the_rate_of_the_optimizer() -> None:
    for options, expected in (({"learning_rate": 0.8}, 0.4), ({"lr": 0.8}, 0.4), ({}, 0.005)):
        schedule = schedule_of({"lr_scheduler": FactorScheduler(), **options})
        assert schedule is not None
        assert schedule.rate("w") == pytest.approx(expected)


def test_schedule_goes_on_where_an_earlier_run_ended() -> None:
    schedule = schedule_of({"lr_scheduler": float, "begin_num_update": 10})
    assert schedule is not None
    assert [schedule.rate("w"), schedule.rate(["w", "b"]), schedule.rate([7, 8])] == [11, 12, 12]


@pytest.mark.parametrize("keys", [[1, 2], (1, 2), range(1, 3), np.arange(1, 3)])
def test_schedule_counts_each_key_of_a_list_in_any_form(keys: Any) -> None:
    schedule = Schedule(float)
    assert [schedule.rate(keys), schedule.rate(1), schedule.rate(np.int64(2))] == [1, 2, 2]


def test_schedule_of_torch_is_refused_with_the_way_out(store: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(TypeError, match=r"torch's StepLR.*function num_update -> rate.*DistributedOptimizer"):
        store.set_optimizer("sgd", lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(TypeError, match=r"0\.5, not a function"):
        store.set_optimizer("sgd", lr_scheduler=0.5)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_schedule_that_returns_no_rate_is_an_error(rate: float) -> None:
    with pytest.raises(ValueError, match="for update 1, which is not a learning rate"):
        Schedule(lambda num_update: rate).rate("w")


def test_optimizer_that_is_set_again_has_no_schedule_any_more(store: Any) -> None:
    store.set_optimizer("sgd", lr=1.0, lr_scheduler=lambda num_update: 0.5)
    store.init("w", torch.zeros(4, 3))
    store.push("w", torch.ones(4, 3))
    store.set_optimizer("sgd", lr=1.0)
    store.push("w", torch.ones(4, 3))
    torch.testing.assert_close(pulled(store), torch.full((4, 3), -1.5))


def test_noise_is_a_matter_of_seed_key_and_step(store: Any) -> None:
    other = type(store)()
    for one in (store, other):
        one.set_optimizer(SGLD, lr=0.1, seed=4)
        one.init(["w", "b"], [torch.zeros(4, 3), torch.zeros(2, 5)])
    store.push(["w", "b"], [torch.zeros(4, 3), torch.zeros(2, 5)])
    other.push("b", torch.zeros(2, 5))
    other.push("w", torch.zeros(4, 3))
    assert torch.equal(pulled(store), pulled(other))
    assert not torch.equal(pulled(store).flatten()[:10], pulled(store, "b").flatten())
