"""A worker's last rounds, their usual times, and the times that a worker's are compared with. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple, TypeVar

from paceline.observe.account import BUSY, INTERVAL, QUEUED, STOPPED, THROTTLED, WAIT, WORKER_PARTS, Steps

#: Parts that are compared: those of a step, each less the time for which the thread was kept from running in it, and
#: that time: it was ready to run and other threads ran, or the CPU quota was used up. And of its waits, the time in
#: which a request or its answer was on the way.
PARTS = (*WORKER_PARTS, "busy", "throttled", "link")
KEPT_WAITING, OUT_OF_QUOTA, ON_WAY = range(len(WORKER_PARTS), len(PARTS))

#: Windows whose median is the usual time, windows over which rare pauses are counted, and windows of figures of hosts.
USUAL, LONG, FIGURES_KEPT = 15, 40, 16

#: The noise is worked out again when one of so many windows is new.
NOISE_SHARE = 8

#: Workers whose windows are looked at one by one, of those that one is compared with.
SOME = 15

#: Seconds below which no excess is worth a word.
LEAST_S = 0.002

#: Factor of a job's rate from which it is worth a word.
WORTH_GAIN = 1.1

#: Standard deviation of a logarithm that is taken for the least: clocks and counters are no better.
_LEAST_NOISE = 0.06

#: Standard deviation that counts as much as so many samples: those of a few rounds may be alike by chance.
_GUESS, _GUESSES = 0.3, 20

_MAD = 1.4826

Kind = TypeVar("Kind")

#: Length of :attr:`History.figures`.
_FIGURES = 3 * len(PARTS) + 3


class Round(NamedTuple):
    """A mean round of a window. ``seconds`` are those of :data:`WORKER_PARTS`, ``parts`` those of :data:`PARTS`."""

    round: int
    samples: float
    seconds: Sequence[float]
    parts: Sequence[float]
    own_s: float
    wall_s: float
    busy_s: float
    """Time for which the thread that trains has run."""
    weight: int
    beat: int = 0
    """Number of the heartbeat that told it, among those of all workers."""


class HostShares(NamedTuple):
    """Figures of a host, as parts of the time."""

    busy: float = 0.0
    stopped: float = 0.0
    throttled: float = 0.0
    queued: float = 0.0

    @classmethod
    def of(cls, figures: Sequence[Sequence[int]]) -> HostShares:
        """Return them from figures of the host."""
        return cls(*(share_of(figures, one) for one in (BUSY, STOPPED, THROTTLED, QUEUED))) if figures else cls()


class LateReport(NamedTuple):
    """A server's report of the workers of one group that came last, as one of them has it.

    Attributes:
        cohorts: number of cohorts of the group.
        times: cohorts to which this worker came last.
        seconds: time by which it came after the others, in these.
        group_s: the same of all workers of the group.
        windows: number of windows that this worker had told then.
    """

    cohorts: int
    times: int
    seconds: float
    group_s: float
    windows: int


@dataclass
class History:
    """A worker's last windows, and its usual times."""

    rank: int
    host: str
    group: int = 0
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=LONG))
    hosts: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=FIGURES_KEPT))
    late: deque[LateReport] = field(default_factory=lambda: deque(maxlen=LONG))
    """By report of a server."""
    punctual: int = 0
    """Reports since it came last."""
    windows: int = 0
    """Windows so far."""
    usual: list[float] = field(default_factory=list)
    """Median of each part over the last windows."""
    noise: list[float] = field(default_factory=list)
    """Standard deviation of the logarithm of each part."""
    recent: list[float] = field(default_factory=list)
    """Mean of each part in the last two windows."""
    typical_s: float = 0.0
    """Median of its own time."""
    rate: float = 0.0
    """Samples per second in the last windows."""
    settled: int = 0
    """Calls of :meth:`add` since the noise was worked out."""
    figures: Sequence[float] = ()
    """``usual``, ``recent``, ``noise``, ``typical_s``, samples of the last round, and number of windows."""
    ranking: Ranking | None = field(default=None, repr=False, compare=False)
    """The workers that it is compared with."""

    def add(self, windows: Sequence[Round]) -> None:
        """Take the windows of a heartbeat, and work out usual times and noise once for all of them."""
        self.rounds.extend(windows)
        self.windows += len(windows)
        rounds = list(self.rounds)
        last = rounds[-USUAL:]
        self.typical_s = middle([one.own_s for one in last])
        columns = list(zip(*[one.parts for one in last], strict=True))
        self.usual = [middle(column) if any(column) else 0.0 for column in columns]
        self.recent = [(one + other) / 2 for one, other in zip(last[-1].parts, last[-2:][0].parts, strict=True)]
        wall_s = sum([one.wall_s * one.weight for one in last])
        self.rate = sum([one.samples * one.weight for one in last]) / wall_s if wall_s else 0.0
        self.settled += 1
        if self.settled > len(rounds) // NOISE_SHARE or not self.noise:
            self.settled = 0
            self.noise = self._noise(rounds)
        self._rank([*self.usual, *self.recent, *self.noise, self.typical_s, last[-1].samples, len(rounds)])

    def _noise(self, rounds: Sequence[Round]) -> list[float]:
        floor, columns = floor_of(self.typical_s), zip(*[one.parts for one in rounds], strict=True)
        return [_spread(column, usual, floor) for column, usual in zip(columns, self.usual, strict=True)]

    def _rank(self, figures: Sequence[float]) -> None:
        before, self.figures = self.figures, figures
        if self.ranking is not None:
            self.ranking.change(before, figures)


@dataclass(frozen=True)
class Means:
    """Means of some rounds: of all :data:`PARTS`, of the times of a :class:`Round`, and of the samples."""

    parts: Sequence[float]
    own_s: float
    wall_s: float
    busy_s: float
    samples: float

    @classmethod
    def of(cls, columns: Sequence[float]) -> Means:
        """Return them from their :attr:`columns`."""
        return cls(columns[:-4], *columns[-4:])

    @property
    def columns(self) -> list[float]:
        """All of them."""
        return [*self.parts, self.own_s, self.wall_s, self.busy_s, self.samples]


@dataclass(frozen=True)
class Reference:
    """The times that a worker's are compared with, by part."""

    usual: Sequence[float]
    spreads: Sequence[float]
    """Standard deviations of the logarithms, as they were found."""
    count: int
    """Windows behind them."""
    doubt: float
    """Standard deviations by which the usual times themselves may be too short."""
    own_s: float
    samples: float
    slowest_s: float
    """Own time of the slowest of the others."""
    alone: bool
    behind: Iterable[History] = field(compare=False)
    """The workers whose times they are, and maybe one more."""
    without: History | None = field(default=None, compare=False)
    """That one."""

    def noise(self, part: int) -> float:
        """Return the standard deviation of the logarithm of a part, which few windows do not make too small."""
        return _noise(self.spreads[part], self.count)

    @property
    def rounds(self) -> list[deque[Round]]:
        """The windows behind them, those of each worker; of many workers, those of :data:`SOME`."""
        return [one.rounds for one in some([one for one in self.behind if one is not self.without])]

    def means(self, seconds: float) -> Means:
        """Return the means over the last so many seconds, or over the last two windows if these are longer.

        Those of several workers are medians. Of the worker's own past they are over all of it.
        """
        if self.alone:
            return _medians(self.rounds)
        pairs = zip(
            _medians([_within(one, seconds) for one in self.rounds]).columns,
            _medians([list(one)[-2:] for one in self.rounds]).columns,
            strict=True,
        )
        return Means.of([max(pair) for pair in pairs])

    def means_after(self, beat: int) -> Means | None:
        """Return the means of rounds that began after a heartbeat, for sure; None: most others have told none yet."""
        if self.alone:
            return _medians(self.rounds)
        later = [[one for one in rounds if one.beat > beat] for rounds in self.rounds]
        whole = [[one for one in rounds if one.beat > rounds[0].beat] for rounds in later]
        known = [rounds for rounds in whole if rounds]
        return _medians(known) if 2 * len(known) > len(whole) else None


def _medians(rounds: Iterable[Iterable[Round]]) -> Means:
    """Return the medians of several workers' means."""
    columns = zip(*[_means(list(one)) for one in rounds], strict=True)
    return Means.of([middle(column) if any(column) else 0.0 for column in columns])


def means_of(rounds: Sequence[Round]) -> Means:
    """Return the means of some windows, of which there is at least one."""
    return Means.of(_means(rounds))


def _means(rounds: Sequence[Round]) -> list[float]:
    weights = [one.weight for one in rounds]
    whole = sum(weights)
    columns = zip(*[(*one.parts, one.own_s, one.wall_s, one.busy_s, one.samples) for one in rounds], strict=True)
    return [sum(map(mul, column, weights)) / whole if any(column) else 0.0 for column in columns]


def _within(rounds: deque[Round], seconds: float) -> Sequence[Round]:
    """Return the last windows that took so many seconds, the first one of them whole."""
    found: list[Round] = []
    for one in reversed(rounds):
        if seconds <= 0:
            break
        found.append(one)
        seconds -= one.wall_s * one.weight
    return found[::-1]


def mean_round(steps: Steps, shares: HostShares = HostShares(), beat: int = 0) -> Round:  # noqa: B008 - never changes
    """Return the mean round of a window, which the heartbeat of this number has told.

    Shares of the host are known for longer times only. They count for each part as much as it lasts, but the thread has
    not been kept from running while it ran.
    """
    rounds = steps.rounds
    means = [one / rounds for one in steps.seconds]
    wall_s = sum(means)
    own_s = wall_s - means[WAIT]
    busy_s = min(own_s, shares.busy * wall_s)
    stopped_s = min(own_s - busy_s, shares.stopped * wall_s)
    idle_s = own_s - busy_s - stopped_s
    quota_s = min(idle_s, shares.throttled * wall_s)
    queued_s = max(0.0, min(idle_s, shares.queued * wall_s) - quota_s)  # a thread without quota is ready, too
    ran = 1 - (stopped_s + quota_s + queued_s) / own_s if own_s else 1.0
    parts = [one if part == WAIT else one * ran for part, one in enumerate(means)]
    parts += [queued_s, quota_s, steps.way_s / rounds]
    return Round(steps.round, steps.samples / rounds, tuple(means), tuple(parts), own_s, wall_s, busy_s, rounds, beat)


def some(workers: Sequence[Kind]) -> Sequence[Kind]:
    """Return :data:`SOME` of many workers, whose medians are as good as those of all."""
    return workers if len(workers) <= SOME else [workers[len(workers) * index // SOME] for index in range(SOME)]


def middle(values: Sequence[float]) -> float:
    """Return the median; ``statistics.median`` takes several times as long."""
    found, middle = sorted(values), len(values) // 2
    return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2


def _spread(values: Sequence[float], usual: float, floor: float) -> float:
    """Return the standard deviation of logarithms around the usual value, from their median absolute deviation."""
    if max(values) < floor / 20:
        return 0.0
    base = usual + floor
    around = sorted([(one + floor) / base if one >= usual else base / (one + floor) for one in values])
    low, high = (len(around) - 1) // 2, len(around) // 2
    return _MAD * (math.log(around[low]) + math.log(around[high])) / 2


def floor_of(own_s: float) -> float:
    """Return the seconds below which a part is not worth comparing."""
    return max(LEAST_S, 0.05 * own_s)


def _noise(found: float, samples: int) -> float:
    """Return a standard deviation that few samples do not make too small."""
    known = samples * max(_LEAST_NOISE, found) ** 2 + _GUESSES * _GUESS**2
    return math.sqrt(known / (samples + _GUESSES)) * (1 + 4 / samples)


def _doubt(windows: int) -> float:
    """Return the standard error of a median of so many windows, in standard deviations of one."""
    return math.sqrt(math.pi / 2 / windows)


class Ranking:
    """Workers that are compared, and their figures in order: the medians of all but one of them need no sorting."""

    def __init__(self) -> None:
        self._members: dict[int, History] = {}
        self._columns: list[list[float]] = [[] for _ in range(_FIGURES)]
        self._windows = 0
        """Windows of all of them."""

    @property
    def is_empty(self) -> bool:
        """Whether it ranks nobody."""
        return not self._members

    def has_others(self, one: History) -> bool:
        """Tell whether it ranks a worker beside this one."""
        return len(self._members) > (one.ranking is self)

    def change(self, before: Sequence[float], now: Sequence[float]) -> None:
        """Replace the figures of one worker."""
        self._windows += int(now[-1]) - int(before[-1])
        for column, old, new in zip(self._columns, before, now, strict=True):
            if old != new:
                del column[bisect_left(column, old)]
                insort(column, new)

    def reference(self, of: History) -> Reference:
        """Return the usual times of all its workers but this one."""
        without = of if of.ranking is self else None
        figures = [None] * _FIGURES if without is None else without.figures
        middles = [
            _middle_without(column, one) if column[-1] else 0.0
            for column, one in zip(self._columns, figures, strict=True)
        ]
        usual, recent, noise = (middles[first : first + len(PARTS)] for first in range(0, 3 * len(PARTS), len(PARTS)))
        own_s, samples, _ = middles[3 * len(PARTS) :]
        times = self._columns[-3]
        count = self._windows - (0 if without is None else int(without.figures[-1]))
        slowest_s = times[-2] if without is not None and without.typical_s == times[-1] else times[-1]
        return Reference(
            [max(both) for both in zip(usual, recent, strict=True)],  # if all become slower, the last windows tell
            noise, count, _doubt(min(count, USUAL * (len(self._members) - (without is not None)))),
            own_s, samples, slowest_s, alone=False,
            behind=self._members.values(), without=without,
        )  # fmt: skip

    def add(self, one: History) -> None:
        """Rank one more worker, which no other ranking has."""
        one.ranking, self._members[one.rank] = self, one
        self._windows += int(one.figures[-1])
        for column, value in zip(self._columns, one.figures, strict=True):
            insort(column, value)

    def remove(self, one: History) -> None:
        """Rank a worker no more."""
        one.ranking = None
        del self._members[one.rank]
        self._windows -= int(one.figures[-1])
        for column, value in zip(self._columns, one.figures, strict=True):
            del column[bisect_left(column, value)]


def _middle_without(ordered: Sequence[float], value: float | None) -> float:
    """Return the median of values, without one of them."""
    place, count = (len(ordered), len(ordered)) if value is None else (bisect_left(ordered, value), len(ordered) - 1)
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def of_past(worker: History, past: Sequence[Round]) -> Reference:
    """Return the usual times of a worker's earlier rounds."""
    before = History(worker.rank, worker.host)
    before.add(past)
    own_s = before.typical_s
    doubt = _doubt(min(len(past), USUAL))
    return Reference(before.usual, before.noise, len(past), doubt, own_s, past[-1].samples, own_s, True, [before])


def gain_of(slow: History, own_s: float, team: Iterable[History]) -> float:
    """Return the factor by which workers in lock step are faster with samples by their speed; 0: not worth a word.

    All of them finish together then. The rest of a round, for which even the slowest one waits, stays.

    Args:
        slow: the slow worker.
        own_s: its own time of late.
        team: all workers that wait for each other.
    """
    known = [one for one in team if one.rounds and one.typical_s]
    samples = [one.rounds[-1].samples for one in known]
    times = [own_s if one is slow else one.typical_s for one in known]
    rate = sum(count / seconds for count, seconds in zip(samples, times, strict=True))
    if len(known) < 2 or not rate:
        return 0.0
    rest_s = min(one.usual[WAIT] for one in known)
    gain = (max(times) + rest_s) / (sum(samples) / rate + rest_s)
    return gain if gain >= WORTH_GAIN else 0.0


def share_of(figures: Iterable[Sequence[int]], figure: int) -> float:
    """Return a figure as a part of the time."""
    found = list(figures)
    interval = sum(one[INTERVAL] for one in found)
    return sum(one[figure] for one in found) / interval if interval else 0.0
