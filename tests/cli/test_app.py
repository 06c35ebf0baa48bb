from __future__ import annotations

import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import paceline
from paceline.cli import main
from paceline.cli.app import COMMANDS
from paceline.errors import DeadlineError


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_overview_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {paceline.__version__}\n"


def test_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch"]) == 2
    assert (
        capsys.readouterr().err == "paceline: unknown command 'lanch'; did you mean 'launch'?\ntry: paceline --help\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"paceline {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DeadlineError("worker 1 did not come"), 1, "paceline server: worker 1 did not come\n"),
        (KeyboardInterrupt(), 130, "paceline: interrupted\n"),
    ],
)
def test_failed_role_says_why_without_a_traceback(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: object) -> int:
        raise error

    role = types.ModuleType("paceline.server.process")
    role.main = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.server.process", role)
    assert main(["server", "--scheduler", "tcp://127.0.0.1:1", "--insecure"]) == code
    assert capsys.readouterr().err == text


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("paceline.cli"):
                raise KeyboardInterrupt

    for name in [one for one in sys.modules if one.startswith("paceline.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("paceline.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["launch", "-n", "2", "--", "true"]) == 130


@pytest.mark.parametrize("words", [["--version"], ["completion", "bash"]])
def test_reader_that_has_left_is_no_news(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "paceline", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["jobs"], ["launch", "-n", "1", "--dry-run", "--", "true"]])
def test_full_disk_behind_stdout_is_an_error_in_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "paceline", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    why = "paceline: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, why)


@pytest.mark.parametrize(
    ("package", "words"),
    [("torch", ["server", "--scheduler", "tcp://127.0.0.1:1", "--insecure"]), ("psutil", ["agent"])],
)
def test_missing_package_is_named_with_its_python(package: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "installed.dist-info").mkdir()  # roles search folders of packages only
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name={package!r})")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-P", "-m", "paceline", *words]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    python = sys.executable
    why = f"paceline: {python} has no package {package}, which paceline needs: {python} -m pip install {package}\n"
    assert (ended.returncode, ended.stderr) == (1, why)


def test_help_explains_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "launch"])
    assert "paceline launch -n N" in capsys.readouterr().out


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)


HEAVY = "torch", "numpy", "cryptography", "msgspec", "rich", "asyncio", "email", "importlib.metadata"


@pytest.mark.parametrize(
    "words", [["--help"], ["launch", "-n", "2", "--dry-run", "--", "sh"], ["launch", "-n", "1", "-s", "0", "true"]]
)
def test_launcher_does_not_import_torch(words: list[str]) -> None:
    code = f"import sys; from paceline.cli import main; assert main({words}) == 0; print('loaded', *sys.modules)"
    loaded = python(code).stdout.splitlines()[-1].split()
    assert "paceline.cli.app" in loaded
    assert not set(HEAVY) & set(loaded)


def test_agent_on_a_host_needs_little() -> None:
    """It may run with another Python than the workers, beside a copy of the directory."""
    loaded = python("import sys, paceline.launch.remote.agent; print(*sys.modules)").stdout.split()
    assert "psutil" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize(
    ("stdin", "why"),
    [("hello\n", "is not a line of the agent's protocol"), ('["dance"]\n', "'dance' is not understood")],
)
def test_agent_that_no_launcher_talks_to_says_so(stdin: str, why: str) -> None:
    command = [sys.executable, "-m", "paceline", "agent"]
    ended = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert "paceline agent: stdin is not that of a launcher" in ended.stderr
    assert why in ended.stderr


def test_agent_with_a_file_as_stdin_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "agent"]
    (tmp_path / "words").touch()
    with (tmp_path / "words").open() as stdin:
        ended = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert "paceline agent: stdin is not that of a launcher" in ended.stderr


def test_every_module_of_launcher_and_command_line_does_without_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, paceline.launch, paceline.cli\n"
        "for package in (paceline.launch, paceline.cli):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        try:\n"
        "            importlib.import_module(module.name)\n"
        "        except ModuleNotFoundError as error:\n"
        "            assert error.name == 'ray', error  # runs inside an engine that is not installed\n"
        "print(*sys.modules)"
    )
    loaded = python(code).stdout.split()
    assert "paceline.launch.supervise.supervisor" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("words", [["--help"], ["launch", "-n", "4", "--dry-run", "--", "sh"]])
def test_command_line_starts_in_less_than_four_imports_of_asyncio(words: list[str]) -> None:
    """On an idle machine that is a third of a second; processor time of both, as others' load is not ours."""

    def cpu_s(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [(cpu_s("-m", "paceline", *words), cpu_s("-c", "import asyncio")) for _ in range(3)]
    ours, unit = map(min, zip(*times, strict=True))
    assert ours < 4 * unit


def test_what_is_imported_before_ctrl_c_is_caught_is_little() -> None:
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = "import sys, paceline.cli; raise SystemExit('typing' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False, env=path, timeout=60).returncode == 0
