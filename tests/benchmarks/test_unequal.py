"""The benchmark of unequal machines: its figures, its ledger, and one small job of real processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.unequal import auto, picture, shares
from benchmarks.unequal.accept import Comparison, checks, compared, measured_service, predicted_ratio
from benchmarks.unequal.columns import Column, Rates, equal_mass
from benchmarks.unequal.losing import regimes
from benchmarks.unequal.modes import CLASSES, MODES, Machines
from benchmarks.unequal.real import run_once
from benchmarks.unequal.report import Findings, as_json, markdown
from benchmarks.unequal.simulated import Service, climb, run
from benchmarks.unequal.trial import TARGET, Ledger, Outcome, Trial
from paceline.consistency import Policy
from paceline.hetero import Choice


def outcome(slowness: float = 1.0, batches: float = 10.0, mass: float = 5.0, last: float = 0.96) -> Outcome:
    """A curve that rises evenly to ``last`` within ten seconds times ``slowness``, and stays there."""
    curve = tuple((slowness * second, last * min(1.0, second / 10)) for second in range(16))
    return Outcome(15 * slowness, batches, 32 * batches, 1.0, mass, curve, exchange_ms=3.0, server_ms=1.0)


def column(**slowness: float) -> Column:
    return {mode: [outcome(slowness.get(mode, 1.0))] for mode in MODES}


@pytest.mark.parametrize("first", [0.05, 0.4, 3.2])
def test_climb_ends_at_a_rate_that_is_better_than_both_neighbours(first: float) -> None:
    tried: list[float] = []

    def score(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / 0.4))

    assert climb(first, score) == pytest.approx(0.4)
    assert min(abs(one - 0.2) for one in tried) < 1e-9
    assert min(abs(one - 0.8) for one in tried) < 1e-9
    assert len(tried) == len(set(tried)), "no rate is tried twice"


def test_time_to_an_accuracy_lies_between_evaluations() -> None:
    """Means of three lag by one evaluation: at 9.5 s they are where the curve was at 8.5 s."""
    assert outcome().reached_s(0.96 * 0.85) == pytest.approx(9.5)
    assert outcome().reached_s(0.97) == math.inf
    assert outcome(2.0).reached_s(0.5) == pytest.approx(2 * outcome().reached_s(0.5))
    assert outcome().final == pytest.approx(0.96)


def test_jobs_that_were_run_are_known_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    first, second = Trial("BSP", 0.1, 0, 5.0), Trial("BSP", 0.2, 0, 5.0)
    Ledger(path).add(first, outcome())
    Ledger(path).add(second, outcome(2.0))
    path.write_text(path.read_text()[:-40])
    again = Ledger(path)
    assert again.get(first) == outcome()
    assert again.get(second) is None


def test_checks_are_of_the_right_modes() -> None:
    assert predicted_ratio() == pytest.approx(3.0)
    fast = {"GSP 1/Y +shares": 0.6, "GSP +shares": 0.7, "LB-BSP": 0.5}
    found = {
        one.what: one for one in checks(column(**{"GSP 1/Y": 1 / 3.2}), column(**fast), column(**{"GSP 1/Y": 1 / 2.5}))
    }
    assert not found["batches/s, GSP 1/Y over BSP"].passed
    same = "same rate, GSP 1/Y sooner than BSP, "
    assert found[same + "by step mass"].figure == found[same + "simulated"].figure == pytest.approx(3.2)
    assert found[same + "by step mass"].passed
    assert not found[same + "simulated"].passed, "the simulator says 2.5"
    assert found["own rates, GSP 1/Y +shares sooner than BSP"].passed
    assert not found["own rates, GSP +shares sooner than BSP"].passed
    assert found["own rates, LB-BSP sooner than BSP"].figure == pytest.approx(2.0)
    worse = column() | {"LB-BSP": [outcome(last=0.95)]}
    assert [one.what for one in checks(column(), worse, column()) if "accuracy" in one.what and not one.passed] == [
        "final accuracy, LB-BSP less BSP, points"
    ]


def test_simulator_is_compared_by_throughput_and_by_curve() -> None:
    [same] = compared({"BSP": [outcome()]}, {"BSP": [outcome()]})
    assert (same.batches, same.curve, same.passed) == (1.0, pytest.approx(1.0), True)
    [slow] = compared({"BSP": [outcome()]}, {"BSP": [outcome(1.2)]})
    assert slow.curve == pytest.approx(1.2)
    assert not slow.passed


def test_rates_of_equal_step_mass_divide_by_what_each_mode_steps() -> None:
    own = column() | {"ASP": [outcome(mass=100.0)]}
    rates = equal_mass(own, dict.fromkeys(MODES, 0.8))
    assert rates["BSP"] == 0.8
    assert rates["ASP"] == pytest.approx(0.04)


def test_service_times_are_those_of_pushes_alone_and_together() -> None:
    own = column()
    own["ASP"] = [Outcome(1, 1, 1, 1, 1, (), exchange_ms=5.0, server_ms=2.0)]
    own["BSP"] = [Outcome(1, 1, 1, 1, 1, (), exchange_ms=300.0, server_ms=1.5)]
    assert measured_service(own) == Service(pytest.approx(0.0015), 0.0015, pytest.approx(0.0005))


def test_wrong_groups_have_workers_of_all_classes() -> None:
    machines = Machines(4)
    workers = regimes(machines, Service())["wrong groups"].workers
    assert sorted(one.speed.seconds(32) for one in workers) == sorted(one.seconds(32) for one in machines.speeds)
    assert all(len({workers[rank].speed for rank in group}) == len(CLASSES) for group in machines.groups)


def test_report_and_picture_have_every_mode(tmp_path: Path) -> None:
    own = column()
    own["ASP"] = [outcome(last=0.5)]  # never at the target
    rates = dict.fromkeys(MODES, Rates(0.4, 0.8, 0.2))
    comparison = [Comparison("BSP", 1.0, 1.0, math.inf)]
    losing = {"alike": {"BSP": 1.0, "ASP": 0.5}}
    found = Findings(0.2, rates, own, own, own, own, Service(), checks(own, own, own), comparison, losing, ["job 7"])
    text = markdown(found, "today", "picture.png")
    assert all(f"| {mode} |" in text for mode in MODES)
    assert "| ASP | - | - | - |" in text
    assert "Rejected jobs: 1." in text
    assert json.loads(json.dumps(as_json(found), allow_nan=False))["seconds"]["own"]["ASP"] is None
    picture.write(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_real_workers_take_the_time_of_their_classes() -> None:
    """Three workers, two seconds: none is faster than its class, and all that they push is updated."""
    trial = Trial("GSP 1/Y +shares", 0.4, 0, 2.0, to_target=False, per_class=1)
    real, simulated = run_once(trial), run(trial, Service())
    assert real.seconds >= 2.0
    assert real.batches_per_s < 1.3 * sum(1 / seconds for seconds in CLASSES)
    assert real.curve[0][1] == pytest.approx(simulated.curve[0][1], abs=1e-6), "the same first weights and test samples"
    assert real.curve[-1][0] <= real.seconds
    assert real.mass_per_s == pytest.approx(simulated.mass_per_s, rel=0.5), "whatever the rate"
    assert real.gradient_ms > 0
    assert real.server_ms > 0
    assert real.reached_s(TARGET) == math.inf


# ---- dist_auto -------------------------------------------------------------------------------------------------------


def test_choice_has_a_name_among_the_modes() -> None:
    pooled = Choice("dist_async", Policy("each", lr_scale="sample"), "pool", "")
    assert auto.mode_of(pooled) == "ASP +pool"
    assert auto.mode_of(replace(pooled, policy=Policy("each", weighting="inverse"))) == "ASP 1/Y +pool"
    assert auto.mode_of(Choice("dist_sync", Policy("all"), "measured", "")) == "LB-BSP"
    with pytest.raises(LookupError, match="none of BSP"):
        auto.mode_of(replace(pooled, shares="equal", store_type="dist_ksync"))


def test_row_tells_the_best_mode_and_how_much_better_it_is() -> None:
    row = auto.Row("alike", "BSP", "", {"BSP": 12.0, "ASP": 10.0}, {"BSP": 1.0, "ASP": 1.2})
    assert row.line == "| alike | BSP | 12.0 | 1.20 (ASP) | ASP 10.0 |"


def test_kinds_of_machines() -> None:
    assert Machines().groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert Machines(kind="alike").groups == (tuple(range(12)),)
    straggler = Machines(kind="straggler")
    assert straggler.groups == (tuple(range(11)), (11,))
    assert straggler.speeds[11].seconds(32) == pytest.approx(8 * 0.15)


def test_shares_are_compared_with_what_the_workers_own_times_allow() -> None:
    usual, slower = (shares.speeds(one) for one in shares.SLOWER)
    assert [shares.allowed(usual, False), shares.allowed(slower, False)] == [pytest.approx(933.3, abs=0.1), 800]
    assert shares.allowed(usual, True) == pytest.approx(400)
    assert [shares.whole(usual, False), shares.whole(slower, False)] == pytest.approx([914.3, 800], abs=0.1)
    assert shares.allowed(shares.speeds(shares.SLOWER[0], 2), True) == pytest.approx(200), "three of the six"


def test_rate_of_shares_leaves_the_beginning_out_and_tells_computation_from_the_rest() -> None:
    slow_start = [(at, at + 0.5, 10, 0.1) for at in (0.0, 0.5, 1.0)]
    steady = [(1.5 + 0.125 * number, 1.625 + 0.125 * number, 10, 0.1) for number in range(20)]
    found = shares.rate_of([slow_start + steady, slow_start + steady])
    assert found.samples_per_s == pytest.approx(160)
    assert (found.longest_ms, found.beyond_ms) == (pytest.approx(100), pytest.approx(25))


def test_rate_of_shares_tells_the_wait_for_the_answer_from_the_queue_for_cores() -> None:
    """The answer comes 5 ms after the last gradient, and the second worker goes on 15 ms after the first."""
    first = [(0.12 * number, 0.12 * number + 0.105, 10, 0.1) for number in range(20)]
    second = [(0.12 * number, 0.12 * number + 0.12, 10, 0.06) for number in range(20)]
    found = shares.rate_of([first, second])
    assert (found.answer_ms, found.queue_ms) == (pytest.approx(5), pytest.approx(15))
