"""Whatever a text of others is, its plain form can be encoded, and a terminal obeys none of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.host.plain_text import LONGEST_TEXT, described, plain, plain_lines, text_of
from paceline.wire import encode
from paceline.wire import messages as m


class MuteError(Exception):
    def __str__(self) -> str:
        raise OSError("\x1b[2J")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Müller's 日本\u3000語 12\u00a0%", "Müller's 日本\u3000語 12\u00a0%"),
        ("\x1b]0;title\x07\x9b31m\x7f\x00", r"\x1b]0;title\x07\x9b31m\x7f\x00"),
        ("file \udcff, half of a pair \ud83d", r"file \udcff, half of a pair \ud83d"),
        ("turned \u202e and apart \u2028 tag \U000e0041", r"turned \u202e and apart \u2028 tag \U000e0041"),
        ("two\n\tlines\r", "two\n\tlines\\r"),
    ],
)
def test_what_a_terminal_obeys_or_no_message_carries_is_shown_as_text(text: str, shown: str) -> None:
    assert plain(text, "\n\t") == shown


@given(st.text(st.characters(), max_size=50))
def test_every_text_can_be_sent_and_shown(text: str) -> None:
    error = ValueError(text)
    for made in (plain_lines(text), text_of(error), described(error)):
        assert len(made) <= LONGEST_TEXT
        assert encode(1, 0, m.Failed("ValueError", made))
        assert all(one.isprintable() for one in made.replace("\u3000", "").split())


def test_exception_whose_text_cannot_be_made_has_one() -> None:
    assert described(MuteError()) == "MuteError: (its text cannot be made: __str__ raised OSError)"
    assert described(type("\x1b[2J", (ValueError,), {})("x" * 10**6))[:12] == r"\x1b[2J: xxx"
    assert described(ValueError()) == "ValueError"


def test_message_that_cannot_carry_a_name_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"no message can carry '.*file.*udcff.*', which a Command has: it is no UTF-8"
    ):
        encode(1, 0, m.Command("run", "file \udcff"))
