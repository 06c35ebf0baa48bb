from __future__ import annotations

import os
import select
import signal
import socket
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import ProcessName
from paceline.launch.supervise.console import ERR, OUT, Console
from tests.launch.supervise.screens import Terminal as Screen

W0, W1 = ProcessName("worker", 0), ProcessName("worker", 1)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[int, int]]:
    fds = {stream: os.open(tmp_path / str(stream), os.O_RDWR | os.O_CREAT) for stream in (OUT, ERR)}
    yield fds
    for fd in fds.values():
        os.close(fd)


def written(fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0)


def test_every_line_says_who_printed_it(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(W0, OUT, b"one\ntw")
    console.feed(ProcessName("server", 1), OUT, b"x\n")
    console.feed(W0, OUT, b"o\n")
    console.feed(ProcessName("scheduler", 0), ERR, b"\xff\n")
    console.say("careful")
    assert written(files[OUT]) == b"[worker 0] one\n[server 1] x\n[worker 0] two\n"
    assert written(files[ERR]) == b"[scheduler] \xff\n[launch] careful\n"


def test_last_line_is_shown_when_the_stream_ends(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(W0, OUT, b"partial")
    assert written(files[OUT]) == b""
    console.close(W0, OUT)
    console.close(W0, OUT)
    assert written(files[OUT]) == b"[worker 0] partial\n"


def test_progress_bars_pass_through_to_a_file(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(W1, OUT, b"\r10%\r20%\n")
    assert written(files[OUT]) == b"[worker 1] 10%\r[worker 1] 20%\n"


def test_tail_joins_both_streams(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(W0, OUT, b"out\n")
    console.feed(W0, ERR, b"err\n")
    assert console.tail(W0) == [b"out", b"err"]
    assert console.tail(W1) == []


class Terminal:
    """A terminal: ``fd`` is the console's side."""

    def __init__(self) -> None:
        self._master, self.fd = os.openpty()
        tty.setraw(self.fd)

    def shows(self, expected: bytes) -> None:
        """Make sure that this is what comes next; the kernel hands it over when it finds the time."""
        seen = b""
        while len(seen) < len(expected) and select.select([self._master], [], [], 60)[0]:
            seen += os.read(self._master, len(expected) - len(seen))
        assert seen == expected

    def close(self) -> None:
        os.close(self._master)
        os.close(self.fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_terminal_gets_a_colour_for_each_role(terminal: Terminal) -> None:
    console = Console({OUT: terminal.fd, ERR: terminal.fd}, {})
    console.feed(W1, OUT, b"one\n")
    console.feed(ProcessName("server", 0), ERR, b"two\n")
    terminal.shows(b"\x1b[32m[worker 1] \x1b[0mone\x1b[K\n\x1b[34m[server 0] \x1b[0mtwo\x1b[K\n")


@pytest.mark.parametrize(("environ", "erased"), [({"NO_COLOR": "1"}, b"\x1b[K"), ({"TERM": "dumb"}, b"")])
def test_colours_can_be_switched_off_and_all_codes(environ: dict[str, str], erased: bytes, terminal: Terminal) -> None:
    console = Console({OUT: terminal.fd, ERR: terminal.fd}, environ)
    console.feed(W1, OUT, b"one\n")
    console.block(b"----\n")
    terminal.shows(b"[worker 1] one" + erased + b"\n" + erased + b"----\n")


def test_terminal_shows_the_moving_bar_of_worker_0_only(terminal: Terminal) -> None:
    console = Console({OUT: terminal.fd, ERR: terminal.fd}, {"NO_COLOR": "1"})
    console.feed(W0, ERR, b"\r10%")
    terminal.shows(b"[worker 0] 10%\x1b[K\r")
    console.feed(W1, ERR, b"\r11%\r12%")
    console.feed(W0, ERR, b"\r20%")
    terminal.shows(b"[worker 0] 10%\x1b[K\r[worker 0] 20%\x1b[K\r")
    console.feed(W1, ERR, b"\r13%\n")
    terminal.shows(b"[worker 1] 13%\x1b[K\n")


def read_rest(console: Console, read_fd: int) -> bytes:
    """Read what the console writes into a pipe, until all is written."""
    seen = b""
    while console.waits_for is not None:
        seen += os.read(read_fd, 1 << 16)
        console.flush()
    return seen + os.read(read_fd, 1 << 16)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_slow_reader_holds_nobody_up_and_gets_everything_in_order(kind: str) -> None:
    ends = [one.detach() for one in socket.socketpair()] if kind == "socket" else list(os.pipe())
    read_fd, write_fd = ends
    console = Console({OUT: write_fd, ERR: write_fd})
    console.block(b"x" * (1 << 20))
    assert console.is_full
    console.feed(W0, OUT, b"one\n")
    console.feed(W0, ERR, b"two\n")
    assert read_rest(console, read_fd) == b"x" * (1 << 20) + b"[worker 0] one\n[worker 0] two\n"
    assert not console.is_full
    assert os.get_blocking(write_fd)
    console.release()
    for fd in ends:
        os.close(fd)


def test_output_that_is_dropped_is_counted() -> None:
    read_fd, write_fd = os.pipe()
    console = Console({OUT: write_fd, ERR: write_fd})
    console.block(b"x" * (1 << 20))
    console.drop()
    kept = read_rest(console, read_fd)
    size = (1 << 20) - kept.count(b"x")
    assert kept.lstrip(b"x").decode() == f"\n[launch] {size} bytes of output were dropped: nobody read them\n"
    console.release()
    os.close(read_fd)
    os.close(write_fd)


def test_reader_that_went_away_is_noticed_and_the_other_stream_still_works(files: dict[int, int]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    console = Console({OUT: write_fd, ERR: files[ERR]})
    assert not console.broken
    console.feed(W0, OUT, b"one\n")
    assert console.broken
    console.say("still here")
    assert written(files[ERR]) == b"[launch] still here\n"
    os.close(write_fd)


def test_traceback_of_all_workers_is_shown_once(files: dict[int, int]) -> None:
    one = b'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nValueError: %s\n'
    link = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    console = Console(files)
    for member in (W0, W1):
        console.feed(member, ERR, b"before\n" + one % b"x" + link + one % b"y" + b"after\n")
    console.feed(W1, ERR, one % b"of worker 1")
    shown = written(files[ERR])
    assert shown.count(b"ValueError: x\n") == shown.count(b"ValueError: y\n") == 1
    assert b"[worker 1] before\n[worker 1] (the same traceback as worker 0)\n[worker 1] after\n" in shown
    assert shown.endswith(b"[worker 1]     f()\n[worker 1] ValueError: of worker 1\n")
    assert console.tail(W1)[-2:] == [b"    f()", b"ValueError: of worker 1"]


def test_process_may_repeat_its_own_traceback_and_end_inside_of_one(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(
        W0, ERR, 2 * b"Traceback (most recent call last):\n  x\nError\n" + b"Traceback (most recent call last):\n  y\n"
    )
    console.close(W0, ERR)
    assert written(files[ERR]).count(b"\n") == 8
    assert written(files[ERR]).endswith(b"[worker 0]   y\n")


def test_endless_traceback_is_not_held_for_ever(files: dict[int, int]) -> None:
    console = Console(files)
    console.feed(W0, ERR, b"Traceback (most recent call last):\n" + 10_000 * b"  x\n")
    assert written(files[ERR]).count(b"\n") == 10_001


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen(60, 12)
    yield made
    made.close()


def test_lines_of_both_streams_stand_above_the_panel(screen: Screen) -> None:
    console = Console({OUT: screen.fd, ERR: screen.fd}, {"TERM": "xterm"}, has_panel=True)
    console.show_panel([b"panel"])
    console.feed(W0, ERR, b"\r10%\r20%")
    console.feed(W1, OUT, b"one\x1b[A\nha")
    console.feed(W1, OUT, b"lf\n")
    console.say("careful")
    console.feed(W0, ERR, b"\r30%")
    console.show_panel([b"other panel"])
    end = ["[worker 1] one", "[worker 1] half", "[launch] careful", "[worker 0] 30%", "other panel"]
    screen.wait_for(lambda: screen.rows == end, "lines above the panel")
    console.close_panel()
    console.feed(W0, ERR, b"\r40%\n")
    console.block(b"----\n")
    screen.wait_for(lambda: screen.rows == [*end[:3], "[worker 0] 40%", "----"], "no panel")


def test_stdout_that_goes_elsewhere_gets_nothing_of_the_panel(screen: Screen, files: dict[int, int]) -> None:
    console = Console({OUT: files[OUT], ERR: screen.fd}, {"TERM": "xterm"}, has_panel=True)
    console.show_panel([b"panel"])
    console.feed(W0, OUT, b"one\x1b[A\n")
    console.close_panel()
    assert written(files[OUT]) == b"[worker 0] one\x1b[A\n"


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {}])
def test_terminal_that_cannot_has_no_panel(environ: dict[str, str], screen: Screen) -> None:
    console = Console({OUT: screen.fd, ERR: screen.fd}, environ, has_panel=True)
    assert console.panel is None
    console.show_panel([b"panel"])
    console.feed(W0, OUT, b"one\n")
    screen.wait_for(lambda: screen.rows == ["[worker 0] one"], "the line alone")


def test_there_is_no_panel_without_a_terminal(files: dict[int, int]) -> None:
    assert Console(files, {"TERM": "xterm"}, has_panel=True).panel is None


def test_full_disk_ends_a_log_file_and_not_the_job(files: dict[int, int], tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    console = Console(files, log_dir=str(tmp_path))
    for member in (W0, W1, W0):
        console.feed(member, OUT, b"a\n")
    console.close_files()
    assert written(files[OUT]) == b"[worker 0] a\n[worker 1] a\n[worker 0] a\n"
    said = f"{tmp_path}/worker-0.log cannot be written: No space left on device; it has no more of what worker 0 prints"
    assert written(files[ERR]).decode() == f"[launch] {said}\n"
    assert (tmp_path / "worker-1.log").read_bytes() == b"a\n"


def test_folder_of_log_files_is_of_one_job_at_a_time(files: dict[int, int], tmp_path: Path) -> None:
    first = Console(files, log_dir=str(tmp_path))
    with pytest.raises(LaunchError, match=f"another job writes into {tmp_path} now"):
        Console(files, log_dir=str(tmp_path))
    child = os.fork()  # of a script that uses the launcher
    if child == 0:
        signal.pause()
    first.close_files()
    try:
        Console(files, log_dir=str(tmp_path)).close_files()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_stdout_on_a_full_disk_is_said_once(files: dict[int, int]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        console = Console({OUT: full, ERR: files[ERR]})
        for _ in range(2):
            console.feed(W0, OUT, b"a\n")
    finally:
        os.close(full)
    assert written(files[ERR]) == b"[launch] stdout cannot be written: No space left on device\n"


def test_reader_that_has_left_is_no_news(files: dict[int, int]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        Console({OUT: write, ERR: files[ERR]}).feed(W0, OUT, b"a\n")
    finally:
        os.close(write)
    assert written(files[ERR]) == b""
