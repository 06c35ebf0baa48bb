"""``paceline doctor``: what it refuses."""

from __future__ import annotations

import pytest

from paceline.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "h1,", "--python", ""], "--python is empty; it takes the path of an interpreter"),
        (["-H", "h1,", "--ssh", ""], "--ssh is empty; it takes a command"),
        ([], "the hosts are missing; give -H"),
    ],
)
def test_empty_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
