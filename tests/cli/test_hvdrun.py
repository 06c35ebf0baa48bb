"""``paceline hvdrun``: horovodrun's flags. ``tests/hvd/test_launchers.py`` runs a script with them."""

from __future__ import annotations

import sys

import pytest

from paceline.cli.hvdrun import run
from paceline.cli.options import UsageError


def test_flags_become_variables(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cycle-time-ms", "2.5", "--cache-capacity", "1048577", "--no-hierarchical-allreduce"]
    assert run("hvdrun", ["-np", "1", "--dry-run", *flags, "--", sys.executable]) == 0
    printed = capsys.readouterr().out
    assert "HOROVOD_CYCLE_TIME=2.5" in printed
    assert "HOROVOD_CACHE_CAPACITY=1048577" in printed
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE=0" in printed


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "-np"),
        (["-np", "3", "-H", "localhost:2"], "only 2 slots"),
        (["-H", "far.example:2"], "another host"),
        (["-H", "localhost:many"], "-H takes host:slots.*'localhost:many' is not a host"),
        (["-H", "localhost:²"], "-H takes host:slots"),
        (["-np", "2", "-H", ""], "-H takes host:slots, as in localhost:2: .* names no host"),
        (["-np", "0"], "number of workers is 0"),
        (["-np", "2", "--cycle-time-ms", "-1"], "--cycle-time-ms: -1 is too small; it is at least 0"),
        (["-np", "2", "--lr", "1"], "options of your script come after it"),
    ],
)
def test_wrong_command_lines(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run("hvdrun", [*words, "--", sys.executable])
