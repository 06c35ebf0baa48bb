"""A script without a main guard whose worker spawns children."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import hvd
from paceline.worker import guard
from paceline.worker.current import current_session
from paceline.worker.leaving import Exit

SCRIPT = """
import multiprocessing, os, sys
from paceline.worker import guard

print("runs", flush=True)
guard.end_child()
spawn = multiprocessing.get_context("spawn")
children = [spawn.Process(target=print, args=("child",)) for _ in range(3)]
for child in children:
    child.start()
for child in children:
    child.join()
print([child.exitcode for child in children], guard.ended_a_child(), guard.ended_a_child())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def imports_main(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 4711)


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    env = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_spawned_children_of_a_script_without_a_guard_end_with_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT)
    assert done.stdout.splitlines()[-1] == "[1, 1, 1] True False"
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert 'no main guard (if __name__ == "__main__":)' in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_spawned_children_of_a_script_with_a_guard_run(tmp_path: Path) -> None:
    top, _, below = SCRIPT.partition("guard.end_child()")
    body = "".join(f"    {line}\n" for line in f"guard.end_child(){below}".splitlines())
    done = run(tmp_path, f'{top}if __name__ == "__main__":\n{body}')
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] False False"
    assert done.stdout.count("child") == 3
    assert done.stderr == ""


@pytest.mark.usefixtures("imports_main")
@pytest.mark.parametrize("start", [current_session, hvd.init])
def test_store_and_horovod_end_such_a_child_before_they_join(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SCHEDULER", "tcp://127.0.0.1:1")
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    with pytest.raises(SystemExit, match="the script has no main guard"):
        start()
    with pytest.raises(SystemExit) as second:
        start()
    assert second.value.code == 1, "only the first child of a parent says why"


def by_another_user(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 12345)


ODD = [
    Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null"), lambda path: path.symlink_to("nothing"),
    pytest.param(by_another_user, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")),
]  # fmt: skip


@pytest.mark.usefixtures("imports_main")
@pytest.mark.parametrize("make", ODD)
def test_what_others_put_in_place_of_the_file_neither_hides_the_line_nor_blames_the_guard(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    path = folder / f"paceline-{os.getuid()}-no-guard-4711"
    make(path)
    with pytest.raises(SystemExit, match="the script has no main guard"):
        guard.end_child()
    assert not guard.ended_a_child()
    assert os.path.lexists(path)


def test_error_of_the_parent_is_one_line_that_names_the_guard(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    class Session:
        failure = None

        def close(self, reason: str = "") -> None:
            said.append(reason)

    (folder / f"paceline-{os.getuid()}-no-guard-{os.getpid()}").touch()
    end = Exit()
    end.session = Session()
    monkeypatch.setattr(end, "_previous_hook", lambda *_: pytest.fail("a traceback"), raising=False)
    end._on_exception(RuntimeError, RuntimeError("a child ended"), None)
    line = f"RuntimeError: a child ended: {guard.SENTENCE}"
    assert capsys.readouterr().err == f"{line}\n"
    assert said == [f"it raised {line}"]


def test_where_no_folder_can_be_written_no_child_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert not guard.ended_a_child()
