"""What a program may do again and again leaves nothing in any process."""

from __future__ import annotations

from pathlib import Path

from paceline.testing import LocalJob
from tests.soak.repetitions import left_by
from tests.soak.uses import memory_of_a_closed_store


def test_repetitions_leave_nothing(tmp_path: Path) -> None:
    left = {(use, who): what for use, more in left_by(40, tmp_path) for who, what in more.items() if what}
    assert left == {}


def test_memory_of_a_closed_store_is_free_at_once() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(memory_of_a_closed_store) == [[False, False]]
