"""Workers whose share other processes have taken: measured shares follow speeds, so no other worker waits. Pure.

A machine needs no more time for fewer samples. So a worker whose own time of a round is as long as before, with far
fewer samples, has become slower, whatever part of its time does not depend on samples. Waits for a processor are named
as the cause if no other part has grown as much. They count for each second on a processor: workers with more samples
wait longer for theirs. Other causes show before shares follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from paceline.observe.account import WAIT, WORKER_PARTS
from paceline.observe.causes import ALONE, WORTH, WORTH_S, Cause
from paceline.observe.history import KEPT_WAITING, OUT_OF_QUOTA, PARTS, Means, Round, means_of

#: Windows that tell the present, and windows before them at least.
LAST, BEFORE = 4, 6

#: A share that is at most this part of what it was is far smaller; own time that is at least this part is as long.
LOST, AS_LONG = 0.6, 0.95

_GROWING = (*(part for part in range(len(WORKER_PARTS)) if part != WAIT), KEPT_WAITING, OUT_OF_QUOTA)


def past_of(rounds: Sequence[Round]) -> Means | None:
    """Return the means of a worker's windows in which it was quick, before the present ones; None: they are too few."""
    before = sorted(rounds[:-LAST], key=lambda one: one.own_s / max(one.samples, 1.0))
    return means_of(before[: (len(before) + 1) // 2]) if len(before) >= BEFORE else None


def of_lost_share(before: Means, rounds: Sequence[Round], others: Means) -> Cause | None:
    """Return that waits for a processor have taken a worker's share; None: it has its share, or they are not longer."""
    now, few = means_of(rounds[-LAST:]), LOST * before.samples
    if not few or now.samples > few or now.own_s < AS_LONG * before.own_s:
        return None
    grown = {part: now.parts[part] - before.parts[part] for part in _GROWING}
    part = max(grown, key=grown.__getitem__)
    if part != KEPT_WAITING or grown[part] < max(WORTH * now.own_s, WORTH_S):
        return None
    if _waits(now) < ALONE * max(_waits(before), _waits(others)):
        return None  # its host has too much to do for all
    lost = list(takewhile(lambda one: one.samples <= few, reversed(rounds)))
    since = (lost or rounds)[-1].round
    excess_s = now.own_s - before.own_s * now.samples / before.samples
    return Cause(PARTS[part], part, since, excess_s, before.own_s / before.samples)


def _waits(means: Means) -> float:
    """Return the seconds of waits for each second on a processor."""
    return means.parts[KEPT_WAITING] / max(means.busy_s, WORTH_S)
