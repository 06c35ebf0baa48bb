"""Numbers of an optimizer that would turn all weights into NaN reach no server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from paceline.kvstore import create
from paceline.testing.one_process import OneProcess
from paceline.updaters import KeyOptions, Options, StepOptions
from paceline.worker.traffic import Carried

NAN = float("nan")


@pytest.fixture(params=["dist_sync", "local"])
def store(request: pytest.FixtureRequest) -> Any:
    return OneProcess("a").stores()[0] if request.param == "dist_sync" else create("local")


def test_stores_refuse_numbers_that_are_none(store: Any) -> None:
    with pytest.raises(ValueError, match="lr is nan"):
        store.set_optimizer("sgd", lr=NAN)
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(2))
    with pytest.raises(ValueError, match="lr is nan"):
        store.set_options([{"lr": NAN}])
    with pytest.raises(ValueError, match="wd_mult of key 'w' is nan"):
        store.set_options(keys={"w": KeyOptions(wd_mult=NAN)})
    out = torch.empty(2)
    store.pushpull("w", torch.ones(2), out)
    assert out.tolist() == [-1.0, -1.0]


def test_servers_refuse_them_too() -> None:
    """Whoever sends them: the push counts for nothing."""
    [store] = OneProcess("a").stores()
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(2))
    carried = Carried(options=msgspec.msgpack.encode(StepOptions([{"lr": NAN}])))
    store.traffic.push(store.table.plan(("w",)), [torch.ones(2)], carried)
    with pytest.raises(Exception, match="lr is nan"):
        store.pull("w", torch.empty(2))
    out = torch.empty(2)
    store.pull("w", out)
    assert out.tolist() == [0.0, 0.0]


def test_a_rate_that_is_changed_in_the_given_list_is_pushed() -> None:
    [store] = OneProcess("a").stores()
    store.set_optimizer("sgd", lr=1.0)
    store.init("w", torch.zeros(1))
    groups: list[Options] = [{"lr": 1.0}]
    out = torch.empty(1)
    seen = []
    for rate in (1.0, 1.0, 0.5):
        groups[0]["lr"] = rate
        store.set_options(groups)
        store.pushpull("w", torch.ones(1), out)
        seen.append(out.item())
    assert seen == [-1.0, -2.0, -2.5]


def test_the_same_optimizer_set_again_has_its_own_rate_again() -> None:
    [store] = OneProcess("a").stores()
    store.init("w", torch.zeros(1))
    out = torch.empty(1)
    for rate in (4.0, None):
        store.set_optimizer("sgd", lr=1.0)
        if rate is not None:
            store.set_options([{"lr": rate}])
        store.pushpull("w", torch.ones(1), out)
    assert out.item() == -5.0


def test_numbers_that_are_changed_inside_an_option_are_pushed() -> None:
    [store] = OneProcess("a").stores()
    store.set_optimizer("adam", lr=1.0)
    betas = [0.9, 0.99]
    for first in (0.9, 0.5):
        betas[0] = first
        store.set_options([{"lr": 1.0, "betas": betas}])
        encoded = msgspec.msgpack.decode(store.optimizer.encoded, type=StepOptions)
        assert encoded.groups[0]["betas"] == [first, 0.99]
