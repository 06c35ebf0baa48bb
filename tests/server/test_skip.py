"""Rounds that must not be applied, and workers that do not mean the same optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.consistency import Policy
from paceline.errors import ConfigError
from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess
from paceline.updaters import KeyOptions, StepOptions, options_apart
from paceline.wire import messages as m

PLACES = {
    "shared memory": ("aaa", "a", True),
    "frames": ("aaa", "a", False),
    "local merge": ("aabb", "ab", True),
    "local merge by frames": ("aabb", "ab", False),
}
KEYS = ["a", "b", "c"]
NUMEL = 6


def new_stores(job: OneProcess, updater: str = "sgd", policy: Policy | None = None) -> list[DistStore]:
    stores = job.stores(policy or Policy(), mean=True)
    for store in stores:
        if updater != "assign":
            store.set_optimizer(updater, lr=0.1, momentum=0.9)
    for store in stores:
        store.init(KEYS, [torch.ones(NUMEL)] * 3)
    return stores


def push(store: DistStore, value: float, **flags: Any) -> None:
    for step in store.table.plan(tuple(KEYS)).steps:
        store.traffic.wait(step)
        for target in step.grads:
            target.fill_(value)
        for route, spans in step.sends.items():
            store.traffic.push_ranges(route, spans, replace(store.carried(), **flags))
        step.set_fresh(store.policy.merge == "all")


def pull(store: DistStore) -> torch.Tensor:
    outs = [torch.zeros(NUMEL) for _ in KEYS]
    store.pull(KEYS, outs)
    return torch.cat(outs)


def use_rates(stores: list[DistStore], *rates: float) -> None:
    for store, rate in zip(stores, rates, strict=True):
        store.optimizer.set_options([{"lr": rate, "momentum": 0.9}])  # as an exchange does: workers may step


# ---- rounds that are not applied -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_one_flag_keeps_the_round_of_all_from_being_applied(place: str, who: int) -> None:
    workers, servers, shared = PLACES[place]
    job = OneProcess(workers, servers, seed=who, shared_memory=shared)
    stores, other = new_stores(job), new_stores(OneProcess(workers, servers, shared_memory=shared))
    for round in range(3):
        for store in stores:
            push(
                store, float("nan") if store.rank == who and round == 1 else 1.0, skip=store.rank == who and round == 1
            )
        for store in other if round != 1 else ():
            push(store, 1.0)
    for store in stores:
        assert torch.equal(pull(store), pull(other[0]))
    assert stores[0].stats()["skipped"] == 1.0
    assert stores[0].stats()["updates"] == 3.0
    assert stores[0].stats()["step_mass"] == pytest.approx(0.2)


@pytest.mark.parametrize("place", PLACES)
def test_merged_gradients_of_a_skipped_round_are_no_numbers_for_anybody(place: str) -> None:
    workers, servers, shared = PLACES[place]
    stores = new_stores(OneProcess(workers, servers, shared_memory=shared), "assign")
    for store in stores:
        push(store, 1.0, skip=store.rank == 1)
    assert all(bool(pull(store).isnan().all()) for store in stores)
    for store in stores:
        push(store, 2.0)
    assert all(torch.equal(pull(store), torch.full((3 * NUMEL,), 2.0)) for store in stores)


@pytest.mark.parametrize("merge", [Policy("each"), Policy("groups", ((0, 1), (2,))), Policy("first", first=2)])
def test_a_flag_counts_for_its_own_update_only(merge: Policy) -> None:
    job = OneProcess("aaa")
    stores = new_stores(job, policy=merge)
    for store in stores:
        push(store, 1.0, skip=store.rank == 0)
        job.deliver_all()
    held = job.services[0].stores["s"].own
    applied = {"each": 2, "groups": 1, "first": 0}[merge.merge]
    assert held.stats.skipped == 1
    assert float(held.get(0, 0).values[0]) == pytest.approx({0: 1.0, 1: 0.9, 2: 0.71}[applied])


def test_what_a_codec_holds_back_stays_in_a_skipped_round() -> None:
    stores = new_stores(OneProcess("aa"))
    for store in stores:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    for store in stores:
        push(store, 0.2)
    for store in stores:
        push(store, float("inf"), skip=store.rank == 0)
    pull(stores[0])
    assert float(stores[0].codec_states()["a"]["residual"][0]) == pytest.approx(0.2)


def test_rows_of_a_skipped_round_are_not_looked_for() -> None:
    job = OneProcess("a")
    [store] = new_stores(job)
    store.init(["rows"], [torch.ones(4, 2).to_sparse(1)])
    body = m.Push("s", [m.Entry(1, 0, 0, 8, 1)], 1.0, b"", False, False, False, rows=True, skip=True)
    assert isinstance(store.session.call_server(0, body, "push"), m.Values)
    assert store.stats()["skipped"] == 0.5  # of two slots


# ---- workers with unlike optimizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("updater", ["sgd", "assign"])
@pytest.mark.parametrize("place", PLACES)
def test_rates_that_differ_are_an_error_on_all_workers_and_change_nothing(place: str, updater: str) -> None:
    workers, servers, shared = PLACES[place]
    stores = new_stores(OneProcess(workers, servers, shared_memory=shared), updater)
    use_rates(stores, *[0.1] * len(stores))
    for store in stores:
        push(store, 1.0)
    before = pull(stores[0])
    use_rates(stores, 0.1, 0.2, *[0.1] * (len(stores) - 2))
    for store in stores:
        push(store, 1.0)
    for store in stores:
        with pytest.raises(
            ConfigError, match=r"lr of param group 0 is 0.1 on worker 0 and 0.2 on worker 1, round 2 \(key"
        ):
            store.lifecycle.wait_for_own_requests()
        for _ in servers[1:]:  # every server tells it
            with pytest.raises(ConfigError):
                store.lifecycle.wait_for_own_requests()
    assert torch.equal(pull(stores[0]), before)
    use_rates(stores, *[0.1] * len(stores))
    for store in stores:
        push(store, 1.0)
    assert all(torch.equal(pull(store), pull(stores[0])) for store in stores)


def test_the_first_who_differs_on_another_host_is_named() -> None:
    stores = new_stores(OneProcess("aabb", "ab"))
    use_rates(stores, 0.1, 0.1, 0.3, 0.3)
    for store in stores:
        push(store, 1.0)
    for store in stores:
        with pytest.raises(ConfigError, match=r"0\.1 on worker 0 and 0\.3 on worker 2"):
            store.lifecycle.wait_for_own_requests()


def test_slots_of_one_push_are_answered_by_one_error() -> None:
    stores = new_stores(OneProcess("aa"))
    for store in stores:
        for key in KEYS:
            store.push(key, torch.ones(NUMEL))
    use_rates(stores, 0.1, 0.2)
    for store in stores:
        push(store, 1.0)
    for store in stores:
        with pytest.raises(ConfigError):
            store.lifecycle.wait_for_own_requests()


def test_groups_may_have_rates_of_their_own() -> None:
    stores = new_stores(OneProcess("aaa"), policy=Policy("groups", ((0, 1), (2,))))
    use_rates(stores, 0.1, 0.1, 0.2)
    for store in stores:
        push(store, 1.0)
    for store in stores:
        store.lifecycle.wait_for_own_requests()


ONE = StepOptions([{"lr": 0.1}])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (ONE, ""),
        (StepOptions([{"lr": math.nextafter(0.1, 1)}]), ""),
        (StepOptions([{"lr": 0.1001}]), "lr of param group 0 is 0.1 on worker 3 and 0.1001 on worker 5"),
        (StepOptions([{"lr": 0.1}, {}]), "worker 3 has 1 param groups and worker 5 has 2"),
        (StepOptions([{"lr": 0.1, "eps": 1.0}]), "eps of param group 0 is not set on worker 3 and 1.0 on worker 5"),
        (StepOptions([{"lr": 0.1}], {"w": KeyOptions(lr_mult=2.0)}),
         "lr_mult of key 'w' is 1.0 on worker 3 and 2.0 on worker 5"),
        (StepOptions([{"lr": 0.1}], {"w": KeyOptions()}), ""),
    ],
)  # fmt: skip
def test_the_difference_of_options_is_named(other: StepOptions, text: str) -> None:
    assert options_apart(ONE, other, 3, 5) == text
