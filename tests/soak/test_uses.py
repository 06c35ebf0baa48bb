"""What a program may do again and again leaves nothing in any process."""

from __future__ import annotations

from pathlib import Path

from paceline.testing import LocalJob
from tests.soak.census import Census, grown
from tests.soak.job import SoakJob
from tests.soak.uses import USES, memory_of_a_closed_store, repeat

#: Repetitions before the first count, and between the two counts. The first fill what is bounded.
TIMES = dict.fromkeys(USES, (40, 400)) | {"barriers": (300, 3000), "lists": (600, 1000), "reconnects": (40, 300)}


def counted(job: SoakJob) -> dict[str, Census]:
    """Return what every process holds when all workers have come to the next count."""
    found = {one.name: one.heard(170.0) for one in job.workers} | job.census()
    for one in job.workers:
        one.tell("go on")
    return found


def test_repetitions_leave_nothing(tmp_path: Path) -> None:
    left = {}
    with SoakJob(["shm", "tcp"], 2, tmp_path, encrypt=False, check_rules=False) as job:
        workers = job.start_all(repeat, TIMES)
        for name, (_, times) in TIMES.items():
            before, after = counted(job), counted(job)
            for who in before:
                more = grown(before[who], after[who], times // 10)
                opened = after[who]["descriptors"] - before[who]["descriptors"]
                if more or opened > 0:
                    left[name, who] = more | {"descriptors": opened}
        for one in workers:
            one.result(60.0)
    assert left == {}


def test_memory_of_a_closed_store_is_free_at_once() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(memory_of_a_closed_store) == [[False, False]]
