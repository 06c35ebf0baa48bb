"""Groups of workers of like speed, and when they change.

Speeds are compared by their logarithm, because noise and differences are ratios. Ward's agglomerative clustering gives
the initial centres of k-means; the number of groups is the one with the highest Calinski-Harabasz score. Groups
whose speeds differ by less than :data:`ALIKE` are never separated, so machines that are alike form one group.

Every machine counts as two points, a little faster and a little slower than it is. This is the resolution: without it
the score is undefined when each machine is a group or when machines of a group have identical speeds, and rises
without end when a group of nearly identical machines is cut further.

Groups are formed anew when speeds drift, and only then:

========  ==============================================  ============================================
state     event                                           becomes
========  ==============================================  ============================================
steady    a check finds the groups in order               steady
steady    a check finds them out of order                 doubtful, with the groups that would be right
doubtful  a check finds the same right groups again       doubtful; after ``PATIENCE`` of them steady, with new groups
doubtful  a check finds other right groups                doubtful, counting from one
doubtful  a check finds the groups in order               steady
any       ``leave(worker)``                               steady; the worker's group shrinks
========  ==============================================  ============================================

*Out of order*: the slowest member of a group takes longer than the fastest by more than :data:`SPREAD`, or two groups
are so close that one would be enough (:data:`CLOSE`). Between these limits and
:data:`ALIKE`, by which groups are formed, lies what noise may do. Noise that passes even these
limits must also lead to other groups, the same ones in ``PATIENCE`` checks.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingExtraError

Groups = tuple[tuple[int, ...], ...]

#: Machines whose speeds differ by less than this factor are alike: waiting for each other costs less than staleness.
ALIKE = 1.25

#: Ratio of the slowest to the fastest member of a group beyond which it is cut, if the clusters say so.
SPREAD = 1.1 * ALIKE

#: Ratio of the typical times of two groups below which they are joined, if the clusters say so.
CLOSE = ALIKE**0.5

#: More groups than this are not tried.
MAX_GROUPS = 8

#: Checks in a row that must find the same other groups.
PATIENCE = 2

_Points = NDArray[np.float64]


def group_by_speed(seconds: Sequence[float], alike: float = ALIKE, max_groups: int = MAX_GROUPS) -> Groups:
    """Return groups of workers of like speed, the fastest first.
    ``seconds`` are those of a step of the same work, in order of rank; ``alike`` is the least ratio of the typical
    speeds of two neighbouring groups.

    Raises:
        ValueError: no workers, or a time that is not positive and finite.
        MissingExtraError: scikit-learn is not installed.
    """
    if not seconds or not all(0 < one < math.inf for one in seconds):
        raise ValueError(f"step times {list(seconds)} cannot be grouped; they must be positive, one per worker")
    points = np.log(np.asarray(seconds, dtype=np.float64))
    best, best_score = np.zeros(len(points), dtype=np.int64), 0.0
    # Neighbouring groups are at least ``alike`` apart, so only so many fit between the fastest and the slowest.
    max_groups = min(max_groups, 1 + int((points.max() - points.min()) / math.log(alike)))
    # A few dozen numbers: threads would cost more than they save, and far more on a host that is busy.
    with _import("threadpoolctl").threadpool_limits(1):
        for k in range(2, min(max_groups, len(set(points))) + 1):
            labels = _cluster(points, k)
            score = _score(points, labels, alike)
            if _is_apart(points, labels, alike) and score > best_score:
                best, best_score = labels, score
    return groups_of(best, points)


def groups_of(labels: NDArray[np.int64], points: _Points) -> Groups:
    """Return the ranks of each label, the group with the smallest mean first."""
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members.sort(key=lambda ranks: float(points[ranks].mean()))
    return tuple(tuple(int(rank) for rank in ranks) for ranks in members)


def _cluster(points: _Points, k: int) -> NDArray[np.int64]:
    cluster = _import("sklearn.cluster")
    column = points[:, None]
    first = cluster.AgglomerativeClustering(n_clusters=k, linkage="ward").fit_predict(column)
    centres = np.array([[points[first == label].mean()] for label in range(k)])
    labels: NDArray[np.int64] = cluster.KMeans(n_clusters=k, init=centres, n_init=1).fit_predict(column)
    return labels


def _score(points: _Points, labels: NDArray[np.int64], alike: float) -> float:
    resolution = math.log(alike) / 4
    doubled = np.concatenate([points - resolution, points + resolution])[:, None]
    return float(_import("sklearn.metrics").calinski_harabasz_score(doubled, np.tile(labels, 2)))


def _is_apart(points: _Points, labels: NDArray[np.int64], alike: float) -> bool:
    centres = sorted(float(np.median(points[labels == label])) for label in np.unique(labels))
    return all(upper - lower >= math.log(alike) for lower, upper in pairwise(centres))


def _import(module: str) -> Any:
    """Return a module of scikit-learn, or of one of its dependencies."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError("groups by speed need scikit-learn: pip install 'paceline[hetero]'") from None


class Doubt:
    """Counts checks in a row that find the same other way."""

    def __init__(self) -> None:
        self._kind: object = None
        self._times = 0

    def is_sure(self, kind: object) -> bool:
        """Note a finding, or None for none; returns whether :data:`PATIENCE` checks in a row have found it."""
        self._times = self._times + 1 if kind == self._kind else 1
        self._kind = kind
        return kind is not None and self._times >= PATIENCE


class Regrouping:
    """The groups of a job, and when to change them."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._doubt = Doubt()

    def check_speeds(self, seconds: Mapping[int, float]) -> bool:
        """Compare measured times with the groups; returns whether the groups have changed."""
        wanted = self._right_groups(seconds) if self._out_of_order(seconds) else self.groups
        kind = _as_sets(wanted)
        if not self._doubt.is_sure(None if kind == _as_sets(self.groups) else kind):
            return False
        self.groups, self._doubt = wanted, Doubt()
        return True

    def leave(self, worker: int) -> None:
        """Forget a worker that has left or died; a group without members disappears."""
        self.groups = of_some(self.groups, {one for group in self.groups for one in group} - {worker})
        self._doubt = Doubt()

    def _out_of_order(self, seconds: Mapping[int, float]) -> bool:
        times = [[seconds[worker] for worker in group] for group in self.groups]
        if any(max(group) > SPREAD * min(group) for group in times):
            return True
        return any(slow < CLOSE * fast for fast, slow in pairwise(sorted(median(group) for group in times)))

    def _right_groups(self, seconds: Mapping[int, float]) -> Groups:
        workers = sorted(seconds)
        found = group_by_speed([seconds[worker] for worker in workers])
        return tuple(tuple(workers[index] for index in group) for group in found)


def of_some(groups: Groups, workers: Collection[int]) -> Groups:
    """Return groups of some of their workers; a group without members disappears."""
    smaller = (tuple(one for one in group if one in workers) for group in groups)
    return tuple(group for group in smaller if group)


def _as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}


def server_speeds(rates: Sequence[float]) -> list[float]:
    """Return relative speeds for the placement of keys; the fastest servers have 1.

    Servers whose rates follow each other within the factor of machines that are alike get one speed, so that noise
    moves no keys. A server that was not measured counts as the fastest.

    Args:
        rates: per server, in any unit; 0: not measured.
    """
    known = sorted((rate for rate in rates if rate > 0), reverse=True)
    speeds: dict[float, float] = {}
    classes: list[list[float]] = []
    for rate in known:
        if classes and classes[-1][-1] / rate < ALIKE:
            classes[-1].append(rate)
        else:
            classes.append([rate])
    means = [math.exp(math.fsum(map(math.log, one)) / len(one)) for one in classes]
    for one, mean in zip(classes, means, strict=True):
        speeds |= dict.fromkeys(one, mean / means[0])
    return [speeds.get(rate, 1.0) for rate in rates]
