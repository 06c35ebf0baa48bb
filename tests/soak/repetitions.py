"""A job whose workers do one thing after the other, each many times; what every process holds more of after that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.soak.census import Census, grown
from tests.soak.job import START_TIMEOUT_S, SoakJob
from tests.soak.uses import USES, repeat

#: Repetitions that fill what is bounded, where that takes more than a few.
_WARM_UP = {"lists": 300, "barriers": 50}

#: By name of a use: what each process holds more of.
Left = Iterator[tuple[str, dict[str, Mapping[str, int]]]]


#: By name of a use: how often to do it before the first count, and between the two.
Counts = Mapping[str, tuple[int, int]]


def counts(times: int, warm_up: Mapping[str, int] = _WARM_UP) -> dict[str, tuple[int, int]]:
    """Return how often to do each use."""
    return {name: (warm_up.get(name, 10), times) for name in USES}


def left_by(times: int, folder: Path) -> Left:
    """Do all that a program may repeat so many times, in a job of its own; yield what that left."""
    with SoakJob(["shm", "tcp"], 2, folder, encrypt=False, check_rules=False, start_timeout_s=START_TIMEOUT_S) as job:
        wanted = counts(times)
        job.start_all(repeat, wanted)
        yield from left_in(job, wanted)
        for one in job.workers:
            one.result(60.0)


def left_in(job: SoakJob, wanted: Counts) -> Left:
    """Count while the workers of a job repeat; yield what that left.

    Descriptors must not grow at all, other counts by less than one in two repetitions: some uses alternate.
    """
    for name, (_, times) in wanted.items():
        before, after = _counted(job), _counted(job)
        yield name, {who: _more(before[who], after[who], times // 2 - 1) for who in before}


def _more(before: Census, after: Census, most: int) -> Mapping[str, int]:
    opened = after["descriptors"] - before["descriptors"]
    return grown(before, after, most) | ({"descriptors": opened} if opened > 0 else {})


def _counted(job: SoakJob) -> dict[str, Census]:
    """Return what every process holds when all workers have come to the next count."""
    found = {one.name: one.heard(590.0) for one in job.workers} | job.census()
    for one in job.workers:
        one.tell("go on")
    return found
