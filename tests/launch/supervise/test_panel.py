"""Lines that stay under the output on a terminal, on a screen that a terminal emulator has made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launch.supervise.panel import Panel, one_row, without_moves
from tests.launch.supervise.screens import Terminal

PANEL = [b"panel one", b"panel two"]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(40, 12)
    yield made
    made.close()


def as_sent(data: bytes) -> bytes:
    """The kernel makes a new line of each end of one."""
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def test_output_stands_above_the_panel_and_the_cursor_between_them(terminal: Terminal) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 0.0))
    terminal.feed(as_sent(panel.under(b"one\ntwo\n", 1.0)))
    assert terminal.rows == ["one", "two", "", "panel one", "panel two"]
    assert terminal.cursor == (2, 0)
    terminal.feed(panel.show([b"other"], 2.0))
    assert terminal.rows == ["one", "two", "", "other"]
    terminal.feed(panel.close())
    assert terminal.rows == ["one", "two"]
    assert terminal.cursor == (2, 0)


def test_progress_bar_keeps_its_row_while_the_panel_changes(terminal: Terminal) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 0.0))
    terminal.feed(as_sent(panel.under(one_row(b"10% #") + b"\r", 1.0)))
    terminal.feed(panel.show(PANEL[:1], 2.0))
    assert terminal.rows == ["10% #", "panel one"]
    terminal.feed(as_sent(panel.under(one_row(b"20% " + b"#" * 100) + b"\r", 3.0)))
    assert terminal.rows == ["20% " + "#" * 36, "panel one"]
    assert terminal.cursor == (0, 0)


def test_text_that_was_typed_into_the_output_is_erased(terminal: Terminal) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 0.0))
    terminal.feed(b"^C")
    terminal.feed(as_sent(panel.under(b"[launch] ending\n", 1.0)))
    assert terminal.rows == ["[launch] ending", "", "panel one", "panel two"]


def test_flood_removes_the_panel_until_it_rests(terminal: Terminal) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 1.0))
    terminal.feed(as_sent(panel.under(b"one\n", 1.01)))
    assert terminal.rows == ["one"]
    assert panel.due == pytest.approx(1.05)
    assert panel.redraw(1.02) == b""
    terminal.feed(panel.redraw(1.06))
    assert terminal.rows == ["one", "", "panel one", "panel two"]
    assert panel.due is None


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_small_terminal_gets_as_many_lines_as_it_has_room_for(lines: int) -> None:
    terminal = Terminal(40, lines)
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 0.0))
    terminal.feed(as_sent(panel.under(b"one\n", 1.0)))
    terminal.feed(panel.close())
    assert panel.due is None
    assert [row for row in terminal.rows if row] == ["one"]
    terminal.close()


def test_terminal_that_was_closed_ends_no_launcher() -> None:
    terminal = Terminal(40, 12)
    panel = Panel(terminal.fd)
    panel.show(PANEL, 0.0)
    os.close(terminal.master)
    assert b"one\n" in panel.under(b"one\n", 1.0)
    assert panel.show(PANEL, 2.0) == b""
    assert panel.close() == b""
    os.close(terminal.fd)


def test_launcher_in_the_background_leaves_the_terminal_to_the_shell(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(panel.show(PANEL, 0.0))
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    assert panel.under(b"one\n", 1.0) == b"one\n"
    assert panel.show(PANEL, 2.0) == b""
    assert panel.due is None
    assert panel.close() == b""


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("line"), st.integers(1, 30)),
            st.tuples(st.just("bar"), st.integers(1, 200)),
            st.tuples(st.just("show"), st.integers(0, 9)),
            st.tuples(st.just("wait"), st.integers(0, 1)),
        ),
        max_size=60,
    ),
    st.integers(3, 14),
)
def test_no_line_is_torn_or_lost_whatever_comes(events: list[tuple[str, int]], height: int) -> None:
    terminal, now, count = Terminal(60, height), 1.0, 0
    panel = Panel(terminal.fd)
    expected: list[str] = []
    for kind, size in events:
        if kind == "line":
            texts = [f"line {count + index}" for index in range(size)]
            count += size
            expected += texts
            terminal.feed(as_sent(panel.under("".join(f"{text}\x1b[K\n" for text in texts).encode(), now)))
        elif kind == "bar":
            terminal.feed(as_sent(panel.under(one_row(b"#" * size + b"\x1b[K") + b"\r", now)))
        elif kind == "show":
            terminal.feed(panel.show([b"panel %d" % index for index in range(size)], now))
        else:
            now += 0.1 * size
            terminal.feed(panel.redraw(now))
    terminal.feed(panel.close() + b"\x1b[K")
    assert [row for row in terminal.rows if row] == expected
    terminal.close()


def test_narrower_terminal_cuts_the_panel_and_leaves_nothing_behind(terminal: Terminal) -> None:
    panel = Panel(terminal.fd)
    terminal.feed(as_sent(panel.under(b"one\n", 0.0)))
    terminal.feed(panel.show([b"a" * 40, b"b" * 40], 1.0))
    terminal.resize(20, 12)
    terminal.feed(as_sent(panel.under(b"two\n", 2.0)))
    assert terminal.rows == ["one", "two", "", "a" * 20, "b" * 20]


@pytest.mark.parametrize(
    "moves", [b"\x1b[A", b"\x1b[2;3H", b"\x1b[2J", b"\x1b[?25l", b"\x1b7", b"\x1bM", b"\x1bc", b"\v"]
)
def test_lines_lose_what_moves_the_cursor_and_keep_colours(moves: bytes) -> None:
    assert without_moves(b"a" + moves + b"\x1b[1;31mb\x1b[0m\x1b[K") == b"a\x1b[1;31mb\x1b[0m\x1b[K"


def test_launcher_takes_rich_only_to_draw() -> None:
    code = "import sys, paceline.cli.launch, paceline.launch.supervise.supervisor; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
