"""``paceline top``: its keys and its terminal."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from paceline.cli.top import pressed
from paceline.launch.picture import ORDERS, View
from paceline.observe.job_view import JobView
from paceline.wire import messages as m
from tests.launch.supervise.screens import Terminal

#: ``paceline top`` of a job whose status is made up.
SCRIPT = """
import sys
from paceline.cli import main, top
from paceline.launch import runtime
from tests.cli.test_top import JOB

top.ask = lambda record: JOB
runtime.find = lambda job: runtime.JobRecord("1a2b", 0, "", 0.0, "python train.py", ("h0",), 2, 0)
sys.exit(main(["top", *sys.argv[1:]]))
"""


def status() -> m.Status:
    members = [m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"") for rank in range(3)]
    states = [m.MemberState(40 - rank, 1.0, 0.1, 0, 0, 0, "live", "", 0.1 * (rank + 1)) for rank in range(3)]
    return m.Status(members, states, [], [], [], [m.Told("worker", 2, 5.0, "worker 2 was slow")])


JOB = JobView(status())


def test_keys_sort_and_select() -> None:
    view = View()
    orders, selected = [], []
    for _ in ORDERS:
        view = pressed(view, "s", JOB)
        orders.append(view.order)
    assert orders == [*list(ORDERS)[1:], "step"]
    for key in "jjjjkkkk":
        view = pressed(view, key, JOB)
        selected.append(view.selected)
    assert selected == [2, 1, 0, 0, 1, 2, 2, 2]
    assert pressed(view, "x", JOB).selected is None
    assert pressed(View(), "k", JOB).selected == 0
    assert pressed(view, "?", JOB) == pressed(view, "", JOB) == view
    assert pressed(View(), "j", JobView(m.Status([], [], []))) == View()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(100, 24)
    yield made
    made.close()


@pytest.fixture
def top(terminal: Terminal) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=terminal.fd,
        stdout=terminal.fd,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
    )
    terminal.wait_for(lambda: terminal.shows("q: quit") and terminal.shows("s: sort by samples"), "the picture")
    yield process
    process.kill()
    process.communicate()


def is_cooked(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.fd)[3] & termios.ICANON)


def test_keys_change_the_picture_and_q_restores_the_terminal(top: subprocess.Popen[bytes], terminal: Terminal) -> None:
    assert not is_cooked(terminal)
    assert terminal.shows("s: sort by samples")
    os.write(terminal.master, b"s")
    terminal.wait_for(lambda: terminal.shows("s: sort by round"), "another order")
    os.write(terminal.master, b"\x1b[A")
    terminal.wait_for(lambda: terminal.shows("5 s ago: worker 2 was slow"), "the last worker of that order")
    terminal.resize(40, 24)
    terminal.wait_for(
        lambda: terminal.shows("ago: worker 2 was slow") and not terminal.shows("waits for"), "40 columns"
    )
    os.write(terminal.master, b"q")
    terminal.wait_for(lambda: top.poll() is not None, "the end")
    assert top.returncode == 0
    assert is_cooked(terminal)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_restore_the_terminal(top: subprocess.Popen[bytes], terminal: Terminal, signum: int, code: int) -> None:
    top.send_signal(signum)
    terminal.wait_for(lambda: top.poll() is not None, "the end")
    terminal.drain()
    assert top.returncode == code
    assert is_cooked(terminal)
    assert terminal.seen.count(b"\x1b[?1049h") == terminal.seen.count(b"\x1b[?1049l") == 1
