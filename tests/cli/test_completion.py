from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.app import COMMANDS
from paceline.cli.completion import options_of

#: Typed words, the last one unfinished, and what completes it.
CASES = [
    (["la"], {"launch"}),
    (["launch", "--num-w"], {"--num-workers"}),
    (["launch", "--launcher", "sl"], {"slurm"}),
    (["launch", "-n", "2", "--on-worker-death", ""], {"stop", "continue"}),
    (["profile", "--spe"], {"--speeds"}),
    (["kill", "--he"], {"--help", "--here"}),
    (["completion", ""], {"bash", "zsh", "fish"}),
    (["launch", "-n", "2", "--", "python", "--num-w"], set()),
]


def test_options_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = re.findall(r"^  (-\S.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
        flags = {word for line in shown for word in re.findall(r"(?<!\S)--?\w[\w-]*", line)}
        assert flags - {"-h", "--help"} == {flag for option in options_of(command) for flag in option.flags}, command


@pytest.mark.parametrize(("typed", "wanted"), CASES)
def test_bash_completes(typed: list[str], wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = " ".join(f"'{word}'" for word in ["paceline", *typed])
    call = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _shtab_paceline; echo "${{COMPREPLY[@]}}"'
    script = ["bash", "-c", capsys.readouterr().out + call]  # where no file is: without options it completes files
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_commands_options_and_values(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("profile", "num-workers", "slurm", "completion"))


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'paceline[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [([], "one shell is needed"), (["fsh"], "did you mean 'fish'?")])
def test_unknown_shell_is_an_error_that_names_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *words]) == 2
    assert said in capsys.readouterr().err
