from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import Host, JobSpec, Machine, make_plan
from paceline.launch.interpreter import check_ddp, other_python, own_python, with_own_folder
from tests.clusters import programs

DDP = {"PACELINE_DDP": "1", "PACELINE_LOCAL_RANK": "0"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another virtual environment of the same interpreter, without any package."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin"


def test_python_of_a_command_is_the_interpreter_of_paceline() -> None:
    assert own_python(["python", "train.py"], "/opt/py/bin/python3") == ("/opt/py/bin/python3", "train.py")
    assert own_python(["/usr/bin/python3", "a"], "/opt/py/bin/python3") == ("/usr/bin/python3", "a")
    assert own_python(["sh", "python"], "/opt/py/bin/python3") == ("sh", "python")


def test_a_path_that_the_user_gives_the_workers_decides() -> None:
    spec = JobSpec(("python", "a.py"), 2, hosts=(Host("h1"), Host("h2")), env_worker={"PATH": "/mine"})
    assert {one.argv[0] for one in make_plan(spec, Machine("/opt/python")) if one.role == "worker"} == {"python"}
    alone = make_plan(JobSpec(("python", "a.py"), 1), Machine("/opt/python"), alone=True)
    assert [one.argv[0] for one in alone if one.role == "worker"] == ["python"]


def test_another_python_that_the_shell_would_start_is_named(other: Path, tmp_path: Path) -> None:
    assert other_python(["python"], {"PATH": str(other)}) == str(other / "python")
    assert other_python([str(other / "python")], {"PATH": str(other)}) == ""
    assert other_python(["python"], {"PATH": os.path.dirname(sys.executable)}) == ""
    (tmp_path / "python").write_text("#!/bin/sh\nexec /some/python\n")
    (tmp_path / "python").chmod(0o755)
    assert other_python(["python"], {"PATH": str(tmp_path)}) == ""


def test_folder_of_the_interpreter_is_the_first_of_the_path_unless_it_is_one_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/conda/envs/a/bin/python")
    assert with_own_folder({"PATH": "/bin:/opt/conda/envs/a/bin"})["PATH"] == "/opt/conda/envs/a/bin:/bin"
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert with_own_folder({"PATH": "/mine:/usr/bin"})["PATH"] == "/mine:/usr/bin"


def test_ddp_needs_a_python_that_has_paceline(other: Path) -> None:
    environ = dict(os.environ)
    with pytest.raises(LaunchError, match=f"no effect: {other}/python has no paceline installed.*{sys.executable} "):
        check_ddp([str(other / "python"), "train.py"], environ | DDP)
    check_ddp([str(other / "python"), "train.py"], environ)  # a job without --ddp
    check_ddp([sys.executable, "train.py"], environ | DDP)
    check_ddp(["sh", "train.sh"], environ | DDP)


def test_worker_runs_with_the_launchers_python_whatever_the_path_has(other: Path) -> None:
    code = "import sys; print(sys.executable)"
    words = ["-m", "paceline", "launch", "-n", "1", "-s", "0", "--", "python", "-c", code]
    done = programs.run(words, env={"PATH": f"{other}{os.pathsep}{os.environ['PATH']}"}, timeout_s=60)
    assert done.stdout == f"[worker 0] {sys.executable}\n"
    assert f"paceline: python of the command is {sys.executable}" in done.stderr
    assert f"and not {other}/python" in done.stderr


def test_switch_of_pytorch_does_not_count_for_workers_of_ddp() -> None:
    words = ["launch", "-n", "1", "--ddp", "--quiet", "--", "sh", "-c", "echo $TORCH_DEVICE_BACKEND_AUTOLOAD"]
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # an interpreter reads it at its start
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[worker 0] 1\n"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 does not count for the workers" in done.stderr
