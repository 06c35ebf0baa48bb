"""How ranks find rank 0: the file of those of one host, and the address in a store where anybody can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paceline.collectives import rendezvous
from paceline.collectives.environment import ProcessPlace
from paceline.config import Settings
from paceline.errors import AuthenticationError, ConfigError, LaunchError
from paceline.net.security import Security, new_job_key


def test_file_is_removed_unless_another_job_has_written_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = ProcessPlace(0, 2, 2, "a job")
    first, second = (
        rendezvous.CoordinatorAddress(f"tcp://127.0.0.1:{port}", Security(new_job_key())) for port in (1, 2)
    )
    rendezvous.publish(place, Settings(), first)
    path = rendezvous.meeting_file(place)
    assert path.stat().st_mode & 0o077 == 0
    rendezvous.publish(place, Settings(), second)
    rendezvous.withdraw(place, first)
    assert next(rendezvous.candidates(place, Settings(start_timeout_s=1))).address == second.address
    rendezvous.withdraw(place, second)
    rendezvous.withdraw(place, second)
    assert list(path.parent.iterdir()) == []


def test_rank_0_that_did_not_answer_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = ProcessPlace(0, 2, 2, "a job")
    meeting = rendezvous.CoordinatorAddress("ipc://@busy", Security(new_job_key()))
    rendezvous.publish(place, Settings(), meeting)
    found = rendezvous.candidates(place, Settings(start_timeout_s=60))
    assert [next(found).address, next(found).address] == [meeting.address] * 2


def test_folder_that_is_a_link_of_somebody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path(tmp_path, f"paceline-hvd-{os.geteuid()}").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LaunchError, match=r"is not a folder that only you can use; .* set TMPDIR"):
        rendezvous.private_folder()


def test_an_address_in_a_store_counts_if_a_holder_of_the_key_has_put_it_there_for_this_job() -> None:
    place, other_job = ProcessPlace(1, 2, 1, "a job"), ProcessPlace(1, 2, 1, "another job")
    security = Security(new_job_key())
    meeting = rendezvous.CoordinatorAddress("tcp://10.0.0.1:4711", security)
    sealed = rendezvous._sealed(place, meeting).encode()
    assert b"10.0.0.1" not in sealed
    assert rendezvous._opened(place, sealed, security) == meeting
    changed = sealed[:20] + (b"A" if sealed[20:21] != b"A" else b"B") + sealed[21:]
    for where, text, key in (
        (place, b"tcp://10.6.6.6:4711", security),
        (place, changed, security),
        (place, b"", security),
        (place, sealed, Security(new_job_key())),
        (other_job, sealed, security),
    ):
        with pytest.raises(AuthenticationError, match="does not hold this job's key"):
            rendezvous._opened(where, text, key)
    open_to_all = rendezvous.CoordinatorAddress("tcp://10.0.0.1:4711", Security(""))
    assert rendezvous._opened(place, rendezvous._sealed(place, open_to_all).encode(), Security("")) == open_to_all


@pytest.mark.parametrize("port", ["", "many"])
def test_a_port_that_is_no_number_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR and MASTER_PORT, a number; .*{port!r}"):
        next(rendezvous.candidates(ProcessPlace(1, 2, 1, "a job"), Settings(job_key=new_job_key())))
