"""Every optimizer on the servers of a dist_sync job against a local store that gets the same sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob
from paceline.updaters.classes import ELEMENTWISE, WHOLE_TENSOR

WORKERS, STEPS = 2, 8
#: The first lies on both servers, unless whole tensors are needed.
SHAPES = {"large": (40, 13), "small": (3, 4)}
NAMES: dict[str, dict[str, Any]] = {name: {"lr": 0.05} for name in [*ELEMENTWISE, *WHOLE_TENSOR]}
NAMES |= {"add": {"rate": 0.5}, "test": {}, "assign": {}}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in NAMES.items()},
    "sgd mxnet": ("sgd", {"lr": 0.05, "momentum": 0.9, "momentum_form": "mxnet"}),
    "sgld seed": ("sgld", {"lr": 0.05, "seed": 7}),
    "dcasgd momentum": ("dcasgd", {"lr": 0.05, "momentum": 0.9, "lamda": 0.5}),
}
GRADIENT = {"rescale_grad": 0.5, "clip_gradient": 0.3}


# ---- what runs in the workers ----------------------------------------------------------------------------------------


def value(key: str) -> torch.Tensor:
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(len(key)))


def gradient(key: str, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    # All workers have the same half gradients: in whichever type these are summed, that is exact.
    rank = rank if dtype == torch.float32 else 0
    drawn = torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(key)))
    return drawn.to(dtype)


def difference(store: Any, local: Any, dtype: torch.dtype) -> float:
    found = 0.0
    for key, shape in SHAPES.items():
        mine, theirs = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        store.pull(key, mine)
        local.pull(key, theirs)
        found = max(found, float((mine.double() - theirs.double()).abs().max()))
    return found


def train(stores: list[Any], steps: range, dtype: torch.dtype) -> None:
    """Push this worker's gradients to the first store, and those of all workers to the others."""
    for step in steps:
        for store in stores:
            for key in SHAPES:
                grads = [gradient(key, rank, step, dtype) for rank in range(WORKERS)]
                store.push(key, grads if store.num_workers == 1 else grads[store.rank])


def compare(form: str, dtype: torch.dtype = torch.float32, **more: Any) -> float:
    name, options = FORMS[form]
    stores = [kvstore.create("dist_sync"), kvstore.create("local")]
    for store in stores:
        store.set_optimizer(name, **options, **more)
        store.init(list(SHAPES), [value(key).to(dtype) for key in SHAPES])
    train(stores, range(STEPS), dtype)
    return difference(*stores, dtype)


def resumed(form: str) -> float:
    """Save the optimizer's state in the middle, and go on in a new store."""
    name, options = FORMS[form]
    stores = [kvstore.create("dist_sync"), kvstore.create("local")]
    for store in stores:
        store.set_optimizer(name, **options)
        store.init(list(SHAPES), [value(key) for key in SHAPES])
    train(stores, range(4), torch.float32)
    again = kvstore.create("dist_sync")
    again.set_optimizer(name, **options)
    outs = [torch.empty(shape) for shape in SHAPES.values()]
    stores[0].pull(list(SHAPES), outs)
    again.init(list(SHAPES), outs)
    if again.rank == 0:
        again.set_optimizer_states(stores[0].optimizer_states())
    again.barrier()
    train([again, stores[1]], range(4, STEPS), torch.float32)
    return difference(again, stores[1], torch.float32)


def schedule(num_update: int) -> float:
    return 0.1 / num_update


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for form in FORMS:
        found[f"{form} clipped"] = compare(form, **GRADIENT)
        if form == "assign":
            found[f"{form} plain"] = compare(form)
        else:
            found[f"{form} half"] = compare(form, torch.bfloat16, multi_precision=True)
            found[f"{form} resumed"] = resumed(form)
    found["schedule"] = compare("sgd mxnet", lr_scheduler=schedule)
    found["begun schedule"] = compare("adam", lr_scheduler=schedule, begin_num_update=5)

    store = kvstore.create("dist_sync")
    store.set_optimizer("sgd", lr=1.0, lr_scheduler=lambda num_update: 1.0 / num_update)
    store.init("x", torch.zeros(2))
    out, seen = torch.zeros(2), []
    for again in (False, False, True):
        if again:
            store.set_optimizer("sgd", lr=1.0)
        store.pushpull("x", torch.full((2,), -0.5), out)
        seen.append(out[0].item())
    found["rates"] = seen
    try:
        store.set_optimizer(
            "sgd", lr_scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
        )
    except TypeError as error:
        found["refused"] = str(error)
    try:
        store.set_options([{"clip_gradient": -1.0}])
    except ValueError as error:
        found["limit"] = str(error)
    return found


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Any:
    with LocalJob(WORKERS, 2, timeout_s=60, bigarray_bound=200) as job:
        return job.run(run_all)


@pytest.mark.parametrize(
    ("form", "how"), [(form, how) for form in FORMS for how in ("clipped", "plain" if form == "assign" else "resumed")]
)
def test_servers_step_as_a_local_store_does(found: Any, form: str, how: str) -> None:
    assert all(worker[f"{form} {how}"] <= 1e-6 for worker in found)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "assign"])
def test_servers_keep_float32_masters_with_every_optimizer(found: Any, form: str) -> None:
    # A last bit of a value between 2 and 4 may be rounded the other way.
    assert all(worker[f"{form} half"] <= 2.0**-6 for worker in found)


def test_schedule_travels_with_the_pushes(found: Any) -> None:
    for worker in found:
        assert worker["schedule"] <= 1e-5
        assert worker["begun schedule"] <= 1e-5
        assert worker["rates"] == [1.0, 1.5, 2.5]


def test_wrong_options_are_refused_with_the_remedy(found: Any) -> None:
    for worker in found:
        assert "torch's StepLR" in worker["refused"]
        assert "None turns it off" in worker["limit"]
