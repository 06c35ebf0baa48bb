"""Which cause explains the excess of a slow worker, and by how much of it. Pure.

The excess is the time of a worker's rounds less that of the others' in the same seconds. Means are compared, so pauses
count that only some rounds have. It is divided among the parts:

| time | counts for |
|---|---|
| in a part of a step, less the time for which the thread was kept from running | that part |
| waits for processors of as much computation as the others have | other processes on its processors |
| waits for processors of computation beyond that | the part that has grown most: without it there were none |
| without quota | the CPU quota |

The largest one is the cause. One that explains less than half of the excess is none, and neither is one that is not
longer than the waits for processors beside it: more rounds will tell.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from paceline.observe.account import FAULTS, GC, INTERVAL, REREAD, STALLED, STOLEN, WAIT, WORKER_PARTS
from paceline.observe.history import (
    KEPT_WAITING,
    LEAST_S,
    ON_WAY,
    OUT_OF_QUOTA,
    PARTS,
    History,
    LateReport,
    Means,
    Round,
    floor_of,
    means_of,
    middle,
    share_of,
    some,
)

#: An excess worth a word: this part of a worker's round, and so many seconds.
WORTH, WORTH_S = 0.1, LEAST_S

#: Part of an excess that its cause explains at least.
MOST_OF_IT = 0.5

#: A wait for processors, or a rate of page faults, that is this multiple of the others' is the worker's own; the first
#: one in :data:`MANY` windows and all of so many heartbeats, and in fewer if it is the second multiple.
ALONE, ALONE_EARLY, MANY, BEATS = 3.0, 10.0, 8, 2

#: Page faults, or pages read again, in a second that explain a long part; page faults that do where waits for memory
#: take this part of the time.
FAULTY, FAULTY_IF_SHORT, STALLING = 200, 8, 0.03

#: Cohorts that tell how late the last worker usually comes, and the most that each later one counts for being later.
_COHORTS, _MOST_SURPRISE = 12, 2.0

_OWN = tuple(part for part in range(len(WORKER_PARTS)) if part != WAIT)


@dataclass(frozen=True)
class Cause:
    """Why a worker is slow.

    Attributes:
        name: one of :data:`paceline.observe.verdicts.CAUSES`.
        part: the part of its steps; -1: none.
        since: the first round.
        excess_s: seconds of a mean round that it explains.
        sample_s: its own seconds for a sample before, where these tell; 0: the others' rounds do.
    """

    name: str
    part: int
    since: int
    excess_s: float
    sample_s: float = 0.0


def main_of(causes: Iterable[Cause | None]) -> Cause | None:
    """Return the cause that explains most."""
    return max((one for one in causes if one is not None), key=lambda one: one.excess_s, default=None)


def of_own_time(
    worker: History, others: Sequence[History], rounds: Sequence[Round], usual: Means, long: Collection[int]
) -> Cause | None:
    """Return why a worker's own time is longer; None: it is not, or no cause explains most of it.
    ``rounds`` are its last ones since it is slow, ``long`` the parts that are longer again and again.
    """
    own = means_of(rounds)
    whole_s, fair_s = own.own_s - usual.own_s, _fair_waits_s(own, usual)
    part, excess_s = _largest(own, usual, fair_s)
    if part not in (*long, GC):
        return None
    if whole_s < WORTH * usual.own_s or excess_s < max(WORTH * own.own_s, WORTH_S, MOST_OF_IT * whole_s):
        return None
    # The others' threads and locks of this process wait for processors, too; a collection is its thread's alone.
    if part not in (KEPT_WAITING, OUT_OF_QUOTA, GC) and excess_s < max(fair_s, usual.parts[KEPT_WAITING]):
        return None
    since = _onset(rounds, part, (usual.parts[part] + own.parts[part]) / 2)
    if part == KEPT_WAITING:
        name = "busy" if _is_alone_in_queues(worker, others, rounds) else ""
    elif part in (OUT_OF_QUOTA, GC):
        name = PARTS[part]
    else:
        last = [one for one in rounds if one.round >= since]
        recent = means_of(last)
        share = max(excess_s / own.wall_s, (recent.parts[part] - usual.parts[part]) / recent.wall_s)
        host = _host_cause(worker, others, share, sum(one.wall_s * one.weight for one in last))
        name = _part_or_batch(worker, own, usual, part) if host is None else host
    return Cause(name, part, since, excess_s) if name else None


def is_usual_excess(rounds: Sequence[Round], part: int, usual: Means) -> bool:
    """Tell whether the usual one of some rounds has most of the excess of a part, and not a long one among them."""
    excess_s = means_of(rounds).parts[part] - usual.parts[part]
    return middle([one.parts[part] for one in rounds]) - usual.parts[part] > MOST_OF_IT * excess_s


def of_way(rounds: Sequence[Round], usual: Means, others_s: float) -> Cause | None:
    """Return that requests and answers of a worker are on the way for longer, and that it comes later for it.

    Waits for a processor may delay each message, too, and are no part of the way. ``others_s`` is the own time of the
    others that go on without it, or that wait for it last.
    """
    own = means_of(rounds)
    way_s, usual_s = own.parts[ON_WAY], usual.parts[ON_WAY]
    excess_s = min(way_s - usual_s, own.own_s + way_s - others_s - usual_s)
    queued_s = max(own.parts[KEPT_WAITING], usual.parts[KEPT_WAITING])
    if excess_s < max(WORTH * own.wall_s, WORTH_S, queued_s):
        return None
    return Cause("link", -1, _onset(rounds, ON_WAY, (usual_s + way_s) / 2), excess_s)


def of_waits(rounds: Sequence[Round], usual: Means | None) -> Cause | None:
    """Return that a worker's answers take longer, where it waits for no other worker; None: they do not, or it does.

    Rounds of workers that wait for each other all take as long, but for one that the slowest has not told yet.
    """
    others = sorted(rounds, key=lambda one: one.wall_s)[:-1]
    if usual is None or not others:
        return None
    own = means_of(others)
    excess_s = min(own.parts[WAIT] - usual.parts[WAIT], own.wall_s - usual.wall_s)
    if excess_s < max(WORTH * own.wall_s, WORTH_S):
        return None
    return Cause("link", WAIT, _onset(rounds, WAIT, (usual.parts[WAIT] + own.parts[WAIT]) / 2), excess_s)


def surprise(share: float, usual: float) -> float:
    """Return by how much each trial makes it unlikelier that chance alone gives this share, in nats (Chernoff)."""
    rest = (1 - share) * math.log((1 - share) / (1 - usual)) if share < 1 else 0.0
    return share * math.log(share / usual) + rest


def surprise_of(late_s: float, before: Sequence[LateReport]) -> float:
    """Return the same for a mean of so many seconds after the others, by those of the cohorts before (exponential)."""
    cohorts = sum(one.cohorts for one in before)
    if cohorts < _COHORTS:
        return 0.0
    ratio = late_s / max(LEAST_S, sum(one.group_s for one in before) / cohorts)
    return min(_MOST_SURPRISE, ratio - 1 - math.log(ratio)) if ratio > 1 else 0.0


def _fair_waits_s(own: Means, usual: Means) -> float:
    """Return the waits for processors of a worker if it had as much to compute as the others."""
    floor = floor_of(usual.own_s)
    return own.parts[KEPT_WAITING] * min(1.0, (usual.busy_s + floor) / (own.busy_s + floor))


def _largest(own: Means, usual: Means, fair_s: float) -> tuple[int, float]:
    """Return the part with the largest excess, and the excess."""
    excess = {part: own.parts[part] - usual.parts[part] for part in (*_OWN, OUT_OF_QUOTA)}
    mine, theirs = _with_waits(own), _with_waits(usual)
    excess[max(_OWN, key=lambda part: mine[part] - theirs[part])] += own.parts[KEPT_WAITING] - fair_s
    excess[KEPT_WAITING] = fair_s - usual.parts[KEPT_WAITING]
    return max(excess.items(), key=lambda one: one[1])


def _with_waits(means: Means) -> list[float]:
    """Return the parts of a step as the clock has them, with the time for which the thread was kept from running."""
    ran_s = means.own_s - means.parts[KEPT_WAITING] - means.parts[OUT_OF_QUOTA]
    return [one * means.own_s / ran_s if ran_s > 0 else one for one in means.parts]


def _onset(rounds: Sequence[Round], part: int, least_s: float) -> int:
    """Return the first round from which on a part is longer than so many seconds, in most rounds or now and then."""
    found, most, more = rounds[-1].round, 0, 0
    for one in reversed(rounds):
        more += 1 if one.parts[part] > least_s else -1
        if more > most:
            found, most = one.round, more
    return found if part != GC else next((one.round for one in rounds if one.parts[part] > least_s), found)


def _part_or_batch(worker: History, own: Means, usual: Means, part: int) -> str:
    """Return the name of a part, or that it is as long as a batch lets expect with which it was never shorter."""
    expected = usual.parts[part] * own.samples / usual.samples if usual.samples else 0.0
    if own.samples <= 1.1 * usual.samples or own.parts[part] >= 1.25 * expected:
        return PARTS[part]
    alike = [one.parts[part] for one in worker.rounds if one.samples > 0.9 * own.samples]
    short = sum(one < (usual.parts[part] + own.parts[part]) / 2 for one in alike)
    return "batch" if 4 * short < len(alike) else PARTS[part]


def _is_alone_in_queues(worker: History, others: Iterable[History], last: Sequence[Round]) -> bool:
    """Tell whether a worker waits for processors far longer than every other one on its host, and most elsewhere.

    A host that has too much to do for all of its workers makes now this one, now that one wait longest.
    """

    def recent(one: History) -> float:
        return middle([round.parts[KEPT_WAITING] for round in one.rounds][-len(last) :])

    waits = [(one.host, max(one.usual[KEPT_WAITING], recent(one))) for one in others if one.usual]
    beside = [wait_s for host, wait_s in waits if host == worker.host]
    usual_s = max([middle([wait_s for _, wait_s in waits] or [0.0]), *beside])
    alone = takewhile(lambda one: one.parts[KEPT_WAITING] > ALONE * usual_s, reversed(worker.rounds))
    is_long = len(last) >= MANY and len({one.beat for one in alone}) >= BEATS
    return recent(worker) > (ALONE if is_long else ALONE_EARLY) * usual_s


def _host_cause(worker: History, others: Sequence[History], share: float, seconds: float) -> str | None:
    """Return the figure of the host that explains most of an excess, which is this share of the last seconds.

    Empty: it does, but as much for the other workers. None: no figure does.
    """
    beside = some(others)

    def of(one: History, figure: int) -> float:
        return share_of(_last(one.hosts, seconds), figure)

    def explains(figure: int) -> bool | None:
        """Tell whether a figure of this worker only explains the excess; None: one of all workers."""
        found, theirs = of(worker, figure), of_others(figure)
        return found - theirs > 0.4 * share or (None if found > 0.4 * share else False)

    def of_others(figure: int) -> float:
        return middle([of(one, figure) for one in beside] or [0.0])

    is_short = of(worker, STALLED) > STALLING  # of memory, or others of its host are: its page faults tell
    for figure, few in ((FAULTS, FAULTY_IF_SHORT if is_short else FAULTY), (REREAD, FAULTY)):
        if 1e6 * of(worker, figure) > ALONE * 1e6 * of_others(figure) + few:
            return "memory"
    found = {"memory": explains(STALLED), "stolen": explains(STOLEN)}
    if True in found.values():
        return next(cause for cause, is_own in found.items() if is_own)
    return "" if None in found.values() else None


def _last(figures: Sequence[Sequence[int]], seconds: float) -> Sequence[Sequence[int]]:
    """Return the last figures that are of so many seconds, the first one of them whole."""
    first = len(figures)
    while first and seconds > 0:
        first -= 1
        seconds -= 1e-6 * figures[first][INTERVAL]
    return list(figures)[first:]


# ---- shares that other processes have taken --------------------------------------------------------------------------
#
# Measured shares follow speeds, so no other worker waits.
# A machine needs no more time for fewer samples. So a worker whose own time of a round is as long as before, with far
# fewer samples, has become slower, whatever part of its time does not depend on samples. Waits for a processor are
# named as the cause if no other part has grown as much. They count for each second on a processor: workers with more
# samples wait longer for theirs. Other causes show before shares follow.

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
