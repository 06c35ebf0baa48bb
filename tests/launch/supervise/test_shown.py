"""The panel of a launcher on a terminal: small scripts in the place of scheduler and workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.observe.account import WORKER_PARTS
from paceline.wire import messages as m
from tests.launch.supervise.screens import Terminal

MakeJob = Callable[..., Any]

#: Answers every question for the status with a file, and ends with worker 0.
SCHEDULER = """
READY=/dev/fd/${READY_FD:-$PACELINE_READY_FD} ENDED=/dev/fd/${ENDED_FD:-$PACELINE_ENDED_FD}
echo tcp://127.0.0.1:5555 >$READY
while read -r line; do case $line in
'["status"]') cat "$STATUS" >$READY;;
'["exited", ["worker", 0], 0, ""]') echo '["over"]' >$READY; exit 0;;
esac; done <$ENDED"""
SENTENCE = "worker 1 on h1 takes 2.3 times as long as the others"


@pytest.fixture
def scheduler(tmp_path: Path) -> str:
    members = [m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"") for rank in range(2)]
    window = m.Window(0, 10, 320.0, [1_000_000, *[0] * (len(WORKER_PARTS) - 1)])
    states = [m.MemberState(1310, 1.0, 0.1, 0, 0, 0, "live", "", 0.1 * (rank + 1), [window]) for rank in range(2)]
    status = msgspec.json.encode(m.Status(members, states, [], [], [SENTENCE])).decode()
    (tmp_path / "status").write_bytes(msgspec.json.encode(["status", status]) + b"\n")
    return f"STATUS={tmp_path / 'status'}\n{SCHEDULER}"


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(60, 20)
    yield made
    made.close()


@pytest.mark.parametrize("agents", [False, True])
def test_panel_stands_under_the_output_and_is_gone_at_the_end(
    make_job: MakeJob, scheduler: str, terminal: Terminal, agents: bool
) -> None:
    worker = "echo first; until [ -e go ]; do sleep 0.02; done; echo last"
    job = make_job().start(worker, "exit 0", scheduler=scheduler, terminal=terminal.fd, agents=agents)
    # One write of the panel arrives in pieces where the machine is busy: its last byte returns the cursor.
    terminal.wait_for(lambda: terminal.shows(SENTENCE) and terminal.shows("first") and terminal.cursor == (1, 0), "it")
    rows = terminal.rows
    assert rows[0] == "[worker 0] first"
    assert rows[1] == ""
    assert rows[2].startswith("job job ")
    assert "round 1,310  640 samples/s" in " ".join(rows)
    assert rows[-1] == SENTENCE
    (job.folder / "go").touch()
    terminal.wait_for(lambda: terminal.rows == ["[worker 0] first", "[worker 0] last"], "the end")
    assert job.wait() == 0


def test_ctrl_c_and_a_failure_leave_the_terminal_as_it_was(
    make_job: MakeJob, scheduler: str, terminal: Terminal
) -> None:
    job = make_job().start("exec sleep 1000", scheduler=scheduler, terminal=terminal.fd)
    terminal.wait_for(lambda: terminal.shows("round 1,310"), "the panel")
    job.send(signal.SIGINT)
    terminal.wait_for(lambda: job.process.poll() is not None, "the end")
    terminal.drain()
    assert job.wait() == 130
    assert terminal.rows[0] == "[launch] SIGINT: ending the job; a second signal kills it"
    assert not terminal.shows("round 1,310")
    assert terminal.seen.count(b"\x1b[?7l") == terminal.seen.count(b"\x1b[?7h") > 0
    assert b"\x1b[?25l" not in terminal.seen


def test_picture_that_cannot_be_drawn_ends_no_job(make_job: MakeJob, tmp_path: Path, terminal: Terminal) -> None:
    (tmp_path / "status").write_text('["status", "{}"]\n')
    scheduler = f"STATUS={tmp_path / 'status'}\n{SCHEDULER}"
    job = make_job().start("until [ -e go ]; do sleep 0.02; done", scheduler=scheduler, terminal=terminal.fd)
    terminal.wait_for(lambda: terminal.shows("of the job is shown no more: V"), "the reason")
    (job.folder / "go").touch()
    terminal.wait_for(lambda: job.process.poll() is not None, "the end")
    assert job.wait() == 0
