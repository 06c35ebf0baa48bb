"""What a program may do again and again leaves nothing in any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.testing import LocalJob
from tests.soak.census import grown
from tests.soak.job import SoakJob
from tests.soak.uses import USES, memory_of_a_closed_store, repeat

#: Repetitions before the first count, and between the two counts.
TIMES = dict.fromkeys(USES, (40, 400)) | {"barriers": (300, 5000), "lists": (600, 2000), "reconnects": (40, 300)}


@pytest.mark.parametrize("name", USES)
def test_repetitions_leave_nothing(name: str, tmp_path: Path) -> None:
    times = TIMES[name]
    with SoakJob(["shm", "tcp"], 2, tmp_path, encrypt=False, check_rules=False) as job:
        workers = job.start_all(repeat, name, times)
        counts = []
        for _ in times:
            counted = {one.name: one.heard(170.0) for one in workers}
            counts.append(counted | job.census())
            for one in workers:
                one.tell("go on")
        for one in workers:
            one.result(60.0)
    more = {who: grown(counts[0][who], counts[1][who], times[1] // 10) for who in counts[0]}
    assert {who: what for who, what in more.items() if what} == {}
    for who in counts[0]:
        assert counts[1][who]["descriptors"] <= counts[0][who]["descriptors"], who


def test_memory_of_a_closed_store_is_free_at_once() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(memory_of_a_closed_store) == [[False, False]]
