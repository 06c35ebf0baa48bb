"""The programs of engines, and the files that grow while a job runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.engines.k8s.kubectl import Kubectl
from paceline.launch.engines.programs import FileTail, run_program


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that is not written yet."""
    path = tmp_path / "kubectl"
    path.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def test_refused_call_is_named_with_all_that_the_program_says(kubectl: Path) -> None:
    kubectl.write_text("#!/bin/sh\necho one >&2; echo two >&2; exit 1\n")
    with pytest.raises(LaunchError, match=r"^kubectl get refused: one\ntwo$"):
        Kubectl("space").get(["pods"])


def test_call_without_an_answer_is_named_with_its_limit(kubectl: Path) -> None:
    kubectl.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(LaunchError, match=r"^kubectl delete did not answer within 0\.1 s$"):
        Kubectl("space").run(["delete", "pods"], limit_s=0.1)


def test_program_that_fails_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(LaunchError, match=r"^sh refused: exit code 3$"):
        run_program(["sh", "-c", "exit 3"], "dash")


def test_program_that_the_kernel_does_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match=f"{program} cannot be run: Exec format error"):
        run_program([str(program)], "a package")


def test_missing_program_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"'kubectl' is not on the PATH of this machine; .* --dry-run"):
        Kubectl().version()


def test_file_that_grows_is_shown_line_by_line_and_its_end_without_a_line_feed(tmp_path: Path) -> None:
    path, out = tmp_path / "out", io.StringIO()
    tail = FileTail(path, out)
    tail.show()
    with open(path, "wb", buffering=0) as file:
        for data, shown in ((b"a\nb", "a\n"), (b"b\n\xe2\x82", "a\nbb\n"), (b"\xac", "a\nbb\n")):
            file.write(data)
            tail.show()
            assert out.getvalue() == shown
    tail.show(is_over=True)
    tail.show(is_over=True)
    assert out.getvalue() == "a\nbb\n\u20ac"
