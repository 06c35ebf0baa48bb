"""Files of speeds, groups and data sharding.

A speeds file has a line per worker in order of rank: its name (a rank, a host or ``host:slot``) and the seconds that a
step of the same work takes it. Blank lines and what follows ``#`` do not count::

    node1:0   0.060
    node1:1   0.062
    node2:0   0.240
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from paceline.hetero.groups import Groups


def parse_speeds(text: str) -> dict[str, float]:
    """Return the seconds per step by the worker's name, in order of rank.

    Raises:
        ValueError: a line is not a name and a positive number, a name occurs twice, or there are none.
    """
    speeds: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not _is_time(words[1]):
            raise ValueError(f"line {number}: {line.strip()!r} is not 'NAME SECONDS', as in 'node1:0 0.25'")
        if words[0] in speeds:
            raise ValueError(f"line {number}: {words[0]!r} occurs twice; name workers by rank or host:slot")
        speeds[words[0]] = float(words[1])
    if not speeds:
        raise ValueError("there are no lines 'NAME SECONDS'")
    return speeds


def _is_time(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def groups_text(groups: Groups, speeds: Mapping[str, float]) -> str:
    """Return a groups file: one group per line, the fastest first, with its mean time as a comment."""
    names, times = list(speeds), list(speeds.values())
    lines = []
    for group in groups:
        mean = sum(times[rank] for rank in group) / len(group)
        lines.append(f"{' '.join(names[rank] for rank in group)}  # {mean:.4g} s per step\n")
    return "".join(lines)


def sharding_text(seconds: Sequence[float]) -> str:
    """Return a data sharding file: "begin end" for each rank, parts of the data in proportion to speed."""
    total = sum(1 / one for one in seconds)
    ends = [sum(1 / one for one in seconds[: rank + 1]) / total for rank in range(len(seconds) - 1)]
    bounds = [0.0, *(round(end, 6) for end in ends), 1.0]
    return "".join(f"{begin:.6g} {end:.6g}\n" for begin, end in pairwise(bounds))
