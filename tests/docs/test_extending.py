"""The package of one's own that docs/extending.md shows: its tests pass, and servers train with what it offers."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import paceline
from paceline.testing import LocalJob
from tests.clusters import programs

TEXT = (Path(__file__).parents[2] / "docs/extending.md").read_text()
#: A path, a sentence or two, and the text of the file.
_FILE = re.compile(
    r"^`((?:mypace|tests)/\w+\.py|pyproject\.toml)`(?:(?!```).)*?\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed in a folder as pip does it: its modules, and its entry points as metadata.

    Programs have it on their path if they start in this folder.
    """
    folder = tmp_path_factory.mktemp("mypace")
    for path, text in _FILE.findall(TEXT):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"mypace-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mypace\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def test_all_files_are_found(package: Path) -> None:
    written = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert written == {
        "mypace/lion.py", "mypace/niced.py", "mypace/root.py", "mypace/scaledsign.py",
        "tests/test_lion.py", "tests/test_root.py", "tests/test_scaledsign.py",
    }  # fmt: skip


def test_its_tests_pass(package: Path) -> None:
    done = programs.run(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests"], cwd=package, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def train() -> list[float]:
    """Train with the codec, the weighting and the optimizer of the package, none of which this file imports."""
    store = paceline.kvstore.create("dist_async", weighting="root")
    store.set_gradient_compression({"type": "scaledsign"})
    store.set_optimizer("lion", lr=0.1)
    store.init("w", torch.zeros(4))
    out = torch.empty(4)
    for _ in range(3):
        store.push("w", torch.ones(4))
        store.pull("w", out)
    result: list[float] = out.tolist()
    return result


def test_servers_find_it_by_its_entry_points(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    with LocalJob(1, 1) as job:
        [weights] = job.run(train)
    torch.testing.assert_close(torch.tensor(weights), torch.full((4,), -0.3))


def test_launcher_runs_a_job(package: Path) -> None:
    launch = ["-m", "paceline", "launch", "-n", "1", "-s", "0", "--launcher", "niced", "--"]
    script = [sys.executable, "-c", "import os; print('niceness', os.nice(0))"]
    done = programs.run([*launch, *script], cwd=package)
    assert done.returncode == 0, done.stderr
    assert f"niceness {min(19, os.nice(0) + 19)}" in done.stdout
