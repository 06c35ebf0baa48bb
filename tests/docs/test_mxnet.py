"""docs/mxnet.md is true: names are as its table says, its script runs, and our scripts accept its command lines."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import mx
from paceline.cli.app import main
from paceline.kvstore import KVStore
from paceline.mx.gluon import Parameter, ReplicatedModule, Trainer
from tests.docs.pages import ROOT, blocks, rows

EXAMPLES = ROOT / "examples"
LINES = [[cell.strip("` ") for cell in row[:2]] + [row[2]] for row in rows("docs/mxnet.md", "## Command lines")]
TYPED = [row for row in LINES if row[1] != "-"]
LAUNCHERS = ("python ../../tools/launch.py", "../../tools/launch.py")

#: Objects whose methods the table of names has.
OBJECTS = {
    "mx": mx,
    "kv": KVStore,
    "module": mx.mod.Module,
    "net": mx.gluon.nn.Sequential,
    "param": Parameter("weight", mx.gluon.replicate(torch.nn.Linear(1, 1), mx.cpu())),
    "replicated": ReplicatedModule,
    "trainer": Trainer,
}


def test_names_are_what_the_table_says() -> None:
    for name, here, words in rows("docs/mxnet.md", "## Names"):
        first, *path = name.strip("`").split(".")
        found = OBJECTS[first]
        for one in path[:-1]:
            found = getattr(found, one)
        if here == "absent":
            with pytest.raises(AttributeError, match=re.escape(f"; use {words}") + "$"):
                getattr(found, path[-1])
        else:
            assert here == "the same" or (here == "differs" and words), name
            assert getattr(found, path[-1]) is not None, name


def test_script_of_the_page_trains() -> None:
    [script] = blocks("docs/mxnet.md", "python")
    names: dict[str, Any] = {}
    exec(script, names)
    assert all(one.mean() < 3 for one in names["losses"])


class ParsedError(Exception):
    """A script has accepted its command line."""


def script_of(words: list[str]) -> list[str]:
    """Return the script and its flags."""
    return words[words.index("python") + 1 :]


def run_script(patch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Run a script of the examples with these flags in this process."""
    patch.setattr(sys, "argv", [str(EXAMPLES / words[0]), *words[1:]])
    patch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    try:
        runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the lines name, as the current one."""
    monkeypatch.chdir(tmp_path)
    hosts = [f"10.10.10.{number}" for number in range(21, 33)]
    Path("hosts").write_text("\n".join(hosts))
    Path("groups").write_text(f"{' '.join(hosts[:4])}\n{' '.join(hosts[4:])}\n")
    for script in EXAMPLES.glob("*.py"):
        Path(script.name).symlink_to(script)
    return tmp_path


def test_only_what_the_table_says_was_changed() -> None:
    for there, here, change in TYPED:
        before = there.replace(LAUNCHERS[0], "paceline launch").replace(LAUNCHERS[1], "paceline launch")
        if change.startswith(("nothing", "the launcher's name")):
            assert set(shlex.split(before)) <= set(shlex.split(here)), here
            assert ";" in change or here == before


def test_launcher_makes_a_plan_of_each_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for here in [row[1] for row in TYPED if "paceline launch" in row[1]]:
        settings, _, line = here.rpartition("; ")
        program, *words = shlex.split(line)
        assert program == "paceline"
        with monkeypatch.context() as patch:
            for setting in settings.removeprefix("export ").split():
                patch.setenv(*setting.split("=", 1))
            assert main([words[0], "--dry-run", *words[1:]]) == 0, here
        assert shlex.join(script_of(words)) in capsys.readouterr().out


def test_scripts_accept_the_flags_of_the_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *words: object) -> None:
        parse(parser)
        raise ParsedError

    for here in [row[1] for row in TYPED if "python" in row[1]]:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
            with pytest.raises(ParsedError):
                run_script(patch, script_of(shlex.split(here.rpartition("; ")[2])))


def test_line_without_a_launcher_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [here] = [row[1] for row in TYPED if row[1].startswith("python") and "--gpus" not in row[1]]
    run_script(monkeypatch, [*script_of(shlex.split(here)), "--num-epochs", "1", "--num-examples", "64"])
    assert "epoch 0: " in capsys.readouterr().out


def test_scripts_of_mxnet_g_that_are_named_are_there() -> None:
    named = [word for row in TYPED for word in row[1].split() if word.endswith(".sh")]
    assert named
    assert all((EXAMPLES / name).exists() for name in named)
