"""Rings keep the last events, whatever happens to their process."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Settings
from paceline.errors import LaunchError
from paceline.observe import ring
from paceline.observe.events import DIED, PART, RECORD, ROUND, TOOK, member, member_of, parse
from paceline.observe.ring import Ring
from paceline.wire import messages as m

KEY = "k" * 40


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "paceline" / "rings"
    ring.stop()


def records(made: Ring, memory: bytearray) -> list[tuple[int, int]]:
    return [(one.order, one.number) for one in parse(bytes(memory[-4 * RECORD.size :]))]


def test_ring_keeps_the_last_events_in_their_order() -> None:
    memory = bytearray(Ring.size(4))
    made = Ring(memory, "worker", 3, capacity=4, clock=lambda: 2.5)
    for number in range(1, 8):
        made.note(ROUND, number * 10, member("server", 2), 7)
    assert records(made, memory) == [(4, 40), (5, 50), (6, 60), (7, 70)]
    [event] = parse(bytes(memory[-RECORD.size :]))
    assert (event.time, event.value, event.kind, member_of(event.peer)) == (2.5, 7, ROUND, ("server", 2))


def test_torn_record_is_left_out() -> None:
    memory = bytearray(Ring.size(4))
    made = Ring(memory, "worker", 0, capacity=4)
    for number in range(1, 4):
        made.note(ROUND, number)
    at = len(memory) - 2 * RECORD.size  # the second one
    memory[at + RECORD.size - 8 : at + RECORD.size] = bytes(8)
    assert [number for _, number in records(made, memory)] == [1, 3]


def test_what_was_written_over_is_counted() -> None:
    made = Ring(bytearray(Ring.size(4)), "worker", 0, capacity=4)
    for number in range(1, 11):
        made.note(ROUND, number)
    found, lost = made.since(1, 2)
    assert ([one.number for one in parse(found)], lost) == ([7, 8], 5)
    found, lost = made.since(1 + lost + 2, 9)
    assert ([one.number for one in parse(found)], lost) == ([9, 10], 0)


CHILD = """
import sys, time
from paceline.config import Settings
from paceline.errors import LaunchError
from paceline.observe import ring
from paceline.observe.events import ROUND
ring.start(Settings(role="worker", rank=1, job_id="a/b", job_key=sys.argv[1]))
for number in range(10_000):
    ring.note(ROUND, number)
print("ready", flush=True)
while True:
    number += 1
    ring.note(ROUND, number)
"""


def test_events_survive_a_process_that_is_killed(own: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CHILD, KEY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    path = ring.folder_of("a/b", KEY)
    assert path.parent == own
    [(_, _, is_alive)] = ring.rings(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    [(source, events, still_alive)] = ring.rings(path)
    assert (is_alive, still_alive) == (True, False)
    assert (source.role, source.rank, source.pid) == ("worker", 1, process.pid)
    assert ring.CAPACITY - 1 <= len(events) <= ring.CAPACITY
    numbers = [one.number for one in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    [file] = path.glob("*.ring")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_processes_of_one_number_have_a_ring_each() -> None:
    """Containers that share memory: cutting the file of one that runs would end it with SIGBUS."""
    ring.start(Settings(role="worker", rank=1, job_id="a/b", job_key=KEY))
    code = CHILD.replace("ring.start", f"import os; os.getpid = lambda: {os.getpid()}\nring.start")
    with subprocess.Popen([sys.executable, "-c", code, KEY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in range(ring.CAPACITY):
            ring.note(ROUND, 10**6 + number)
        process.kill()
    found = sorted(ring.rings(ring.folder_of("a/b", KEY)), key=lambda one: not one[2])
    assert [(source.pid, is_alive) for source, _, is_alive in found] == [(os.getpid(), True), (os.getpid(), False)]
    assert [{one.number >= 10**6 for one in events} for _, events, _ in found] == [{True}, {False}]


def test_forked_child_writes_nothing() -> None:
    ring.start(Settings(job_id="j", job_key=KEY))
    assert ring.active is not None
    ring.note(ROUND, 1)
    child = os.fork()
    if child == 0:
        ring.note(ROUND, 2)
        os._exit(0 if ring.active is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    [(_, events, _)] = ring.rings(ring.folder_of("j", KEY))
    assert [one.number for one in events] == [1]


def test_only_the_last_jobs_that_have_ended_are_kept(own: Path) -> None:
    for number in range(7):
        ring.start(Settings(job_id=f"j{number}", job_key=KEY))
        if number == 0:
            first = os.dup(ring._file)  # holds the lock, as a process that runs does
        ring.stop()
        os.utime(ring.folder_of(f"j{number}", KEY), (number, number))
    assert sorted(one.stem for one in own.iterdir()) == ["j0", "j3", "j4", "j5", "j6"]
    os.close(first)


@pytest.mark.parametrize("takes_folder", [False, True])
def test_ring_that_another_job_removes_before_it_is_held_is_made_again(
    own: Path, monkeypatch: pytest.MonkeyPatch, takes_folder: bool
) -> None:
    path, lock, removed = ring.folder_of("j", KEY), fcntl.flock, []

    def removes_first(file: int, how: int) -> None:
        if how == fcntl.LOCK_SH and not removed:
            removed.extend(path.glob("*.ring"))
            ring._remove(removed[0])
            if takes_folder:
                path.rmdir()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removes_first)
    ring.start(Settings(job_id="j", job_key=KEY))
    assert removed == list(path.glob("*.ring"))
    assert ring.is_held(removed[0])
    ring.stop()


def test_ring_that_is_held_is_not_removed(own: Path) -> None:
    ring.start(Settings(job_id="j", job_key=KEY))
    (path,) = ring.folder_of("j", KEY).glob("*.ring")
    ring._remove(path)
    assert path.exists()
    ring.stop()
    ring._remove(path)
    assert not path.exists()


def test_recorder_can_be_off(own: Path) -> None:
    ring.start(Settings(recorder=False, job_key=KEY))
    ring.note(PART, 1)
    assert ring.active is None
    assert not own.exists()


def test_messages_are_noted_while_there_is_a_ring() -> None:
    peer, tag = member("worker", 2), m.TAGS[m.Done]
    ring.note(TOOK, 7, peer, tag)
    ring.start(Settings(job_id="j", job_key=KEY))
    ring.note(TOOK, 8, peer, tag)
    ring.stop()
    ring.note(TOOK, 9, peer, tag)
    [(_, [event], _)] = ring.rings(ring.folder_of("j", KEY))
    assert (event.kind, event.number, member_of(event.peer), event.value) == (TOOK, 8, ("worker", 2), 50)


def test_folder_that_cannot_be_used_is_said_and_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "paceline").mkdir(mode=0o777)
    (tmp_path / "paceline").chmod(0o777)
    ring.start(Settings(job_key=KEY))
    ring.note(DIED)
    assert "paceline story will have no events of this process" in caplog.text


def test_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x" * 5000):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match="is no ring"):
            ring.read(tmp_path / "x")


def test_truncated_records_and_records_of_no_time_are_left_out() -> None:
    memory = bytearray(Ring.size(8))
    made = Ring(memory, "worker", 0, capacity=8)
    for at in (1.0, math.nan, math.inf, -math.inf, 1e300, 2.0):
        made.note(ROUND, 1, at=at)
    assert [one.time for one in parse(bytes(memory[-8 * RECORD.size :]))] == [1.0, 2.0]
    for cut in range(1, RECORD.size):
        assert [one.time for one in parse(bytes(memory[-8 * RECORD.size : -cut]))] == [1.0, 2.0]


def test_files_in_the_place_of_rings_are_left_out_and_hold_nobody_up(tmp_path: Path) -> None:
    memory = bytearray(Ring.size())
    Ring(memory, "worker", 3).note(ROUND, 1)
    (tmp_path / "good.ring").write_bytes(memory)
    (tmp_path / "link.ring").symlink_to(tmp_path / "good.ring")
    os.mkfifo(tmp_path / "pipe.ring")
    (tmp_path / "folder.ring").mkdir()
    (tmp_path / "huge.ring").write_bytes(memory)
    os.truncate(tmp_path / "huge.ring", 1 << 40)
    (tmp_path / "cut.ring").write_bytes(memory[:-1])
    for at, field, name in ((24, "d", "unix"), (32, "d", "offset"), (40, "d", "error"), (12, "I", "capacity")):
        damaged = bytearray(memory)
        struct.pack_into(f"<{field}", damaged, at, math.nan if field == "d" else 2**32 - 1)
        (tmp_path / f"{name}.ring").write_bytes(damaged)
    [(source, events, _)] = ring.rings(tmp_path)
    assert (source.rank, len(events)) == (3, 1)


def test_note_costs_little() -> None:
    """A step has about fifty events; 3 us each would be 0.5 % of a step of 30 ms."""
    tracer = sys.gettrace()  # that of coverage, which makes every line dearer
    sys.settrace(None)
    note = Ring(bytearray(Ring.size()), "worker", 0).note
    try:
        best = min(timed(note) for _ in range(30))
    finally:
        sys.settrace(tracer)
    assert best < 3e-6


def timed(note: object) -> float:
    assert callable(note)
    begun = time.perf_counter()
    for _ in range(200):
        note(PART, 3)
    return (time.perf_counter() - begun) / 200


@pytest.mark.parametrize("place", ["nowhere", "elsewhere"])
def test_link_in_the_place_of_the_folder_is_refused_with_a_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "paceline").symlink_to(tmp_path / place)
    with pytest.raises(LaunchError, match="is not a folder that only you can use; remove it, or set XDG_RUNTIME_DIR"):
        ring.jobs_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_folder_of_another_user_is_refused_with_who_can_remove_it(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir(mode=0o700)
    os.chown(tmp_path / "paceline", 12345, 12345)
    said = "only you can use; it is user 12345's, who or root can remove it, or set XDG_RUNTIME_DIR"
    with pytest.raises(LaunchError, match=said):
        ring.jobs_folder()
