"""The documents are true: their code runs, their tables are complete."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from paceline.config import ALIASES, Settings
from paceline.kvstore.checkpoint.tensor_file import read

ROOT = Path(__file__).parents[2]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_readme_script_trains_under_the_launcher(tmp_path: Path) -> None:
    [script, _] = blocks("README.md", "python")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "train.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_readme_script_runs_alone_with_the_local_store(tmp_path: Path) -> None:
    [script, _] = blocks("README.md", "python")
    (tmp_path / "train.py").write_text(script.replace('"dist_sync"', '"local"'))
    done = subprocess.run(
        [sys.executable, "train.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 2" in done.stdout


def test_readme_script_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    [_, script] = blocks("README.md", "python")
    script = script.replace("batch_size=32", "batch_size=128").replace("first_epoch, 4", "first_epoch, 2")
    runs = [("whole", 1, script), ("broken", 1, script.replace("first_epoch, 2", "1")), ("broken", 2, script)]
    for folder, servers, text in runs:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "resume.py").write_text(text)
        launch = ["launch", "-n", "2", "-s", str(servers), "--", sys.executable, "resume.py"]
        command = [sys.executable, "-m", "paceline", *launch]
        done = subprocess.run(command, check=False, cwd=tmp_path / folder, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
    whole, broken = (read(tmp_path / folder / "job.ckpt", "a training job") for folder in ("whole", "broken"))
    assert whole.manifest["step"] == broken.manifest["step"] > 0
    assert whole.tensors.keys() == broken.tensors.keys()
    # Python's and NumPy's random numbers have other seeds in each run; the script does not draw any.
    names = [name for name in whole.tensors if not name.startswith(("rank0/rng/python", "rank0/rng/numpy"))]
    assert [name for name in names if not torch.equal(whole.tensors[name], broken.tensors[name])] == []


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Settings)])
def test_every_setting_is_documented_with_its_default(field: str) -> None:
    default = getattr(Settings, field)
    row = f"| `{field}` | `{default!r}` | "
    lines = [line for line in (ROOT / "docs/settings.md").read_text().splitlines() if line.startswith(row)]
    assert len(lines) == 1, f"docs/settings.md has no row {row}"
    assert len(lines[0]) > len(row) + 10, "a setting needs a sentence"


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_every_alias_is_documented(alias: str) -> None:
    assert f"`{alias}`" in (ROOT / "docs/settings.md").read_text()


def test_links_of_the_package_index_are_those_of_the_readme_made_absolute() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    source = project["project"]["urls"]["Source"]
    shown, readme = long_description(), (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(", readme)) > 10
    ours = [link.removeprefix(f"{source}/blob/main/") for link in links if link.startswith(source)]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert [path for path in ours if not (ROOT / path).exists()] == []
    assert all(url.startswith(source) for url in project["project"]["urls"].values())
    files = [url.partition("/main/")[2] for url in project["project"]["urls"].values()]
    assert [path for path in files if not (ROOT / path).exists()] == []


def long_description() -> str:
    """Return README.md as the build puts it into the package's metadata."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for one in hook["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"
