from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launch.preflight import CommandNotFoundError, check_command, make_folder, read_text, variables_read


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
        (["./run", "2"], "'./run' is not an executable file; make it one: chmod +x ./run"),
        (["run", "2"], "'run' is not on the PATH; did you mean: ./run 2"),
    ],
)
def test_missing_command_is_named(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("run").write_text("")
    with pytest.raises(CommandNotFoundError) as caught:
        check_command(argv, dict(os.environ))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "why"), [("missing", "No such file"), (".", "Is a directory"), ("", "its name is empty")]
)
def test_unreadable_file_is_refused(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"the groups file '{path}' cannot be read: {why}"):
        read_text(path, "the groups file")


def test_mark_at_the_begin_of_a_file_of_windows_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1\r\nnode2\r\n")
    assert read_text(str(tmp_path / "hosts"), "the hostfile").split() == ["node1", "node2"]


def test_text_is_read_alike_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("# fünf\nnode1\n".encode())
    code = (
        f"from paceline.launch.preflight import read_text; print(ascii(read_text({str(tmp_path / 'hosts')!r}, 'it')))"
    )
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (r"'# f\xfcnf\nnode1\n'", "")


def test_folder_is_made_unless_a_file_is_in_its_place(tmp_path: Path) -> None:
    make_folder(str(tmp_path / "a" / "b"), "the folder")
    make_folder(str(tmp_path / "a" / "b"), "the folder")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the folder '.*/file' cannot be made: File exists"):
        make_folder(str(tmp_path / "file"), "the folder")


def test_variables_that_a_command_reads_are_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, settings\nos.environ['DATA']\n")
    (tmp_path / "settings.py").write_text('os.getenv("TOKEN", None)')
    found = variables_read(["python", f"{tmp_path}/train.py", "--lr", "$LR", "${DEPTH}x", f"{tmp_path}/gone.py"])
    assert found == {"DATA", "TOKEN", "LR", "DEPTH"}


def test_program_that_is_longer_than_a_file_name_is_no_file() -> None:
    assert variables_read(["python", "-c", "x" * 9000]) == set()
