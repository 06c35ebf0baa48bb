"""Lines of the log are text, whatever other processes say."""

from __future__ import annotations

import logging

import pytest

from paceline.observe.logs import PlainFormatter


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b]0;title\x07 died\x1b[2J", r"\x1b]0;title\x07 died\x1b[2J"),
        ("over\rwritten \x9b31m \x7f\x00", r"over\rwritten \x9b31m \x7f\x00"),
        ("two\n\tlines of Müller's 日本", "two\n\tlines of Müller's 日本"),
    ],
)
def test_terminal_obeys_no_line_of_the_log(said: str, shown: str) -> None:
    record = logging.LogRecord("paceline", logging.WARNING, "", 1, "worker 1: %s", (said,), None)
    assert PlainFormatter("%(message)s").format(record) == f"worker 1: {shown}"
