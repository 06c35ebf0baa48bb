from __future__ import annotations

import subprocess
import sys
import types

import pytest

from paceline.cli import main
from paceline.config import Settings

GIVEN: list[Settings] = []


@pytest.fixture(params=["server", "scheduler"])
def role(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A role whose main only notes its settings: what a role does with them is tested with the roles."""

    def note(settings: Settings) -> int:
        GIVEN.append(settings)
        return 17

    module = types.ModuleType(f"paceline.{request.param}.process")
    module.main = note  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("paceline.cli.roles._end", int)  # in a job the process ends there
    monkeypatch.setattr(sys, "path", [*sys.path])  # a role takes folders out
    return str(request.param)


def test_role_gets_its_settings_and_gives_the_exit_code(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_JOB_KEY", "k" * 40)
    monkeypatch.setenv("PACELINE_NUM_WORKERS", "5")
    monkeypatch.setenv("PACELINE_ROLE", "worker")
    words = ["--scheduler", "tcp://h:1", "--num-servers", "3", "--timeout", "2.5", "--log-level", "INFO"]
    assert main([role, *words]) == 17
    settings = GIVEN[-1]
    assert (settings.role, settings.scheduler, settings.job_key) == (role, "tcp://h:1", "k" * 40)
    assert (settings.num_workers, settings.num_servers, settings.timeout_s) == (5, 3, 2.5)
    assert (settings.log_level, settings.insecure) == ("INFO", False)


def test_option_is_stronger_than_variable(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NUM_WORKERS", "5")
    assert main([role, "--scheduler", "tcp://h:1", "--insecure", "--num-workers", "2"]) == 17
    assert (GIVEN[-1].num_workers, GIVEN[-1].insecure) == (2, True)


def test_allowed_optimizers_may_be_repeated(role: str) -> None:
    words = [role, "--scheduler", "tcp://h:1", "--insecure", "--allow", "a.b:C", "--allow", "d:E"]
    if role == "server":
        assert main(words) == 17
        assert GIVEN[-1].allow == "a.b:C,d:E"
    else:
        assert main(words) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the address of the scheduler is missing"),
        (["--scheduler", "tcp://h:1"], "this process has no job key"),
        (["--scheduler", "tcp://h:1", "--insecure", "--num-workers", "x"], "--num-workers='x' is not an integer"),
        (["--insecure", "--num-workers", "0"], "num_workers is 0"),
        (["--scheduler", "foo"], "scheduler is 'foo'; it is an address of the form tcp://HOST:PORT"),
        (["--scheduler", "tcp://h:99999"], "scheduler is 'tcp://h:99999'"),
        (["--scheduler", "http://h:80"], "scheduler is 'http://h:80'"),
        (["--scheduler", "tcp://h:1", "--timeout", "inf"], "timeout_s is inf; every wait needs a deadline"),
        (["word"], "unexpected word 'word'"),
        (["--job-key", "x"], "unknown option '--job-key'"),
    ],
)
def test_mistake_is_explained(role: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(GIVEN)
    assert main([role, *words]) == 2
    assert message in capsys.readouterr().err
    assert len(GIVEN) == before


def test_a_role_ends_as_python_does_but_takes_no_module_down() -> None:
    code = """
import atexit, threading, time
from paceline.cli.roles import _end

class Module:
    def __del__(self):
        print("taken down")

kept = Module()
atexit.register(print, "told at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("joined"))).start()
print("not flushed", end=" ")
_end(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "not flushed joined\ntold at exit\n"
