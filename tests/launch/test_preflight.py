from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.preflight import CommandNotFoundError, check_command, readable_file


def test_command_is_found_on_the_path_or_by_its_own(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    check_command(["tool"], {"PATH": str(tmp_path)})
    check_command([str(tool)], {})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-tool"], "'no-such-tool' is not on the PATH"),
        (["./no-such-tool"], "'./no-such-tool' does not exist"),
        (["/"], "'/' is a directory"),
        (["./train.py", "--lr", "1"], "is not an executable file; did you mean: python ./train.py --lr 1"),
        (["train.py"], "did you mean: python train.py"),
        (["python train.py"], "not as one quoted string"),
    ],
)
def test_missing_command_is_named(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    with pytest.raises(CommandNotFoundError) as caught:
        check_command(argv, dict(os.environ))
    assert message in str(caught.value)


def test_path_of_a_readable_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("groups").write_text("0 1\n")
    assert readable_file("groups", "the groups file") == str(tmp_path / "groups")


@pytest.mark.parametrize(("path", "why"), [("missing", "No such file"), (".", "Is a directory")])
def test_unreadable_file_is_refused(path: str, why: str) -> None:
    with pytest.raises(LaunchError, match=f"the groups file '{path}' cannot be read: {why}"):
        readable_file(path, "the groups file")
