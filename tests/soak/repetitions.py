"""A job whose workers do one thing after the other, each many times; what every process holds more of after that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.soak.census import Census, grown
from tests.soak.job import SoakJob
from tests.soak.uses import USES, repeat

#: Repetitions that fill what is bounded, where that takes more than a few.
_WARM_UP = {"lists": 300, "barriers": 50}


def left_by(times: int, folder: Path) -> Iterator[tuple[str, dict[str, Mapping[str, int]]]]:
    """Do all that a program may repeat so many times; yield its name and what each process holds more of.

    Descriptors must not grow at all, other counts by less than one in three repetitions.
    """
    counts = {name: (_WARM_UP.get(name, 10), times) for name in USES}
    with SoakJob(["shm", "tcp"], 2, folder, encrypt=False, check_rules=False) as job:
        job.start_all(repeat, counts)
        for name in counts:
            before, after = _counted(job), _counted(job)
            yield name, {who: _more(before[who], after[who], times // 3) for who in before}
        for one in job.workers:
            one.result(60.0)


def _more(before: Census, after: Census, most: int) -> Mapping[str, int]:
    opened = after["descriptors"] - before["descriptors"]
    return grown(before, after, most) | ({"descriptors": opened} if opened > 0 else {})


def _counted(job: SoakJob) -> dict[str, Census]:
    """Return what every process holds when all workers have come to the next count."""
    found = {one.name: one.heard(590.0) for one in job.workers} | job.census()
    for one in job.workers:
        one.tell("go on")
    return found
