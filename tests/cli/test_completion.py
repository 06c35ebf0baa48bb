from __future__ import annotations

import re
import shutil
import subprocess
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


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_those_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = re.findall(r"^  (-\S.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    flags = {word for line in shown for word in re.findall(r"(?<!\S)--?\w[\w-]*", line)}
    assert flags - {"-h", "--help"} == {flag for option in options_of(command) for flag in option.flags}


@pytest.mark.parametrize(("typed", "wanted"), CASES)
def test_bash_completes(typed: list[str], wanted: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = " ".join(f"'{word}'" for word in ["paceline", *typed])
    call = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _paceline; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", capsys.readouterr().out + call], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(("typed", "wanted"), CASES)
def test_fish_completes(typed: list[str], wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    call = f"complete -C '{' '.join(['paceline', *typed])}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", capsys.readouterr().out + call],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {line.partition("\t")[0] for line in done.stdout.splitlines()} == wanted
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
@pytest.mark.parametrize(("typed", "wanted"), CASES)
def test_zsh_completes(typed: list[str], wanted: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    words = " ".join(f"'{word}'" for word in ["paceline", *typed])
    load = "autoload -Uz compinit && compinit -D -u\n"
    # As zsh's own _bash_complete calls it.
    call = (
        "() { emulate -L sh; setopt kshglob noshglob braceexpand ksharrays\n"
        f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMPREPLY=(); _paceline; print -l -- "${{COMPREPLY[@]}}"; }}'
    )
    done = subprocess.run(
        ["zsh", "-fc", load + capsys.readouterr().out + call], capture_output=True, text=True, check=True
    )
    # zsh leaves out what does not begin with the typed word when it shows them.
    assert {word for word in done.stdout.split() if word.startswith(typed[-1])} == wanted
    assert done.stderr == ""


@pytest.mark.parametrize(("words", "said"), [([], "one shell is needed"), (["fsh"], "did you mean 'fish'?")])
def test_unknown_shell_is_an_error_that_names_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", *words]) == 2
    assert said in capsys.readouterr().err
