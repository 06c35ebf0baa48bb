"""The picture of ``paceline top``."""

from __future__ import annotations

import pytest

from paceline.cli.top import LETTERS, bar, picture
from paceline.launch.runtime import JobRecord
from paceline.observe.account import COMPUTE, DATA, RECEIVE, SERVER_PARTS, WAIT, WORKER_PARTS
from paceline.wire import messages as m

RECORD = JobRecord("1a2b", 1, "", 0.0, "python train.py", ("h0",), 2, 1)
SENTENCE = "worker 1 on h1 takes 2.3 times as long as the others since round 12: 81% of its step is its data loader"


def member(role: str, rank: int) -> m.Member:
    return m.Member(role, rank, 0, f"h{rank}", f"h{rank}", 1, "", b"")


def state(step_s: float, parts: list[int], samples: float = 320.0) -> m.MemberState:
    window = m.Window(0, 10, samples, parts)
    return m.MemberState(40, 1.0, 0.1, 2**20, 2**20, 2**20, "live", "", step_s, [window])


def status() -> m.Status:
    quick, slow, server = [0] * len(WORKER_PARTS), [0] * len(WORKER_PARTS), [0] * len(SERVER_PARTS)
    quick[COMPUTE], quick[WAIT] = 200_000, 800_000
    slow[DATA], slow[COMPUTE] = 800_000, 200_000
    server[RECEIVE] = server[RECEIVE + 1] = 500_000
    members = [member("worker", 0), member("worker", 1), member("server", 0)]
    return m.Status(members, [state(0.1, quick), state(0.5, slow), state(0.0, server)], [], [], [SENTENCE])


def test_picture_has_the_slowest_worker_first_the_rate_of_all_and_the_verdict() -> None:
    lines = picture(status(), RECORD, 60.0, 150).split("\n")
    assert lines[0] == "job 1a2b  60 s  round 40  640 samples/s"
    workers = [line for line in lines if line.startswith("worker ") and "live" in line]
    assert [line.split()[1] for line in workers] == ["1", "0"]
    assert "dddd" in workers[0]
    assert "...." in workers[1]
    (server,) = [line for line in lines if line.startswith("server 0")]
    assert "50%" in server
    assert "rrrr" not in server
    assert SENTENCE in lines


@pytest.mark.parametrize("columns", [20, 40, 41, 60, 80, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(columns: int) -> None:
    lines = picture(status(), RECORD, 60.0, columns).split("\n")
    assert max(map(len, lines)) <= columns
    assert "worker 1" in "\n".join(lines)


def test_bar_is_as_long_as_it_shall_be_whatever_the_shares() -> None:
    shares = {part: 1 / len(WORKER_PARTS) for part in WORKER_PARTS}
    assert len(bar(shares, WORKER_PARTS, 37)) == 37
    assert bar({"data": 0.5, "wait": 0.5}, WORKER_PARTS, 10) == "ddddd....."
    assert bar({}, WORKER_PARTS, 10) == ""


def test_every_part_has_a_letter() -> None:
    assert set(LETTERS) == {*WORKER_PARTS, *SERVER_PARTS}
    assert len({LETTERS[part] for part in WORKER_PARTS}) == len(WORKER_PARTS)
