"""Texts that are no UTF-8, or that a terminal would obey, end neither servers nor launcher: a job of one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import programs

COMMANDS = r"""
from paceline.server.commands import register

class Mute(Exception):
    def __str__(self):
        raise OSError

@register("command", "evil")
def evil(context, body):
    raise {"bytes": OSError("file \udcff \x1b[2J"), "mute": Mute()}[body]

@register("command", "file")
def file(context, body):
    return "file \udcff"
"""

SCRIPT = r"""
import paceline.kvstore, sys

store = paceline.kvstore.create("dist_sync")
for head, body in [("evil", "bytes"), ("evil", "mute"), ("file", ""), ("ping", "\udcff"), ("ping", "still here")]:
    try:
        print("answer", store.send_command_to_servers(head, body), flush=True)
    except Exception as error:
        print(type(error).__name__, ascii(str(error)), flush=True)
sys.stderr.close()
raise RuntimeError("file \udcff \x1b]52;c;aGk=\x07")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder: Path = tmp_path_factory.mktemp("job")
    (folder / "mine.py").write_text(COMMANDS)
    (folder / "train.py").write_text(SCRIPT)
    launch = ["-m", "paceline", "launch", "-n", "1", "-s", "1", "--allow", "mine:Mute", "--timeout", "20", "--"]
    return programs.run([*launch, sys.executable, "train.py"], cwd=folder)


def test_server_answers_with_plain_text(ended: subprocess.CompletedProcess[str]) -> None:
    said = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    assert [one.partition(" ")[0] for one in said] == [
        "RemoteError",
        "RemoteError",
        "ValueError",
        "ValueError",
        "answer",
    ]
    assert r"OSError: file \\udcff \\x1b[2J" in said[0]
    assert "Mute: (its text cannot be made: __str__ raised OSError)" in said[1]
    assert "which a CommandAnswer has: it is no UTF-8" in said[2]
    assert "which a Command has: it is no UTF-8" in said[3]
    assert said[4] == "answer ['still here']"


def test_launcher_shows_the_reason_plain(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 1
    assert r"worker 0 failed: exit code 1: it raised RuntimeError: file \udcff \x1b]52;c;aGk=\x07, " in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
