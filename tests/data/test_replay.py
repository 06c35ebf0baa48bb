"""The log of a job is written, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Settings
from paceline.data.ledger import DealingLog, epoch_order
from paceline.data.replay import Replay, Step
from paceline.errors import LaunchError
from paceline.observe import ring
from paceline.scheduler.journal import FILE_NAME, Journal
from paceline.wire import messages as m
from paceline.worker.to_tell import ToTell

SETTINGS = Settings(job_id="job", job_key="key")
COLUMNS = {0: (0, 3), 1: (3, 4)}


class Session:
    def __init__(self) -> None:
        self.to_tell = ToTell(lambda: None)

    def told(self) -> list[m.Dealt]:
        beat = m.Heartbeat(0)
        self.to_tell.add_to(beat)
        return beat.dealt


def dealing() -> tuple[Session, DealingLog]:
    session = Session()
    return session, DealingLog(session, "s", {"length": 10, "seed": 3, "shuffle": True})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_batches_that_follow_each_other_are_one_word() -> None:
    session, log = dealing()
    for row in range(2):
        log.note(1 + row, 0, 4 * row, 4, COLUMNS)
    log.note(3, 0, 8, 4, COLUMNS, [5, 6])
    log.note(4, 1, 0, 4, COLUMNS)
    log.note(5, 1, 4, 4, {0: (0, 2), 1: (2, 4)})
    assert [(one.round, one.epoch, one.samples) for one in session.told()] == [
        (1, 0, []), (3, 0, [5, 6]), (4, 1, []), (5, 1, []),
    ]  # fmt: skip
    session.to_tell.flush()
    assert session.told() == []


def test_log_tells_who_was_in_each_round_with_which_samples() -> None:
    session, log = dealing()
    for row in range(2):
        log.note(1 + row, 0, 4 * row, 4, COLUMNS)
    log.note(3, 0, 8, 4, {0: (0, 1), 1: (1, 2)}, [5, 6])
    changes = [
        m.Change(0, "starts", [0, 1], 0),
        m.Change(1, "left", [1], 1, "SIGTERM"),
        m.Change(2, "joins", [1], 2),
        m.Change(3, "left", [0], 4),
        m.Change(4, "left", [1], 4),
    ]
    journal = Journal(SETTINGS)
    journal.write([])
    journal.write([*changes[:2], *session.told()])
    journal.write(changes[2:])
    read = Replay.of(ring.folder_of("job", "key"))
    assert [one for _, one in read.changes] == changes
    order = [int(index) for index in epoch_order(10, 3, 0)]
    assert list(read.steps()) == [
        Step(1, 0, {0: order[0:3], 1: order[3:4]}),
        Step(2, 0, {0: order[4:7]}),
        Step(3, 0, {0: [5], 1: [6]}),
    ], "of round 4 nothing is known"
    assert (read.samplers, read.last_round, read.length("s")) == (["s"], 4, 10)
    with pytest.raises(ValueError, match="there is no sampler 'other' in this log; it has s"):
        next(read.steps("other"))


def test_log_that_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has no log of membership"):
        Replay.of(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b'{"dealt": {}}\n')
    with pytest.raises(LaunchError, match="cannot be read"):
        Replay.of(tmp_path)


def test_job_goes_on_where_the_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change = m.Change(0, "starts", [0], 0)
    (tmp_path / "paceline").write_text("no folder")
    journal = Journal(SETTINGS)
    for _ in range(2):
        journal.write([change])
    assert caplog.text.count("is not written") == 1
    (tmp_path / "paceline").unlink()
    Journal(SETTINGS.replace(recorder=False)).write([change])
    assert not (tmp_path / "paceline").exists()
