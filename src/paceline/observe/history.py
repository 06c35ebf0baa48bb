"""A worker's last rounds, their usual times, and the times that a worker's are compared with. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul

from paceline.observe.account import BUSY, INTERVAL, QUEUED, THROTTLED, WAIT, WORKER_PARTS

#: Parts that are compared: those of a step, each less the time for which the thread was kept from running in it, and
#: that time: it was ready to run and other threads ran, or the CPU quota was used up.
PARTS = (*WORKER_PARTS, "busy", "throttled")
KEPT_WAITING, OUT_OF_QUOTA = len(WORKER_PARTS), len(WORKER_PARTS) + 1

#: Windows whose median is the usual time, windows over which rare pauses are counted, and windows of figures of hosts.
USUAL, LONG, FIGURES_KEPT = 15, 40, 16

#: Seconds below which no excess is worth a word.
LEAST_S = 0.002

#: Factor of a job's rate from which it is worth a word.
WORTH_GAIN = 1.1

#: Standard deviation of a logarithm that is taken for the least: clocks and counters are no better.
_LEAST_NOISE = 0.06

_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Round:
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


@dataclass
class History:
    """A worker's last windows, and its usual times."""

    rank: int
    host: str
    group: int = 0
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=LONG))
    hosts: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=FIGURES_KEPT))
    late: deque[tuple[int, int, float, int]] = field(default_factory=lambda: deque(maxlen=LONG))
    """By report of a server: cohorts, those to which it came last, seconds after the others, and ``windows`` then."""
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

    def add(self, rounds: Sequence[Round]) -> None:
        """Take the windows of a heartbeat, and work out usual times and noise."""
        self.rounds.extend(rounds)
        self.windows += len(rounds)
        last = list(self.rounds)[-USUAL:]
        self.typical_s = middle([one.own_s for one in last])
        floor = floor_of(self.typical_s)
        columns = list(zip(*(one.parts for one in last), strict=True))
        self.usual = [middle(column) for column in columns]
        every = zip(*(one.parts for one in self.rounds), strict=True)
        self.noise = [_spread(column, usual, floor) for column, usual in zip(every, self.usual, strict=True)]
        self.recent = [sum(column[-2:]) / len(column[-2:]) for column in columns]


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
    noise: Sequence[float]
    own_s: float
    samples: float
    slowest_s: float
    """Own time of the slowest of the others."""
    alone: bool
    rounds: Sequence[Sequence[Round]]
    """The windows behind them, those of each worker."""

    def means(self, seconds: float) -> Means:
        """Return the means over the last so many seconds, or over the last two windows if these are longer.

        Those of several workers are medians. Of the worker's own past they are over all of it.
        """
        if self.alone:
            return _medians(self.rounds)
        pairs = zip(
            _medians([_within(list(one), seconds) for one in self.rounds]).columns,
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
    columns = zip(*(means_of(list(one)).columns for one in rounds), strict=True)
    return Means.of([middle(column) for column in columns])


def means_of(rounds: Sequence[Round]) -> Means:
    """Return the means of some windows, of which there is at least one."""
    weights = [one.weight for one in rounds]
    columns = zip(*((*one.parts, one.own_s, one.wall_s, one.busy_s, one.samples) for one in rounds), strict=True)
    return Means.of([sum(map(mul, column, weights)) / sum(weights) for column in columns])


def _within(rounds: Sequence[Round], seconds: float) -> Sequence[Round]:
    """Return the last windows that took so many seconds, the first one of them whole."""
    first = len(rounds)
    while first and seconds > 0:
        first -= 1
        seconds -= rounds[first].wall_s * rounds[first].weight
    return rounds[first:]


def mean_round(
    round: int,
    rounds: int,
    samples: float,
    seconds: Sequence[float],
    figures: Sequence[Sequence[int]] = (),
    beat: int = 0,
) -> Round:
    """Return the mean round of a window.

    Args:
        round: the first one.
        rounds: how many.
        samples: behind them.
        seconds: by part, of all of them.
        figures: figures of the host, from the time of the window. They are known for longer times only, and count for
            each part as much as it lasts, but the thread has not been kept from running while it ran.
        beat: number of the heartbeat.
    """
    means = [one / rounds for one in seconds]
    wall_s = sum(means)
    own_s = wall_s - means[WAIT]
    busy_s = min(own_s, share_of(figures, BUSY) * wall_s)
    idle_s = own_s - busy_s
    quota_s = min(idle_s, share_of(figures, THROTTLED) * wall_s)
    queued_s = max(
        0.0, min(idle_s, share_of(figures, QUEUED) * wall_s) - quota_s
    )  # a thread without quota is ready, too
    ran = 1 - (quota_s + queued_s) / own_s if own_s else 1.0
    parts = [one if part == WAIT else one * ran for part, one in enumerate(means)]
    return Round(
        round, samples / rounds, tuple(means), (*parts, queued_s, quota_s), own_s, wall_s, busy_s, rounds, beat
    )


def middle(values: Sequence[float]) -> float:
    """Return the median; ``statistics.median`` takes several times as long."""
    found, middle = sorted(values), len(values) // 2
    return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2


def _spread(values: Sequence[float], usual: float, floor: float) -> float:
    """Return the standard deviation of logarithms around the usual value, from their median absolute deviation."""
    if max(values) < floor / 20:
        return 0.0
    return _MAD * middle([abs(math.log((one + floor) / (usual + floor))) for one in values])


def floor_of(own_s: float) -> float:
    """Return the seconds below which a part is not worth comparing."""
    return max(LEAST_S, 0.05 * own_s)


def _noise(found: float, samples: int) -> float:
    """Return a standard deviation that few samples do not make too small."""
    return max(_LEAST_NOISE, found) * (1 + 4 / samples)


def of_others(others: Sequence[History]) -> Reference:
    """Return the usual times of several workers."""
    parts = range(len(PARTS))
    count = sum(min(USUAL, len(one.rounds)) for one in others)
    return Reference(
        # When all become slower at once, the last windows tell.
        [
            max(middle([one.usual[part] for one in others]), middle([one.recent[part] for one in others]))
            for part in parts
        ],
        [_noise(middle([one.noise[part] for one in others]), count) for part in parts],
        middle([one.typical_s for one in others]),
        middle([one.rounds[-1].samples for one in others]),
        max(one.typical_s for one in others),
        alone=False,
        rounds=[one.rounds for one in others],
    )


def of_past(worker: History, past: Sequence[Round]) -> Reference:
    """Return the usual times of a worker's earlier rounds."""
    before = History(worker.rank, worker.host)
    before.add(past)
    own_s = before.typical_s
    noise = [_noise(one, len(past)) for one in before.noise]
    return Reference(before.usual, noise, own_s, past[-1].samples, own_s, True, [before.rounds])


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


def rate_of(worker: History) -> float:
    """Return a worker's samples per second."""
    last = list(worker.rounds)[-USUAL:]
    wall_s = sum(one.wall_s * one.weight for one in last)
    return sum(one.samples * one.weight for one in last) / wall_s if wall_s else 0.0


def share_of(figures: Iterable[Sequence[int]], figure: int) -> float:
    """Return a figure as a part of the time."""
    found = list(figures)
    interval = sum(one[INTERVAL] for one in found)
    return sum(one[figure] for one in found) / interval if interval else 0.0
