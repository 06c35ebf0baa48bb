"""Groups of workers of like speed.

Speeds are compared by their logarithm, because noise and differences are ratios. Ward's agglomerative clustering gives
the initial centres of k-means; the number of groups is the one with the highest Calinski-Harabasz score. Groups
whose speeds differ by less than :data:`ALIKE` are never separated, so machines that are alike form one group.

Every machine counts as two points, a little faster and a little slower than it is. This is the resolution: without it
the score is undefined when each machine is a group or when machines of a group have identical speeds, and rises
without end when a group of nearly identical machines is cut further.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingExtraError

Groups = tuple[tuple[int, ...], ...]

#: Machines whose speeds differ by less than this factor are alike: waiting for each other costs less than staleness.
ALIKE = 1.25

#: More groups than this are not tried.
MAX_GROUPS = 8

_Points = NDArray[np.float64]


def group_by_speed(seconds: Sequence[float], alike: float = ALIKE, max_groups: int = MAX_GROUPS) -> Groups:
    """Return groups of workers of like speed, the fastest first.

    Args:
        seconds: time of a step of the same work, per worker in order of rank.
        alike: smallest ratio of the typical speeds of two neighbouring groups.
        max_groups: largest number of groups.

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
