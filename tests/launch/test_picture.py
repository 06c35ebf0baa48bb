"""The picture of ``paceline top`` and of the panel."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from paceline.launch.picture import _COLOURS, LETTERS, ORDERS, View, bar, in_order, painted, picture
from paceline.launch.runtime import JobRecord
from paceline.observe import page
from paceline.observe.account import COMPUTE, DATA, RECEIVE, SERVER_PARTS, WAIT, WORKER_PARTS
from paceline.observe.job_view import JobView
from paceline.observe.table import Size
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
    told = [
        m.Told("worker", 1, 30.0, "earlier"),
        m.Told("worker", 0, 20.0, "another"),
        m.Told("worker", 1, 5.0, SENTENCE),
    ]
    return m.Status(members, [state(0.1, quick), state(0.5, slow), state(0.0, server)], [], [], [SENTENCE], told)


def many(workers: int) -> m.Status:
    states = [state(0.001 * (rank + 1), [0] * len(WORKER_PARTS)) for rank in range(workers)]
    return m.Status([member("worker", rank) for rank in range(workers)], states, [], [], [SENTENCE])


def shown(what: m.Status, columns: int, lines: int = 0, view: View | None = None) -> list[str]:
    size = Size(columns, lines)
    return [line.plain for line in picture(JobView(what, 2, 1), RECORD, 60.0, size, *([] if view is None else [view]))]


def ranks(what: m.Status, order: str) -> list[int]:
    return [one.member.rank for one in in_order(JobView(what), order)]


def test_picture_has_the_slowest_worker_first_the_rate_of_all_and_the_verdict() -> None:
    lines = shown(status(), 150)
    assert lines[0] == "job 1a2b  60 s  round 40  640 samples/s"
    workers = [line for line in lines if line.startswith("worker ") and "live" in line]
    assert [line.split()[1] for line in workers] == ["1", "0"]
    assert "dddd" in workers[0]
    assert "...." in workers[1]
    (server,) = [line for line in lines if line.startswith("server 0")]
    assert "50%" in server
    assert "rrrr" not in server
    assert SENTENCE in lines


@pytest.mark.parametrize(
    "view", [View(), View("host", selected=1, about=("keys",)), View(is_panel=True, about=("it starts",))]
)
@pytest.mark.parametrize("columns", [20, 40, 41, 60, 80, 200])
@pytest.mark.parametrize("height", [0, 1, 2, 5, 8, 30])
def test_picture_fits_every_terminal(columns: int, height: int, view: View) -> None:
    lines = shown(status(), columns, height or (12 if view.is_panel else 0), view)
    assert max(map(len, lines)) <= columns
    assert not height or len(lines) <= height
    assert lines[0].startswith("job 1a2b")
    if not height:
        assert "worker 1" in "\n".join(lines)


def test_command_of_several_lines_takes_one() -> None:
    record = replace(RECORD, command="python -c 'import a\n\x1b[2J'")
    lines = [line.plain for line in picture(JobView(status()), record, 60.0, Size(100))]
    assert r"python -c 'import a\n\x1b[2J'" in lines


def test_forty_columns_still_have_the_bars_of_the_workers() -> None:
    lines = shown(status(), 40, 12, View(is_panel=True))
    (slow,) = [line for line in lines if line.startswith("worker 1") and "500 ms" in line]
    assert "dddddddd" in slow
    assert "its data loader" in " ".join(lines)


def test_panel_counts_the_workers_that_it_has_no_line_for_and_keeps_the_verdict() -> None:
    lines = shown(many(50), 100, 10, View(is_panel=True))
    assert len(lines) == 10
    assert [line.split()[1] for line in lines if line.startswith("worker") and "live" in line] == [
        "49",
        "48",
        "47",
        "46",
        "45",
    ]
    assert "and 45 more workers" in lines
    assert " ".join(lines[-2:]) == SENTENCE


def test_selected_worker_is_among_those_shown_with_its_parts_and_last_verdicts() -> None:
    lines = shown(status(), 150, 40, View("rank", selected=1))
    at = next(index for index, line in enumerate(lines) if line.startswith("worker 1 on h1 (pid 1)"))
    assert "data 80%  compute 20%" in lines[at]
    assert lines[at + 1 : at + 3] == [f"5 s ago: {SENTENCE}", "30 s ago: earlier"]
    assert "no verdict so far" in shown(many(3), 150, 40, View(selected=2))
    far = shown(many(50), 100, 20, View("rank", selected=40))
    assert [line for line in far if line.startswith("worker 40 ")]


def test_workers_have_the_order_that_was_chosen() -> None:
    assert ranks(status(), "step") == [1, 0]
    assert ranks(status(), "rank") == [0, 1]
    assert all(sorted(ranks(many(5), order)) == [0, 1, 2, 3, 4] for order in ORDERS)


def test_servers_and_legend_make_room_for_workers_verdicts_and_keys() -> None:
    lines = shown(status(), 60, 18, View(selected=1, about=("q: quit",)))
    assert lines[-1] == "q: quit"
    assert not [line for line in lines if line.startswith("server 0")]
    assert len([line for line in lines if "live" in line]) == 2
    whole = shown(status(), 60, 40, View(selected=1, about=("q: quit",)))
    assert [line for line in whole if line.startswith("server 0")]


def test_processes_that_have_not_joined_are_named() -> None:
    early = m.Status([member("worker", 1)], [state(0.0, [0] * len(WORKER_PARTS))], [])
    assert "1 of 3 processes have joined  not yet: server 0, worker 0" in shown(early, 100)[0]


def test_legend_has_the_parts_that_take_time() -> None:
    assert "d data  C compute  . wait  m merge" in [line.replace(". receive  ", "") for line in shown(status(), 150)]


def test_bar_is_as_long_as_it_shall_be_whatever_the_shares() -> None:
    shares = {part: 1 / len(WORKER_PARTS) for part in WORKER_PARTS}
    assert len(bar(shares, WORKER_PARTS, 37)) == 37
    assert bar({"data": 0.5, "wait": 0.5}, WORKER_PARTS, 10).plain == "ddddd....."
    assert bar({}, WORKER_PARTS, 10).plain == ""


def test_every_part_has_a_letter() -> None:
    assert set(LETTERS) == {*WORKER_PARTS, *SERVER_PARTS}
    assert len({LETTERS[part] for part in WORKER_PARTS}) == len(WORKER_PARTS)


def test_no_two_parts_have_the_same_colour_in_the_terminal_and_on_the_page() -> None:
    assert len(set(_COLOURS.values())) == len(_COLOURS) == len(LETTERS)
    [found] = re.findall(r"const COLOURS = \{(.*?)\};", page.page().decode(), re.DOTALL)
    on_page = dict(re.findall(r'(\w+): "(#\w+)"', found))
    assert len(set(on_page.values())) == len(on_page)
    assert on_page.keys() == LETTERS.keys()


def test_colours_follow_the_terminal_and_can_be_switched_off() -> None:
    lines = picture(JobView(status()), RECORD, 60.0, Size(100))
    coloured = painted(lines, {"TERM": "xterm-256color"})
    plain = painted(lines, {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert len(coloured) == len(plain) == len(lines)
    assert b"\x1b[30;43mddd" in b"".join(coloured)
    assert b";43m" not in b"".join(plain)
