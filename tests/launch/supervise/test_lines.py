from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.supervise.lines import LONGEST_LINE, LastLines, Line, LineSplitter

TEXT = st.text("ab\r\n", max_size=30).map(str.encode)


def split(*chunks: bytes) -> list[Line]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.close()


def test_lines_end_with_newline_return_or_both() -> None:
    assert split(b"one\ntwo\r\nthree\rfour\n") == [
        (b"one", b"\n"),
        (b"two", b"\n"),
        (b"three", b"\r"),
        (b"four", b"\n"),
    ]


def test_last_line_needs_no_end() -> None:
    assert split(b"one\ntwo") == [(b"one", b"\n"), (b"two", b"\n")]
    assert split(b"50%\r") == [(b"50%", b"\n")]
    assert split(b"one\n") == [(b"one", b"\n")]


def test_bytes_of_any_encoding_pass_unchanged() -> None:
    assert split(b"\xff\xfe\x00\n") == [(b"\xff\xfe\x00", b"\n")]


@given(st.lists(TEXT))
def test_lines_do_not_depend_on_how_the_bytes_arrive(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    assert split(*chunks) == split(whole) == split(*(bytes([byte]) for byte in whole))


@given(TEXT)
def test_nothing_is_lost(text: bytes) -> None:
    assert b"".join(line.text for line in split(text)) == text.replace(b"\r", b"").replace(b"\n", b"")
    assert all(b"\n" not in line.text for line in split(text))


def test_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (2 * LONGEST_LINE + 5))
    assert [len(line.text) for line in lines] == [LONGEST_LINE, LONGEST_LINE]
    assert splitter.close() == [(b"x" * 5, b"\n")]


def test_progress_bar_can_be_previewed_before_it_is_overwritten() -> None:
    splitter = LineSplitter()
    splitter.feed(b"hello")
    assert splitter.preview() == b""
    splitter.feed(b"\n\r10%")
    assert splitter.preview() == b"10%"
    splitter.feed(b"\r20%")
    assert splitter.preview() == b"20%"
    splitter.feed(b"\ndone")
    assert splitter.preview() == b""


def test_tail_keeps_the_last_lines_as_a_terminal_shows_them() -> None:
    tail = LastLines(length=3)
    for line in split(b"a\nb\n\r10%\r20%\r30%\nc\n"):
        tail.add(line)
    assert tail.lines() == [b"b", b"30%", b"c"]


def test_tail_keeps_what_only_an_empty_line_follows() -> None:
    tail = LastLines()
    for line in split(b"90%\r\r\nerror\n\nlast"):
        tail.add(line)
    assert tail.lines() == [b"90%", b"error", b"", b"last"]


def test_tail_cuts_long_lines() -> None:
    tail = LastLines(width=4)
    tail.add(Line(b"abcdefgh", b"\n"))
    assert tail.lines() == [b"abcd"]
