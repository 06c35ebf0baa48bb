"""The wheel in an empty environment, as a new user has it. ``nox -s wheel`` runs this: it installs PyTorch.

``PACELINE_TEST_WHEEL`` is the path of a wheel, or 1: one is built.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_docs import long_description

pytestmark = pytest.mark.skipif(not os.environ.get("PACELINE_TEST_WHEEL"), reason="nox -s wheel")
_OURS = ("PACELINE_", "PYTHON", "VIRTUAL_ENV")


def call(words: Sequence[str | Path], folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program of the folder's ``bin``, with nothing of the developer's environment."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    env = own | {"PATH": f"{folder.parent}/venv/bin:{os.environ['PATH']}"}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True, timeout=900)  # noqa: PLW1510
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ["PACELINE_TEST_WHEEL"] != "1":
        return (ROOT / os.environ["PACELINE_TEST_WHEEL"]).resolve(strict=True)
    folder = tmp_path_factory.mktemp("build")
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    call([sys.executable, *words], folder)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside an environment that has paceline and what it needs, and nothing else."""
    home = tmp_path_factory.mktemp("user")
    call([sys.executable, "-m", "venv", home / "venv"], home)
    call([home / "venv/bin/pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel], home)
    (home / "work").mkdir()
    return home / "work"


def test_page_of_the_index_is_the_readme_with_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata.get_payload(decode=True).decode().strip() == long_description().strip()  # type: ignore[union-attr]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(metadata.get_all("Project-URL") or ()) == 4


def test_wheel_of_a_release_lists_what_it_was_tried_with(tmp_path: Path) -> None:
    """A wheel made by way of the sdist, from a clone without history and tags."""
    source, sbom = tmp_path / "source", tmp_path / "paceline.cdx.json"
    sbom.write_text('{"bomFormat": "CycloneDX"}')
    call(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", source], tmp_path)
    call([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    call([tmp_path / "venv/bin/pip", "install", "--quiet", "build"], tmp_path)
    call(
        ["env", f"PACELINE_SBOM={sbom}", tmp_path / "venv/bin/python", "-m", "build", "--outdir", tmp_path, source],
        tmp_path,
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (tmp_path / f"paceline-{version}.tar.gz").exists()
    with zipfile.ZipFile(tmp_path / f"paceline-{version}-py3-none-any.whl") as archive:
        assert archive.read(f"paceline-{version}.dist-info/sboms/paceline.cdx.json").decode() == sbom.read_text()


DDP_SCRIPT = """
import torch
from torch import distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.ones(2, 3) * dist.get_rank()).sum().backward()
print(dist.get_backend(), model.module.weight.grad.tolist())
dist.destroy_process_group()
"""


def test_ddp_script_runs_unchanged(user: Path) -> None:
    (user / "ddp.py").write_text(DDP_SCRIPT)
    done = call(["paceline", "launch", "--ddp", "--nproc-per-node", "2", "--", "ddp.py"], user)
    assert done.stdout.count("paceline [[1.0, 1.0, 1.0]]") == 2


def test_readme_scripts_run_word_for_word(user: Path) -> None:
    [first], [second] = blocks("README.md", "python"), blocks("docs/saving.md", "python")
    (user / "train.py").write_text(first)
    (user / "resume.py").write_text(second)
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs/saving.md").read_text()
    for command in ("paceline launch -n 4 -s 2 -- python train.py", "paceline launch -n 2 -s 1 -- python resume.py"):
        assert command in shown
        assert "[worker 0] epoch 2: " in call(command.split(), user).stdout
    assert "epoch" not in call(command.split(), user).stdout  # it goes on after the last epoch


def test_missing_extra_is_named_once(user: Path) -> None:
    (user / "lit.py").write_text("from paceline.lightning import PacelineStrategy\n")
    shown = call(["paceline", "launch", "-n", "4", "--", "python", "lit.py"], user, 1).stderr
    shown, _, report = shown.partition("\n---")
    assert shown.count("MissingExtraError: paceline.lightning needs lightning: pip install 'paceline[lightning]'") == 1
    assert "MissingExtraError" in report
    (user / "one.py").write_text("raise SystemExit('not even started')\n")
    words = ["paceline", "launch", "-n", "2", "--groups", "auto", "--", "python", "one.py"]
    assert call(words, user, 1).stderr == (
        "paceline launch: groups by speed need scikit-learn: pip install 'paceline[hetero]'\n"
    )


def test_help_version_and_names_need_no_extra(user: Path) -> None:
    assert call(["paceline", "--version"], user).stdout.startswith("paceline ")
    assert "pip install 'paceline[completion]'" in call(["paceline", "completion", "bash"], user, 1).stderr
    code = "import paceline; print(*dir(paceline)); help(paceline); [getattr(paceline, name) for name in dir(paceline)]"
    assert "lightning" not in call(["python", "-c", code], user).stdout.splitlines()[0]
