"""The file by which the ranks of one host meet."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from paceline.config import Settings
from paceline.hvd import rendezvous
from paceline.hvd.place import Place
from paceline.transport.security import Security, new_job_key


def test_file_is_removed_unless_another_job_has_written_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = Place(0, 2, 2, "a job")
    first, second = (rendezvous.Meeting(f"tcp://127.0.0.1:{port}", Security(new_job_key())) for port in (1, 2))
    rendezvous.publish(place, Settings(), first)
    path = rendezvous.meeting_file(place)
    assert path.stat().st_mode & 0o077 == 0
    rendezvous.publish(place, Settings(), second)
    rendezvous.withdraw(place, first)
    assert next(rendezvous.candidates(place, Settings(start_timeout_s=1))).address == second.address
    rendezvous.withdraw(place, second)
    rendezvous.withdraw(place, second)
    assert list(path.parent.iterdir()) == []
