"""The choice of ``dist_auto`` is repeated while the job trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.consistency import Policy
from paceline.hetero import Choice, Measured, Revision, Speed, StepNoise, StepTime, choose, free_policy
from paceline.hetero.step_noise import Counted

BATCH = 32

#: A straggler, and so no lock step; then steps so short that the servers' optimizer is what all wait for.
STRAGGLER, SHORT = (0.6, 0.6, 0.6, 4.8), (0.02, 0.05, 0.02, 0.05)
ALONE, BY_SPEED = ((0,), (1,), (2,), (3,)), ((0, 2), (1, 3))


def machines(*seconds: float, **more: object) -> Measured:
    speeds = tuple(Speed(0.2 * one, 0.8 * one / BATCH) for one in seconds)
    given = {"workers": speeds, "batch": BATCH, "noise": StepNoise(0.1), "exchange_s": 0.04, "update_s": 0.02} | more
    return Measured(**given)  # type: ignore[arg-type]


def revision(*seconds: float, is_free: bool = True, **more: object) -> Revision:
    measured = machines(*seconds, **more)
    return Revision(choose(measured), measured, is_free)


def check(one: Revision, seconds: Sequence[float], times: int = 2) -> list[str]:
    steps = {rank: StepTime(BATCH, time) for rank, time in enumerate(seconds)}
    return [one.check(steps) for _ in range(times)]


def test_free_job_goes_from_dist_async_to_groups_and_back() -> None:
    one = revision(*STRAGGLER)
    assert check(one, STRAGGLER, 5) == [""] * 5
    assert one.groups == ALONE
    first, second = check(one, SHORT)
    assert first == "", "once proves nothing"
    assert second.startswith("dist_gsync with groups 0 2, 1 3 from now on: steps take 0.02 to 0.05 s now, jitter 10%; ")
    assert "with dist_async with a pool of samples" in second
    assert (one.groups, one.changes) == (BY_SPEED, 1)
    assert check(one, STRAGGLER)[1].startswith("dist_async with a pool of samples from now on")
    assert (one.groups, one.changes) == (ALONE, 2)


def test_free_job_goes_into_lock_step_of_all_and_back() -> None:
    one = revision(*STRAGGLER, update_s=0.04)
    assert check(one, [0.01] * 4)[1].startswith("lock step on the servers from now on")
    assert one.groups == ((0, 1, 2, 3),)
    assert check(one, STRAGGLER)[1].startswith("dist_async")


def test_other_way_must_be_found_in_two_checks_in_a_row() -> None:
    one = revision(*STRAGGLER)
    for _ in range(5):
        assert check(one, SHORT, 1) == [""]
        assert check(one, STRAGGLER, 1) == [""]
    assert one.changes == 0


def test_workers_that_change_their_speeds_change_their_groups() -> None:
    measured = machines(*SHORT)
    policy = Policy("groups", ((0, 1), (2, 3)), lr_scale="sample")
    one = Revision(Choice("dist_gsync", policy, "pool", ""), measured, True)
    assert "dist_gsync with groups 0 2, 1 3 from now on" in check(one, SHORT)[1]


def test_smaller_batches_are_no_change_of_speed() -> None:
    one = revision(*STRAGGLER)
    steps = {rank: StepTime(8, 0.4 * time) for rank, time in enumerate(STRAGGLER)}
    assert [one.check(steps) for _ in range(3)] == [""] * 3


def test_worker_that_has_left_is_left_out() -> None:
    one = revision(*STRAGGLER)
    check(one, SHORT)
    for _ in range(3):
        assert one.check({rank: StepTime(BATCH, SHORT[rank]) for rank in (1, 2, 3)}) == ""
    assert (one.groups, one.changes) == (((2,), (1, 3)), 1)
    one = revision(0.1)
    assert one.check({0: StepTime(BATCH, 0.01)}) == ""


def test_fixed_job_is_advised_once_and_as_long_as_it_is_true() -> None:
    one = revision(1.0, 1.0, 1.0, 1.0, is_free=False)
    assert check(one, [1.0] * 4) == ["", ""]
    said = check(one, STRAGGLER, 4)
    assert [bool(text) for text in said] == [False, True, False, False]
    assert said[1] == one.advice
    assert said[1].startswith("dist_async with a pool of samples would be 475% better: steps take 0.6 to 4.8 s now")
    assert said[1].endswith("with dist_sync with equal batches. It takes a new start, from a checkpoint")
    check(one, [1.0] * 4, 1)
    assert one.advice == ""
    assert check(one, STRAGGLER) == ["", ""], "said already"
    assert one.advice
    assert (one.groups, one.changes) == ((), 0)


@pytest.mark.parametrize(
    ("choice", "now"),
    [
        (Choice("dist_sync", Policy(), "measured", ""), "dist_sync with batches by speed"),
        (Choice("dist_ksync", Policy("first", first=2), "pool", ""), "dist_ksync with K = 2 and a pool of samples"),
        (Choice("dist_gsync", Policy("groups", ((0, 1, 2, 3),)), "pool", ""), "dist_sync with equal batches"),
    ],
)
def test_advice_compares_with_what_the_job_does(choice: Choice, now: str) -> None:
    one = Revision(choice, machines(*STRAGGLER, update_s=0.0), False)
    found = check(one, STRAGGLER)[1] if choice.policy.merge != "first" else check(one, [1.0] * 4)[1]
    assert choice.policy.merge == "first" or f"samples/s with {now}." in found


def test_free_job_is_advised_what_it_cannot_take() -> None:
    one = revision(*STRAGGLER)
    texts = check(one, SHORT, 4)
    assert one.groups == BY_SPEED
    assert sum("dist_ksync with K = 2 and a pool of samples would be" in text for text in texts) == 1
    assert "against 1946 samples/s (stale ones count 0.92) with dist_gsync with groups 0 2, 1 3" in one.advice


def test_form_of_a_policy_in_which_groups_can_change() -> None:
    each = Policy("each", lr_scale="sample", weighting="inverse")
    assert free_policy(each, 2) == dataclasses.replace(each, merge="groups", groups=((0,), (1,)))
    for policy in (Policy(), Policy("groups", ((0, 1),)), Policy("each", bound=1), Policy("each", age=3)):
        assert free_policy(policy, 2) == policy


def test_spikes_that_begin_end_lock_step() -> None:
    one = revision(0.1, 0.1, 0.1, 0.1, is_free=False, update_s=0.0, exchange_s=0.0)
    few, many = (Counted(175, spikes, 8.0, 0.1) for spikes in (1, 9))
    for counted in (few, many):
        steps = {rank: StepTime(BATCH, 0.1, counted) for rank in range(4)}
        said = [one.check(steps) for _ in range(2)]
        assert bool(said[1]) == (counted is many)
    assert said[1].startswith("dist_async with a pool of samples would be ")
    assert "s now, jitter 10%, 5.1% of steps take 8 times as long; forecast" in said[1]


def test_noise_changes_nothing() -> None:
    """A few checks; ``docs/unequal.md`` has the rate of false alarms in 100,000."""
    rng = np.random.default_rng(0)
    for seconds in (STRAGGLER, SHORT, (0.1, 0.1, 0.2, 0.2)):
        one = revision(*seconds)
        steps = rng.lognormal(0, 0.1, (4, 100)) * np.array(seconds)[:, None]
        said = [check(one, np.median(steps[:, begin : begin + 25], axis=1).tolist(), 1)[0] for begin in range(0, 75, 5)]
        assert not any(said)
