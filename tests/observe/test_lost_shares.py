"""A worker that has lost its share of the samples to other processes on its processors."""

from __future__ import annotations

import pytest

from paceline.observe.account import BUSY, COMPUTE, FIGURES, INTERVAL, QUEUED, WAIT, WORKER_PARTS, Steps
from paceline.observe.causes import BEFORE, LAST, of_lost_share, past_of
from paceline.observe.detector import Detector
from paceline.observe.history import HostShares, Round, mean_round, means_of
from paceline.observe.verdicts import sentence

#: Seconds on a processor for a sample.
SAMPLE_S = 0.005

PARTS = len(WORKER_PARTS)


def window(number: int, samples: float, own_s: float, queued_s: float) -> Round:
    parts = [0.0] * PARTS
    parts[COMPUTE] = own_s
    shares = HostShares(busy=samples * SAMPLE_S / own_s, queued=queued_s / own_s)
    return mean_round(Steps(number, 1, samples, parts), shares)


@pytest.mark.parametrize(
    ("samples", "own_s", "queued_s", "others_s", "found"),
    [
        (2, 0.1, 0.07, 0.02, True),
        (2, 0.1, 0.07, 0.4, False),  # the others wait as long for each second on a processor
        (2, 0.1, 0.001, 0.001, False),  # something else has grown
        (2, 0.05, 0.035, 0.02, False),  # fewer samples for another reason: it takes less time for them
        (7, 0.1, 0.07, 0.02, False),  # about its share
    ],
)
def test_lost_share_is_told_where_waits_have_grown_for_one_worker(
    samples: float, own_s: float, queued_s: float, others_s: float, found: bool
) -> None:
    rounds = [window(number, 8, 0.1, 0.01) for number in range(BEFORE)]
    rounds += [window(BEFORE + number, samples, own_s, queued_s) for number in range(LAST)]
    before = past_of(rounds)
    assert before is not None
    cause = of_lost_share(before, rounds, means_of([window(9, 10, 0.5, others_s)]))
    assert (cause is not None) == found
    if cause is not None:
        assert (cause.name, cause.since) == ("busy", BEFORE)
        assert cause.sample_s == pytest.approx(0.1 / 8)


@pytest.mark.parametrize(("had", "has"), [(0.0, 0.0), (8.0, 0.0)])
def test_worker_without_samples_is_no_error(had: float, has: float) -> None:
    def waiting(number: int, samples: float, queued: float) -> Round:
        shares = HostShares(busy=0.1, queued=queued)
        parts = [0.1 if part == COMPUTE else 0.0 for part in range(PARTS)]
        return mean_round(Steps(number, 1, samples, parts), shares)

    rounds = [waiting(number, had, 0.05) for number in range(BEFORE)]
    rounds += [waiting(BEFORE + number, has, 0.8) for number in range(LAST)]
    before = past_of(rounds)
    assert before is not None
    cause = of_lost_share(before, rounds, means_of([waiting(9, 8.0, 0.05)]))
    assert (cause is not None) == (had > 0)


def test_share_is_lost_since_the_last_time_that_the_worker_had_it() -> None:
    rounds = [window(0, 2, 0.1, 0.01), *(window(1 + number, 8, 0.1, 0.01) for number in range(BEFORE))]  # a small batch
    rounds += [window(7 + number, 2, 0.1, 0.07) for number in range(LAST)]
    before = past_of(rounds)
    assert before is not None
    cause = of_lost_share(before, rounds, means_of([window(9, 10, 0.5, 0.02)]))
    assert cause is not None
    assert cause.since == 7


def test_past_is_that_of_quick_windows_and_of_enough_of_them() -> None:
    quick = [window(number, 8, 0.1, 0.01) for number in range(BEFORE)]
    slow = [window(BEFORE + number, 2, 0.1, 0.07) for number in range(BEFORE + LAST)]
    before = past_of(quick + slow)
    assert before is not None
    assert before.samples == 8
    assert past_of(quick) is None


@pytest.mark.parametrize("is_shared", [True, False])
def test_neighbours_of_a_worker_whose_share_follows_are_named(is_shared: bool) -> None:
    detector, said = Detector(), []
    for turn in range(60):
        taken = turn >= 30
        for worker in range(4):
            samples = (2.0 if worker == 1 else 10.0) if taken else 8.0
            busy_s, queued_s = samples * SAMPLE_S, 0.01
            if taken and worker == 1:
                queued_s = 0.05
            parts, figures = [0.0] * PARTS, [0] * len(FIGURES)
            parts[COMPUTE] = busy_s + queued_s
            parts[WAIT] = (0.07 if taken else 0.06) - parts[COMPUTE]
            for figure, seconds in ((INTERVAL, sum(parts)), (BUSY, busy_s), (QUEUED, queued_s)):
                figures[figure] = round(1e7 * seconds)
            windows = [Steps(10 * turn + 1, 10, 10 * samples, [10 * one for one in parts])]
            said += detector.note_worker(worker, "h", windows, figures, is_shared=is_shared)
        detector.note_late([(worker, 10, 0.01) for worker in range(4)])
    assert [(one.rank, one.cause) for one in said] == ([(1, "busy")] if is_shared else [])
    if is_shared:
        text = sentence(said[0])
        assert "takes 4.8 times as long for a sample as before, and has far fewer of them, since round 301: " in text
        assert "other processes on its processors; it costs the job " in text
