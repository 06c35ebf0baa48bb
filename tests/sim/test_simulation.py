"""Simulated jobs, against cases worked out by hand and against stores that run the same rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.consistency import Action, Apply, Policy, Rule, new_rule, policy_of
from paceline.hetero import Speed
from paceline.hetero.local_period import Period
from paceline.sim import Result, SimulatedCluster, SimulatedTraining, SimulatedWorker, simulate, simulation
from paceline.sim.problem import Digits
from paceline.testing.one_process import OneProcess


def cluster(*seconds: float, **more: Any) -> SimulatedCluster:
    """Workers whose rounds take so long, whatever the batch."""
    return SimulatedCluster(tuple(SimulatedWorker(Speed(one, 1e-12)) for one in seconds), **more)


def run(policy: Policy, *seconds: float, rounds: int = 4, **more: Any) -> Result:
    return simulate(cluster(*seconds, **more), SimulatedTraining(policy, batch=1, rounds=rounds))


def watch(monkeypatch: pytest.MonkeyPatch, note: Callable[[int, Sequence[Action]], None]) -> None:
    """Let a function know the pushes of simulated jobs, and the rule's actions."""

    def made(policy: Policy, workers: int) -> Rule:
        rule = new_rule(policy, workers)
        push = rule.push

        def pushed(worker: int, round: int, samples: float) -> Sequence[Action]:
            actions = push(worker, round, samples)
            note(worker, actions)
            return actions

        monkeypatch.setattr(rule, "push", pushed)
        return rule

    monkeypatch.setattr(simulation, "new_rule", made)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_lock_step_runs_at_the_pace_of_the_slowest() -> None:
    result = run(Policy("all"), 1, 2, 3)
    assert result.seconds == pytest.approx(12)
    assert result.stats.updates == 4
    assert result.staleness == {1: 4}


def test_asynchronous_worker_waits_for_nobody() -> None:
    """Worker 1 pushes first at 3.5 s and has missed three updates; then each misses one of the other, once."""
    result = run(Policy("each"), 1, 3.5)
    assert result.seconds == pytest.approx(14)
    assert result.stats.updates == 8
    assert result.staleness == {1: 5, 2: 2, 4: 1}


def test_bounded_worker_waits_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With s = 1, worker 0 pushes its third round only after worker 1 has finished its first, at 3 s."""
    order: list[int] = []
    watch(monkeypatch, lambda worker, actions: order.append(worker))
    result = run(Policy("each", bound=1), 1, 3)
    assert order == [0, 0, 1, 0, 1, 0, 1, 1]
    assert result.seconds == pytest.approx(12)


def test_groups_step_by_themselves() -> None:
    """The fast group updates at 1, 2, 3, 4 s, the slow one at 2.5, 5, 7.5, 10 s."""
    result = run(Policy("groups", groups=((0, 1), (2,)), weighting="inverse"), 1, 1, 2.5)
    assert result.seconds == pytest.approx(10)
    assert result.stats.updates == 8
    assert result.staleness == {1: 5, 2: 1, 3: 2}
    assert result.step_mass == pytest.approx(0.1 * (5 + 1 / 2 + 2 / 3))


def test_first_k_makes_an_update_of_two_pushes() -> None:
    """Workers 0 and 1 fill cohorts together; the third comes when they have left, and makes its updates alone."""
    result = run(Policy("first", first=2), 1, 1.25, 100)
    assert result.seconds == pytest.approx(400)
    assert result.stats.updates == 8
    assert sum(result.rounds) == 12


def test_update_with_a_time_of_grace_takes_the_pushes_that_come_meanwhile() -> None:
    """Both are in at 1.5 s and 3 s; later worker 0 comes to its bound. Without grace each push is an update."""
    result = run(Policy("first", first=1, grace_s=1.0), 1, 1.5, rounds=2)
    assert result.seconds == pytest.approx(3)
    assert [result.stats.updates, sum(result.rounds)] == [2, 4]
    assert run(Policy("first", first=1, grace_s=0.25), 1, 1.5, rounds=2).stats.updates == 4


def test_links_and_server_take_their_time() -> None:
    """Two pushes of 10 bytes share 10 bytes/s for 2 s, are merged for 1 s each, updated for 3 s, pulled for 2 s."""
    more = {"bandwidth": 10.0, "merge_s": 1.0, "update_s": 3.0, "model_bytes": 10.0, "latency_s": 0.5}
    result = run(Policy("all"), 1, 1, rounds=1, **more)
    assert result.seconds == pytest.approx(1 + 2 + 2 + 3 + 2)
    assert result.network_bytes == 40
    halves = run(Policy("all"), 1, 1, rounds=1, servers=2, **more)
    assert halves.seconds == pytest.approx(1 + (2 + 2 + 3 + 2) / 2)
    assert halves.network_bytes == 40


def test_workers_own_link_counts_where_it_is_slower() -> None:
    machines = (SimulatedWorker(Speed(1, 1e-12), bandwidth=2.0), SimulatedWorker(Speed(1, 1e-12)))
    plan = SimulatedTraining(Policy("all"), batch=1, rounds=1)
    assert simulate(SimulatedCluster(machines, bandwidth=10.0, model_bytes=10.0), plan).seconds == pytest.approx(11)


def test_job_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds or seconds"):
        simulate(cluster(1), SimulatedTraining(Policy("all")))


def test_lack_of_simpy_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(ImportError, match=r"pip install 'paceline\[sim\]'"):
        run(Policy("all"), 1)


def test_equal_seeds_are_equal_jobs() -> None:
    def job(seed: int) -> Result:
        return simulate(cluster(1, 2, jitter=0.3), SimulatedTraining(Policy("each"), seconds=50, seed=seed))

    assert job(1).stats == job(1).stats
    assert job(1).stats.staleness != job(2).stats.staleness


# ---- local steps -----------------------------------------------------------------------------------------------------


def in_periods(text: int | str, *seconds: float, rounds: int = 4, delay: int = 0, **more: Any) -> Result:
    plan = SimulatedTraining(Policy("all"), batch=1, rounds=rounds, period=Period.parse(text), delay=delay)
    return simulate(cluster(*seconds, **more), plan)


def test_worker_with_local_steps_exchanges_once_in_a_period() -> None:
    result = in_periods(5, 1, 2)
    assert (result.seconds, result.samples, result.stats.updates) == (pytest.approx(40), 40, 4)
    assert result.computing == pytest.approx(3 / 4)


def test_slower_workers_take_fewer_local_steps_once_speeds_are_known() -> None:
    result = in_periods("4 by speed", 1, 2)
    assert (result.seconds, result.samples) == (pytest.approx(8 + 3 * 4), 8 + 3 * 6)
    by_time = in_periods("4 s", 1, 2)
    assert (by_time.seconds, by_time.samples, by_time.computing) == (pytest.approx(16), 24, pytest.approx(1.0))


def test_answer_travels_while_the_worker_goes_on() -> None:
    """A push and its answer take 3 s: with 2 steps of delay 1 s is waited for, and the last answer in full."""
    link = {"bandwidth": 10.0, "model_bytes": 15.0}
    assert in_periods(4, 1, rounds=3, **link).seconds == pytest.approx(3 * (4 + 3))
    assert in_periods(4, 1, rounds=3, delay=2, **link).seconds == pytest.approx(3 * 4 + 1 + 1 + 3)
    late = in_periods("2 s", 1, rounds=3, delay=5, **link)
    assert late.seconds == pytest.approx(2 + 3 + 3 + 3), "a push waits for the answer to the one before"


def test_one_local_step_that_servers_apply_as_it_is_learns_as_lock_step_does() -> None:
    same = {"batch": 8, "rounds": 12, "evaluate_s": 1.0}
    plain = simulate(cluster(1, 1), SimulatedTraining(Policy("all"), **same), Digits())
    local = SimulatedTraining(Policy("all"), period=Period(1), outer=(1.0, 0.0), **same)
    assert simulate(cluster(1, 1), local, Digits()).curve == plain.curve
    assert len({accuracy for _, accuracy in plain.curve}) > 3
    nesterov = SimulatedTraining(Policy("all"), period=Period(4), delay=1, **same)
    assert simulate(cluster(1, 1), nesterov, Digits()).curve[-1][1] > plain.curve[-1][1]


# ---- the regime that the project is for ------------------------------------------------------------------------------

#: Twelve workers in classes of 1 : 2 : 4, with 10 % of noise, a fifth of a step's time fixed.
CLASSES = SimulatedCluster(
    tuple(SimulatedWorker(Speed(0.2 * t, 0.8 * t / 32)) for t in (1.0, 2.0, 4.0) for _ in range(4)), jitter=0.1
)
GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
#: Step mass at one learning rate, relative to lock step: what an independent simulator gave for the same machines.
MASSES = [
    ("dist_sync", {}, "measured", 2.2),
    ("dist_async", {}, "equal", 30),
    ("dist_async", {"weighting": "inverse"}, "equal", 3.4),
    ("dist_ssync", {}, "equal", 13),
    ("dist_ssync", {"weighting": "inverse"}, "equal", 2.8),
    ("dist_gsync", {"groups": GROUPS, "weighting": "none"}, "equal", 6.9),
    ("dist_gsync", {"groups": GROUPS}, "equal", 3.3),
    ("dist_ksync", {"first": 4}, "pool", 7.6),
    ("dist_ksync", {"first": 12, "age": 0}, "pool", 1.4),
]


@pytest.fixture(scope="module")
def lock_step() -> Result:
    return simulate(CLASSES, SimulatedTraining(policy_of("dist_sync", num_workers=12), seconds=300))


@pytest.mark.parametrize(("store_type", "options", "shares", "mass"), MASSES)
def test_step_mass_is_that_of_an_independent_simulator(
    store_type: str, options: dict[str, Any], shares: Any, mass: float, lock_step: Result
) -> None:
    result = simulate(CLASSES, SimulatedTraining(policy_of(store_type, num_workers=12, **options), shares, seconds=300))
    assert result.step_mass / lock_step.step_mass == pytest.approx(mass, rel=0.07)


def test_grouping_has_more_than_twice_the_throughput_of_lock_step(lock_step: Result) -> None:
    grouped = simulate(CLASSES, SimulatedTraining(policy_of("dist_gsync", num_workers=12, groups=GROUPS), seconds=300))
    bounded = simulate(CLASSES, SimulatedTraining(policy_of("dist_ssync", num_workers=12), seconds=300))
    assert grouped.samples_per_s / lock_step.samples_per_s == pytest.approx(2.33, rel=0.05)
    assert bounded.samples_per_s / lock_step.samples_per_s < 1.15


def test_inverse_weighting_learns_three_quarters_from_the_fast_third() -> None:
    result = simulate(CLASSES, SimulatedTraining(policy_of("dist_gsync", num_workers=12, groups=GROUPS), seconds=300))
    mass = [sum(result.stats.data_mass[worker] for worker in group) for group in GROUPS]
    assert [one / sum(mass) for one in mass] == pytest.approx([0.76, 0.19, 0.05], abs=0.03)


@pytest.mark.slow
def test_time_to_accuracy_at_one_rate_follows_the_step_mass() -> None:
    """On digits, grouping with 1/Y is three times as fast as lock step at the same small rate."""

    def seconds(store_type: str, **options: Any) -> float:
        policy = policy_of(store_type, num_workers=12, **options)
        found = []
        for seed in range(3):
            plan = SimulatedTraining(policy, lr=0.1, seconds=6000, target=0.9, evaluate_s=10, seed=seed)
            reached = simulate(CLASSES, plan, Digits(seed=seed)).target_s
            assert reached is not None
            found.append(reached)
        return float(np.median(found))

    assert seconds("dist_sync") / seconds("dist_gsync", groups=GROUPS) == pytest.approx(3.1, rel=0.2)


# ---- the same decisions as a real job's ------------------------------------------------------------------------------


@pytest.mark.parametrize(("store_type", "options", "shares", "mass"), MASSES[1:])
def test_servers_decide_as_the_simulator_does(
    store_type: str, options: dict[str, Any], shares: Any, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pushes of a simulated job, brought to a real server in the same order, make the same updates."""
    policy = policy_of(store_type, num_workers=12, **options)
    order: list[int] = []
    updates: list[Apply] = []

    def note(worker: int, actions: Sequence[Action]) -> None:
        order.append(worker)
        updates.extend(one for one in actions if isinstance(one, Apply))

    watch(monkeypatch, note)
    simulate(CLASSES, SimulatedTraining(policy, batch=8, seconds=20))
    job = OneProcess("a" * 12)
    stores = job.stores(policy)
    for store in stores:
        store.set_optimizer("add")
        store.init("w", torch.zeros(12))
    for worker in order:
        stores[worker].samples = 8.0
        stores[worker].push("w", torch.nn.functional.one_hot(torch.tensor(worker), 12).float())
        job.deliver_all()
    stats = stores[0].stats()
    ages = [one.staleness for one in updates]
    assert stats["updates"] == len(updates)
    assert dict(stats["staleness"]) == {age: ages.count(age) for age in set(ages)}
    if policy.merge != "groups" and policy.bound is None:  # else worker 0 reads older values, or waits
        out, expected = torch.empty(12), torch.zeros(12)
        for one in updates:
            expected += one.weight * torch.bincount(torch.tensor(one.workers), minlength=12)
        stores[0].pull("w", out)
        torch.testing.assert_close(out, expected)
