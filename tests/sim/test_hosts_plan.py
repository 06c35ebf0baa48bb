"""Which hosts a job is worth having, and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.hetero import WorkerRound
from paceline.hetero.files import Report
from paceline.sim.hosts_plan import HostPlanner, Links

ROUNDS = 20


def report(
    seconds: Sequence[float],
    round_s: float,
    *,
    samples: Sequence[float] | None = None,
    elements: int = 1000,
    store: str = "dist_sync",
) -> Report:
    """Return rounds of one worker on each host; in lock step each waits until the round ends."""
    samples = samples or [32.0] * len(seconds)
    steps = tuple(
        (WorkerRound(batch, one, max(0.0, round_s - one)),) * ROUNDS
        for one, batch in zip(seconds, samples, strict=True)
    )
    return Report(tuple(f"h{rank}:0" for rank in range(len(seconds))), steps, 0.0, elements, store)


def links(rates: Sequence[float], trip_s: float = 1e-4) -> Links:
    """Return the links between hosts each of which has a rate."""
    count = range(len(rates))
    pairs = [(one, other) for one in count for other in count if one < other]
    return {(f"h{one}", f"h{other}"): (min(rates[one], rates[other]), trip_s) for one, other in pairs}


def planner(found: Report, rates: Sequence[float] = (), hosts: Sequence[str] = ()) -> HostPlanner:
    return HostPlanner(found, hosts or [one.partition(":")[0] for one in found.names], links(rates))


def test_plan_of_the_measured_job_is_what_was_measured() -> None:
    one = planner(report([0.2, 0.25, 0.3], 0.37, elements=100_000), [1e7] * 3)
    job = one.job(one.names, 3)
    assert job.samples_per_s == pytest.approx(3 * 32 / 0.37)
    assert (job.round_s, job.compute_s, job.slowest) == (pytest.approx(0.37), pytest.approx(0.3), "h2")


def test_host_that_makes_the_job_slower_is_left_out_with_what_it_costs() -> None:
    plan = planner(report([0.1, 0.1, 0.1, 1.0], 1.0), [1e9] * 4).plan()
    assert plan.job.hosts == ("h0", "h1", "h2")
    assert plan.left_out == ("h3",)
    assert plan.job.samples_per_s == pytest.approx(3 * 32 / 0.1, rel=0.02)
    assert plan.adds["h3"] == pytest.approx(4 * 32 / 1.0 - 3 * 32 / 0.1, rel=0.02)
    assert all(plan.adds[name] == pytest.approx(32 / 0.1, rel=0.02) for name in plan.job.hosts)


def test_two_slow_hosts_are_left_out_together_although_one_of_them_alone_would_not_help() -> None:
    plan = planner(report([0.1, 0.1, 0.1, 0.1, 0.5, 0.5], 0.5), [1e9] * 6).plan()
    assert plan.left_out == ("h4", "h5")


def test_every_host_stays_if_that_is_asked_for() -> None:
    plan = planner(report([0.1, 0.1, 1.0], 1.0), [1e9] * 3).plan(keep_all=True)
    assert plan.left_out == ()
    assert plan.adds["h2"] < 0


def test_plan_of_a_job_that_was_measured_in_turn_is_that_measurement_and_corrects_forecasts_like_it() -> None:
    one = planner(report([0.1, 0.1, 0.1, 1.0], 1.0), [1e9] * 4)
    three = one.plan().job
    assert not one.knows(three)
    one.learn(planner(report([0.15, 0.15, 0.15], 0.2), [1e9] * 3))
    plan = one.plan()
    assert one.knows(plan.job)
    assert plan.job.samples_per_s == pytest.approx(3 * 32 / 0.2)
    assert (plan.job.round_s, plan.job.compute_s) == (pytest.approx(0.2), pytest.approx(0.15))
    part = plan.job.samples_per_s / three.samples_per_s
    assert one.job(["h0", "h1"], 2).samples_per_s == pytest.approx(part * 2 * 32 / 0.1, rel=0.02)
    assert one.job(one.names, 4).samples_per_s == pytest.approx(4 * 32), "it was measured before"


def test_measured_job_may_have_fewer_servers_than_hosts() -> None:
    found = report([0.1, 0.1], 0.3, elements=1_000_000)
    one = HostPlanner(found, ["h0", "h1"], links([1e7] * 2), servers=1)
    assert one.measured_job.servers == 1
    assert one.measured_job.samples_per_s == pytest.approx(2 * 32 / 0.3)


def test_plan_of_known_jobs_only_is_the_fastest_of_them() -> None:
    one = planner(report([0.1, 0.1, 0.2], 0.2), [1e9] * 3)
    one.learn(planner(report([0.2, 0.2], 0.2), [1e9] * 2))
    assert one.plan(only_known=True).left_out == ()


def test_hosts_that_are_alike_all_stay() -> None:
    plan = planner(report([0.1] * 4, 0.12), [1e9] * 4).plan()
    assert len(plan.job.hosts) == 4
    assert plan.left_out == ()
    assert sum(plan.adds.values()) == pytest.approx(plan.job.samples_per_s, rel=0.2)


def test_one_server_takes_as_long_as_its_link_does_for_the_pushes_of_all_others() -> None:
    """4 MB of each of three others, each way, through one link of 100 MB/s; with four servers 3 MB each way."""
    one = planner(report([0.1] * 4, 0.2, elements=1_000_000), [1e8] * 4)
    assert one.job(one.names, 4).round_s == pytest.approx(0.2)
    assert one.job(one.names, 1).round_s == pytest.approx(0.2 + 0.24 - 0.06, rel=0.01)
    assert one.best(one.names).servers == 4


def test_servers_are_on_the_hosts_with_the_fastest_links() -> None:
    one = planner(report([0.1] * 4, 6.1, elements=1_000_000), [2e6, 2e6, 1e9, 1e9])
    assert one.job(["h2", "h0", "h1", "h3"], 1).round_s < one.job(["h0", "h1", "h2", "h3"], 1).round_s
    best = one.best(one.names)
    assert best.round_s <= one.job(one.names, 4).round_s
    assert best.servers == 4 or set(best.hosts[: best.servers]) <= {"h2", "h3"}


def test_host_whose_link_costs_more_than_it_computes_is_left_out() -> None:
    """Half a second on the slow link each way, against steps of 0.1 s."""
    plan = planner(report([0.1, 0.1, 0.1, 0.1], 6.2, elements=1_000_000), [1e8, 1e8, 1e8, 2e6]).plan()
    assert plan.left_out == ("h3",)


def test_servers_stay_on_all_hosts_where_nothing_is_gained_by_moving_them() -> None:
    plan = planner(report([0.1] * 3, 0.12), [1e9] * 3).plan()
    assert (plan.job.hosts, plan.job.servers) == (("h0", "h1", "h2"), 3)


def test_shares_that_are_measured_keep_their_global_batch_when_a_host_leaves() -> None:
    one = planner(report([0.3, 0.3], 0.3, samples=[64.0, 32.0]), [1e9] * 2)
    assert one.is_uneven
    assert one.parts([0]) == {0: 96.0}
    assert one.job(["h0"], 1).samples_per_s == pytest.approx(64 / 0.3, rel=0.05)
    assert one.plan().left_out == ()


def test_workers_that_do_not_wait_add_what_they_train_on() -> None:
    found = Report(
        ("h0:0", "h1:0"),
        ((WorkerRound(32, 0.1, 0.02),) * ROUNDS, (WorkerRound(32, 1.0, 0.02),) * ROUNDS),
        0.0,
        1000,
        "dist_async",
    )
    plan = planner(found, [1e9] * 2).plan()
    assert plan.left_out == ()
    assert plan.adds == pytest.approx({"h0": 32 / 0.12, "h1": 32 / 1.02})
    assert plan.job.round_s == 0


def test_bounded_staleness_goes_at_the_pace_of_the_slowest() -> None:
    one = planner(report([0.1, 0.4], 0.5, store="dist_ssync"), [1e9] * 2)
    assert one.job(one.names, 2).samples_per_s == pytest.approx(64 / 0.5)


def test_lock_step_on_unlike_hosts_is_told_of_a_faster_way() -> None:
    better = planner(report([0.1, 0.1, 0.15, 0.15], 0.17), [1e9] * 4).plan(keep_all=True).better
    assert better is not None
    assert better.samples_per_s > 1.1 * 4 * 32 / 0.17


def test_hosts_that_are_alike_are_told_of_no_other_way() -> None:
    assert planner(report([0.1] * 4, 0.101), [1e9] * 4).plan().better is None


def test_dist_auto_is_planned_as_it_will_choose() -> None:
    job = planner(report([0.1, 0.3], 0.31, store="dist_auto"), [1e9] * 2).plan(keep_all=True).job
    assert job.words
    assert job.samples_per_s > 1.1 * 2 * 32 / 0.31


def test_hosts_behind_slow_links_are_advised_to_take_local_steps() -> None:
    slow = planner(report([0.1, 0.2], 2.0, elements=1_000_000), [2e6, 2e6])
    local = slow.local(slow.measured_job)
    assert local is not None
    assert (local.codec, local.steps) == ("int8", 16)
    quick = planner(report([0.1, 0.2], 0.203), [1e9, 1e9])
    assert quick.local(quick.measured_job) is None
    free = planner(report([0.1, 0.2], 2.0, elements=1_000_000, store="dist_async"), [2e6, 2e6])
    assert free.local(free.measured_job) is None


def test_workers_of_one_host_share_its_link_and_leave_together() -> None:
    found = report([0.1, 1.0, 0.1, 1.0], 1.0)
    one = planner(found, [1e9] * 2, hosts=["h0", "h1", "h0", "h1"])
    assert one.ranks_of("h1") == [1, 3]
    assert one.alone("h0") == pytest.approx(640)
    assert one.plan().left_out == ("h1",)


def test_one_host_needs_no_links() -> None:
    plan = planner(report([0.2], 0.21)).plan()
    assert plan.job.samples_per_s == pytest.approx(32 / 0.21)
    assert plan.adds == {"h0": pytest.approx(32 / 0.21)}


def test_one_long_round_does_not_count() -> None:
    found = report([0.2], 0.2)
    steps = (*found.steps[0][:-1], WorkerRound(32, 5.0, 0.0))
    one = planner(Report(found.names, (steps,), 0.0, 1000, "dist_sync"))
    assert one.measured_round_s == pytest.approx(0.2)


def test_links_that_were_not_measured_are_as_fast_as_their_ends() -> None:
    found = report([0.1] * 3, 0.2)
    one = HostPlanner(found, ["h0", "h1", "h2"], {("h0", "h1"): (1e7, 1e-4), ("h1", "h2"): (1e8, 1e-4)})
    assert one.link("h2") == 1e8
    assert one.job(["h0", "h2"], 1).round_s > 0
